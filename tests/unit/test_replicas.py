"""The replica table by example: one test or more for each row of the tables in its docstring."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from controller_client.protocol import ReadyReplica
from lb.policies import SelectionPolicy, least_load, round_robin
from lb.replicas import Lease, Replica, ReplicaTable, State, TableChange

GRACE = 30.0
DRAIN = 600.0


class Longest(random.Random):
    """Jitter that takes nothing off, and leaves a list in its order."""

    def uniform(self, a: float, b: float) -> float:
        return b

    def random(self) -> float:
        return 0.0


def ready(*urls: str, accelerator: str | None = None) -> list[ReadyReplica]:
    return [ReadyReplica(url, accelerator) for url in urls]


def table_of(
    *urls: str,
    grace_period: float = GRACE,
    drain_timeout: float = DRAIN,
    policy: SelectionPolicy | None = None,
    peers: int = 0,
    jitter: random.Random | None = None,
) -> ReplicaTable:
    """A table that took in a list of these at 0 s."""
    table = ReplicaTable(
        policy or least_load(None),
        grace_period=grace_period,
        drain_timeout=drain_timeout,
        peers=peers,
        jitter=jitter or Longest(),
    )
    if urls:
        table.apply(ready(*urls), 0.0)
    return table


def replica_of(table: ReplicaTable, url: str) -> Replica:
    (replica,) = (replica for replica in table if replica.url == url)
    return replica


def states(table: ReplicaTable) -> dict[str, str]:
    return {replica.url: replica.state.value for replica in table}


def lease_of(table: ReplicaTable, now: float, *tried: Replica) -> Lease:
    lease = table.lease(now, tried=tried)
    assert lease is not None
    return lease


@contextmanager
def leased(table: ReplicaTable, now: float, *tried: Replica) -> Iterator[Lease]:
    lease = lease_of(table, now, *tried)
    yield lease
    lease.release()


def fail(table: ReplicaTable, now: float, *, unreachable: bool = True) -> Replica:
    """One attempt that fails at once, on whichever replica is chosen."""
    with leased(table, now) as lease:
        table.failed(lease, now, unreachable=unreachable)
    return lease.replica


def ejected_for(replica: Replica, now: float) -> float:
    assert replica.ejected_until is not None
    return replica.ejected_until - now


# --- a non-empty list names it ------------------------------------------------------------------


def test_a_list_names_a_serving_replica_it_stays_and_its_accelerator_is_updated() -> None:
    table = table_of("a")
    a = replica_of(table, "a")
    assert table.apply(ready("a", accelerator="A100"), 20.0) == TableChange()
    assert replica_of(table, "a") is a
    assert (a.state, a.accelerator) == (State.SERVING, "A100")
    table.apply(ready("a"), 40.0)
    assert a.accelerator is None


def test_a_list_names_a_held_replica_it_is_serving() -> None:
    table = table_of("a")
    a = replica_of(table, "a")
    table.apply([], 20.0)
    assert a.state is State.HELD
    assert table.apply(ready("a", accelerator="L4"), 40.0) == TableChange()
    assert replica_of(table, "a") is a
    assert (a.state, a.accelerator) == (State.SERVING, "L4")


def test_a_list_names_a_draining_replica_the_same_object_is_revived() -> None:
    table = table_of("a", "b")
    a = replica_of(table, "a")
    running = lease_of(table, 1.0, replica_of(table, "b"))
    table.apply(ready("b"), 20.0)
    assert table.apply(ready("a", "b", accelerator="T4"), 40.0) == TableChange(revived=(a,))
    assert replica_of(table, "a") is a
    assert (a.state, a.accelerator, a.inflight) == (State.SERVING, "T4", 1)
    running.release()
    assert a.inflight == 0


def test_a_list_names_an_unknown_replica_it_is_added() -> None:
    table = table_of("a")
    change = table.apply(ready("a", "b", accelerator="H100"), 20.0)
    b = replica_of(table, "b")
    assert change == TableChange(added=(b,))
    assert (b.state, b.accelerator, b.inflight) == (State.SERVING, "H100", 0)


def test_a_list_that_names_a_replica_twice_counts_it_once() -> None:
    table = table_of()
    change = table.apply([ReadyReplica("a", "A100"), ReadyReplica("a", "L4")], 0.0)
    assert [replica.url for replica in change.added] == ["a"]
    assert len(table) == 1
    table.apply(ready("b"), 1.0)
    assert table.apply(ready("a", "a", "b"), 2.0).revived == change.added


# --- a non-empty list omits it ------------------------------------------------------------------


def test_a_list_omits_a_serving_replica_it_drains() -> None:
    table = table_of("a", "b")
    a = replica_of(table, "a")
    assert table.apply(ready("b"), 20.0) == TableChange(removed=(a,))
    assert states(table) == {"a": "draining", "b": "serving"}
    assert {lease_of(table, 21.0).replica.url for _ in range(3)} == {"b"}
    assert table.lease(21.0, tried=[replica_of(table, "b")]) is None


def test_a_list_omits_a_held_replica_it_drains() -> None:
    table = table_of("a", "b")
    a = replica_of(table, "a")
    table.apply([], 20.0)
    assert table.apply(ready("b"), 40.0) == TableChange(removed=(a,))
    assert states(table) == {"a": "draining", "b": "serving"}


def test_a_list_omits_a_draining_replica_it_goes_on_draining_since_it_began() -> None:
    table = table_of("a", "b")
    table.apply(ready("b"), 20.0)
    assert table.apply(ready("b"), 40.0) == TableChange()
    assert states(table) == {"a": "draining", "b": "serving"}
    assert [replica.url for replica in table.retire(20.0 + GRACE)] == ["a"]


# --- an empty list ------------------------------------------------------------------------------


def test_an_empty_list_within_the_grace_period_holds_what_serves() -> None:
    table = table_of("a", "b")
    replicas = tuple(table)
    assert table.apply([], 20.0) == TableChange(held=replicas)
    assert states(table) == {"a": "held", "b": "held"}
    assert table.routable() == list(replicas)
    assert lease_of(table, 21.0).replica in replicas
    assert table.apply([], 20.0 + GRACE - 0.1) == TableChange()
    assert states(table) == {"a": "held", "b": "held"}


def test_an_empty_list_within_the_grace_period_leaves_a_draining_replica_draining() -> None:
    table = table_of("a", "b")
    table.apply(ready("b"), 20.0)
    assert table.apply([], 21.0) == TableChange(held=(replica_of(table, "b"),))
    assert states(table) == {"a": "draining", "b": "held"}


def test_an_empty_list_after_the_grace_period_releases_what_was_held() -> None:
    table = table_of("a", "b")
    replicas = tuple(table)
    table.apply([], 20.0)
    assert table.apply([], 20.0 + GRACE) == TableChange(released=replicas)
    assert states(table) == {"a": "draining", "b": "draining"}
    assert table.routable() == []
    assert table.lease(20.0 + GRACE) is None
    assert table.apply([], 20.0 + GRACE + 1.0) == TableChange()


def test_an_empty_list_after_the_grace_period_leaves_a_draining_replica_draining() -> None:
    table = table_of("a", "b")
    b = replica_of(table, "b")
    table.apply(ready("b"), 19.0)
    table.apply([], 20.0)
    assert table.apply([], 20.0 + GRACE) == TableChange(released=(b,))
    assert [replica.url for replica in table.retire(20.0 + GRACE)] == ["a"]


def test_the_grace_period_starts_with_the_first_empty_list_after_one_that_was_not() -> None:
    table = table_of("a")
    table.apply([], 20.0)
    table.apply(ready("a"), 40.0)
    table.apply([], 60.0)
    assert table.apply([], 60.0 + GRACE - 0.1) == TableChange()
    assert table.apply([], 60.0 + GRACE).released == tuple(table)


def test_a_grace_period_of_0_is_none() -> None:
    table = table_of("a", grace_period=0.0)
    assert table.apply([], 20.0) == TableChange(released=tuple(table))
    assert [replica.url for replica in table.retire(20.0)] == ["a"]


def test_an_empty_list_on_an_empty_table_changes_nothing() -> None:
    table = table_of()
    assert table.apply([], 0.0) == TableChange()
    assert not table.apply([], GRACE)
    assert (list(table), table.lease(0.0)) == ([], None)


# --- a failed sync ------------------------------------------------------------------------------


def test_a_failed_sync_changes_nothing_however_long_they_go_on_failing() -> None:
    # The table is not told of a failed sync: only `retire` is called, and time passes.
    table = table_of("a", "b", "c")
    table.apply(ready("a", "b"), 10.0)
    table.apply([], 20.0)
    for now in (22.0, 9_999.0):
        table.retire(now)
        assert {url: state for url, state in states(table).items() if url != "c"} == {
            "a": "held",
            "b": "held",
        }
    assert lease_of(table, 9_999.0).replica.url in {"a", "b"}


# --- retire -------------------------------------------------------------------------------------


def test_retire_takes_an_idle_draining_replica_when_its_grace_period_is_over() -> None:
    table = table_of("a", "b")
    a = replica_of(table, "a")
    table.apply(ready("b"), 20.0)
    assert table.retire(20.0 + GRACE - 0.1) == ()
    assert table.retire(20.0 + GRACE) == (a,)
    assert a.state is State.RETIRED
    assert not a.routable
    assert states(table) == {"b": "serving"}


def test_retire_waits_for_the_leases_of_a_draining_replica() -> None:
    table = table_of("a")
    lease = lease_of(table, 1.0)
    table.apply(ready("b"), 20.0)
    assert table.retire(20.0 + DRAIN - 0.1) == ()
    lease.release()
    assert table.retire(20.0 + DRAIN - 0.1) == (lease.replica,)


def test_retire_takes_a_busy_draining_replica_when_the_drain_time_out_is_over() -> None:
    table = table_of("a")
    lease = lease_of(table, 1.0)
    table.apply(ready("b"), 20.0)
    assert table.retire(20.0 + DRAIN) == (lease.replica,)
    assert lease.replica.inflight == 1
    lease.release()
    assert lease.replica.inflight == 0


def test_retire_takes_no_serving_and_no_held_replica() -> None:
    table = table_of("a")
    assert table.retire(1e6) == ()
    table.apply([], 1e6)
    assert table.retire(2e6) == ()
    assert states(table) == {"a": "held"}


def test_a_retired_replica_that_is_named_again_is_a_new_one() -> None:
    table = table_of("a", "b")
    old = replica_of(table, "a")
    lease = lease_of(table, 1.0, replica_of(table, "b"))
    table.apply(ready("b"), 20.0)
    table.retire(20.0 + DRAIN)
    (new,) = table.apply(ready("a", "b"), 1_000.0).added
    assert new is not old
    assert (old.inflight, new.inflight) == (1, 0)
    lease.release()
    assert (old.inflight, new.inflight) == (0, 0)


def test_nothing_happens_to_a_retired_replica_any_more() -> None:
    table = table_of("a", jitter=Longest())
    running, probe = lease_of(table, 0.0), lease_of(table, 0.0)
    table.failed(running, 0.0, unreachable=True)
    table.apply(ready("b"), 0.0)
    table.retire(DRAIN)
    assert not table.connected(running)
    assert not table.answered(running)
    assert not table.failed(probe, DRAIN, unreachable=True)
    assert not running.replica.ejected
    assert table.counts()["ejected"] == 0


# --- leases -------------------------------------------------------------------------------------


def test_a_lease_counts_until_it_is_released_and_only_once() -> None:
    table = table_of("a")
    first, second = lease_of(table, 0.0), lease_of(table, 0.0)
    a = first.replica
    assert a.inflight == 2
    first.release()
    first.release()
    assert a.inflight == 1
    second.release()
    assert a.inflight == 0


def test_a_lease_is_bound_to_the_object_through_every_change_of_the_list() -> None:
    table = table_of("a", "b")
    a, b = table
    lease = lease_of(table, 0.0, b)
    table.apply(ready("b"), 1.0)
    table.apply(ready("a"), 2.0)
    table.apply([], 3.0)
    assert lease.replica is a
    assert (a.inflight, b.inflight) == (1, 0)


def test_tried_replicas_are_not_leased_again() -> None:
    table = table_of("a", "b", "c")
    tried: list[Replica] = []
    for _ in range(3):
        tried.append(lease_of(table, 0.0, *tried).replica)
    assert {replica.url for replica in tried} == {"a", "b", "c"}
    assert table.lease(0.0, tried=tried) is None
    assert table.lease(0.0) is not None


# --- ejection -----------------------------------------------------------------------------------


def test_a_failed_attempt_ejects_the_replica_for_1_s() -> None:
    table = table_of("a", "b")
    lease = lease_of(table, 5.0)
    assert table.failed(lease, 5.0, unreachable=True)
    lease.release()
    a = lease.replica
    assert a.ejected
    assert ejected_for(a, 5.0) == 1.0
    assert (a.avoided(5.9), a.avoided(6.0)) == (True, False)
    assert {lease_of(table, 5.9).replica for _ in range(4)} == set(table) - {a}


def test_failures_side_by_side_count_as_one() -> None:
    table = table_of("a")
    leases = [lease_of(table, 0.0) for _ in range(100)]
    newly = [table.failed(lease, now / 100, unreachable=True) for now, lease in enumerate(leases)]
    assert newly == [True] + [False] * 99
    a = leases[0].replica
    assert (a.failures, a.failed_at, a.ejected_until) == (1, 0.0, 1.0)


def test_a_probe_that_fails_doubles_the_time_up_to_30_s() -> None:
    table = table_of("a")
    now, times = 0.0, []
    for _ in range(20):
        a = fail(table, now)
        times.append(ejected_for(a, now))
        now += times[-1]
    assert times == [1.0, 2.0, 4.0, 8.0, 16.0] + [30.0] * 15


def test_a_probe_that_fails_is_not_newly_ejected() -> None:
    table = table_of("a")
    fail(table, 0.0)
    with leased(table, 1.0) as probe:
        assert not table.failed(probe, 1.0, unreachable=True)
    assert ejected_for(probe.replica, 1.0) == 2.0


@pytest.mark.parametrize("release_first", [True, False])
def test_the_failure_of_a_probe_counts_before_its_release_and_after(release_first: bool) -> None:
    table = table_of("a", "b")
    a = fail(table, 0.0)
    b = next(replica for replica in table if replica is not a)
    probe = lease_of(table, 1.0, b)
    if release_first:
        probe.release()
    table.failed(probe, 1.0, unreachable=True)
    probe.release()
    assert ejected_for(a, 1.0) == 2.0
    table.failed(probe, 2.0, unreachable=True)  # twice told is once failed
    assert ejected_for(a, 1.0) == 2.0
    assert lease_of(table, 2.0).replica is b


def test_a_last_resort_that_fails_doubles_the_time_too() -> None:
    table = table_of("a")
    fail(table, 0.0)
    a = fail(table, 0.5)
    assert ejected_for(a, 0.5) == 2.0


def test_the_time_of_an_ejection_is_jittered() -> None:
    times = {
        ejected_for(fail(table_of("a", jitter=random.Random(seed)), 0.0), 0.0) for seed in range(50)
    }
    assert len(times) > 40
    assert 0.75 <= min(times) < 0.8
    assert 0.95 < max(times) <= 1.0
    without = ReplicaTable(least_load(None), grace_period=GRACE, drain_timeout=DRAIN)
    without.apply(ready("a"), 0.0)
    assert 0.75 <= ejected_for(fail(without, 0.0), 0.0) <= 1.0


def test_when_its_time_is_over_one_lease_probes_it_and_the_others_avoid_it() -> None:
    table = table_of("a", "b")
    a = fail(table, 0.0)
    lease_of(table, 0.5)  # b is busy now
    probe = lease_of(table, 1.0)
    assert probe.replica is a
    assert a.probing
    others = [lease_of(table, 1.0) for _ in range(9)]
    assert {lease.replica.url for lease in others} == {"b"}
    assert a.inflight == 1


def test_a_probe_whose_client_leaves_makes_room_for_the_next() -> None:
    table = table_of("a", "b")
    a = fail(table, 0.0)
    b = next(replica for replica in table if replica is not a)
    lease_of(table, 1.0, b).release()
    assert (a.ejected, a.probing, a.avoided(1.0)) == (True, False, False)
    second = lease_of(table, 1.0, b)
    assert (a.probe, a.probing, a.avoided(1.0)) == (second, True, True)


def test_a_probe_keeps_its_role_though_a_last_resort_joins_it() -> None:
    table = table_of("a")
    fail(table, 0.0)
    probe, beside = lease_of(table, 1.0), lease_of(table, 1.0)
    beside.release()
    assert probe.replica.probe is probe
    assert probe.replica.avoided(1.0)


def test_a_lease_on_a_replica_that_is_not_ejected_is_no_probe() -> None:
    table = table_of("a")
    lease = lease_of(table, 0.0)
    assert not lease.replica.probing
    table.failed(lease, 0.0, unreachable=False)
    probe = lease_of(table, 1.0)
    assert probe.replica.probing
    table.answered(probe)
    assert not probe.replica.probing


def test_an_opened_connection_restores_what_could_not_be_connected_to() -> None:
    table = table_of("a")
    fail(table, 0.0, unreachable=True)
    probe = lease_of(table, 1.0)
    assert table.connected(probe)
    assert not probe.replica.ejected
    assert not table.connected(probe)  # it was restored already


def test_an_opened_connection_does_not_restore_what_reset_connections() -> None:
    table = table_of("a")
    fail(table, 0.0, unreachable=False)
    probe = lease_of(table, 1.0)
    assert not table.connected(probe)
    assert probe.replica.ejected


def test_a_connection_to_a_replica_that_is_not_ejected_restores_nothing() -> None:
    table = table_of("a")
    assert not table.connected(lease_of(table, 0.0))


def test_one_that_accepts_and_then_resets_goes_on_doubling() -> None:
    table = table_of("a")
    fail(table, 0.0, unreachable=True)
    with leased(table, 1.0) as lease:
        assert table.connected(lease)
        assert table.failed(lease, 1.0, unreachable=False)  # newly: it had been restored
    assert ejected_for(lease.replica, 1.0) == 2.0
    with leased(table, 3.0) as lease:
        assert not table.connected(lease)
        assert not table.failed(lease, 3.0, unreachable=False)
    assert ejected_for(lease.replica, 3.0) == 4.0


def test_an_answer_restores_an_ejected_replica_and_forgets_its_failures() -> None:
    table = table_of("a")
    fail(table, 0.0, unreachable=False)
    fail(table, 1.0, unreachable=False)
    with leased(table, 3.0) as probe:
        assert table.answered(probe)
        assert not table.answered(probe)
    assert not probe.replica.ejected
    assert ejected_for(fail(table, 4.0), 4.0) == 1.0


def test_an_answer_of_a_replica_that_is_not_ejected_forgets_its_failures() -> None:
    table = table_of("a")
    fail(table, 0.0)
    with leased(table, 1.0) as lease:
        assert table.connected(lease)
        assert not table.answered(lease)
    assert ejected_for(fail(table, 2.0), 2.0) == 1.0


def test_with_only_ejected_replicas_left_the_one_that_failed_longest_ago_is_asked() -> None:
    table = table_of("a", "b", "c", policy=round_robin(None))
    leases = {lease.replica.url: lease for lease in (lease_of(table, 0.0) for _ in range(3))}
    for now, url in enumerate("bca"):  # not in the order of their leases
        table.failed(leases[url], now / 10, unreachable=True)
    asked: list[Replica] = []
    for _ in range(3):
        asked.append(lease_of(table, 0.5, *asked).replica)
    assert [replica.url for replica in asked] == ["b", "c", "a"]
    assert table.lease(0.5, tried=asked) is None


def test_last_resorts_that_failed_together_take_turns() -> None:
    table = table_of("a", "b")
    leases = [lease_of(table, 0.0), lease_of(table, 0.0)]
    for lease in leases:
        table.failed(lease, 0.0, unreachable=True)
        lease.release()
    asked = [lease_of(table, 0.5).replica.url for _ in range(4)]
    assert asked == ["a", "b", "a", "b"]


def test_a_last_resort_beside_a_running_probe_does_not_count_its_failure() -> None:
    table = table_of("a")
    fail(table, 0.0)
    probe, beside = lease_of(table, 1.0), lease_of(table, 1.0)
    table.failed(beside, 1.5, unreachable=True)
    assert ejected_for(probe.replica, 0.0) == 1.0
    table.failed(probe, 1.5, unreachable=True)
    assert ejected_for(probe.replica, 1.5) == 2.0


def test_an_ejection_outlives_draining_and_reviving() -> None:
    table = table_of("a", "b")
    a = fail(table, 0.0)
    table.apply(ready("b"), 0.1)
    table.apply(ready("a", "b"), 0.2)
    assert (a.state, a.ejected, a.avoided(0.9)) == (State.SERVING, True, True)


# --- what others see ----------------------------------------------------------------------------


def test_counts_tell_states_and_ejections_apart() -> None:
    table = table_of("a", "b", "c")
    assert table.counts() == {"serving": 3, "held": 0, "draining": 0, "ejected": 0}
    table.apply(ready("a", "b"), 0.0)
    fail(table, 0.0)
    table.apply([], 0.0)
    assert table.counts() == {"serving": 0, "held": 2, "draining": 1, "ejected": 1}
    table.apply(ready("b"), 1.0)
    assert table.counts() == {"serving": 1, "held": 0, "draining": 2, "ejected": 1}
    assert len(table) == 3


def test_a_change_names_its_kinds_and_is_false_when_empty() -> None:
    change = table_of().apply(ready("a"), 0.0)
    assert change
    assert dict(change.by_kind()) == {
        "added": change.added,
        "removed": (),
        "held": (),
        "released": (),
        "revived": (),
    }
    assert not TableChange()


def test_a_replica_shows_its_url_state_and_load() -> None:
    table = table_of("http://10.0.0.1:8000")
    lease = lease_of(table, 0.0)
    assert repr(lease.replica) == "<Replica http://10.0.0.1:8000 serving inflight=1>"


# --- since when ---------------------------------------------------------------------------------


def test_it_tells_since_when_a_replica_is_in_its_state() -> None:
    table = table_of("a")
    a = replica_of(table, "a")
    seen = []
    for now, named in enumerate([["a"], [], [], ["a"], ["b"], ["b"], ["a"]], start=1):
        table.apply(ready(*named), float(now))
        seen.append((a.state.value, a.since))
    assert seen == [
        ("serving", 0.0),
        ("held", 2.0),
        ("held", 2.0),
        ("serving", 4.0),
        ("draining", 5.0),
        ("draining", 5.0),
        ("serving", 7.0),
    ]


def test_it_tells_since_when_the_list_is_empty() -> None:
    table = table_of("a")
    assert table.empty_since is None
    table.apply([], 5.0)
    table.apply([], 6.0)
    assert table.empty_since == 5.0
    table.apply(ready("a"), 7.0)
    assert table.empty_since is None


# --- several processes ----------------------------------------------------------------------------


def test_what_others_have_in_flight_counts() -> None:
    table = table_of("a", "b", peers=1)
    table.take_loads({"a": 3, "gone": 9}, {})
    assert [lease_of(table, 1.0).replica.url for _ in range(2)] == ["b", "b"]
    table.take_loads({"a": 0}, {"b": 2})
    assert lease_of(table, 1.0).replica.url == "a"


def test_what_was_not_told_anew_still_counts() -> None:
    table = table_of("a", "b", peers=1)
    table.take_loads({"a": 5}, {})
    table.take_loads({"b": 3}, {})
    assert lease_of(table, 1.0).replica.url == "b"
    table.take_loads({}, {"b": 1})
    assert (replica_of(table, "a").load, replica_of(table, "b").load) == (5, 4)


def test_the_others_are_taken_to_do_meanwhile_what_we_do() -> None:
    """Else each of them would send to the one that had the fewest, until it is told."""
    table = table_of("a", "b", peers=3)
    table.take_loads({"b": 3}, {})
    first = lease_of(table, 1.0)
    assert (first.replica.url, first.replica.load) == ("a", 4)
    assert lease_of(table, 1.0).replica.url == "b"
    first.release()
    assert first.replica.load == 0


def test_as_many_processes_as_there_are_send_evenly() -> None:
    """Four that are told of each other after every 10 requests of each, none of which ends."""
    urls = [f"replica-{number}" for number in range(7)]
    tables = [table_of(*urls, peers=3, jitter=random.Random(seed)) for seed in range(4)]
    for _ in range(5):
        for table in tables:
            for _ in range(10):
                lease_of(table, 1.0)
        total = {url: sum(replica_of(table, url).inflight for table in tables) for url in urls}
        assert max(total.values()) - min(total.values()) <= len(tables)
        for table in tables:
            own = {replica.url: replica.inflight for replica in table}
            table.take_loads({url: total[url] - own[url] for url in urls}, own)
