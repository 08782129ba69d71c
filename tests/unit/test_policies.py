"""How the selection policies choose, through the table that asks them."""

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from controller_client.protocol import ReadyReplica
from lb.policies import POLICIES, TargetQps, target_of
from lb.replicas import Lease, ReplicaTable

IDLE = [ReadyReplica(url, None) for url in "abcd"]


def table_of(
    policy: str, replicas: list[ReadyReplica], target_qps: TargetQps = None
) -> ReplicaTable:
    table = ReplicaTable(
        POLICIES[policy](target_qps), grace_period=30.0, drain_timeout=600.0, jitter=ListOrder()
    )
    table.apply(replicas, 0.0)
    return table


class ListOrder(random.Random):
    """Jitter that leaves a list in its order."""

    def random(self) -> float:
        return 0.0


def leases(table: ReplicaTable, count: int) -> Iterator[Lease]:
    for _ in range(count):
        lease = table.lease(0.0)
        assert lease is not None
        yield lease


def in_turn(table: ReplicaTable, count: int) -> str:
    """The replicas of so many requests that come one after the other."""
    urls = ""
    for lease in leases(table, count):
        urls += lease.replica.url
        lease.release()
    return urls


def at_once(table: ReplicaTable, count: int) -> Counter[str]:
    """The shares of so many requests that run side by side."""
    return Counter(lease.replica.url for lease in leases(table, count))


# --- every policy -------------------------------------------------------------------------------


def test_the_policies_have_the_names_of_the_stock_balancer() -> None:
    assert set(POLICIES) == {"round_robin", "least_load", "instance_aware_least_load"}


@pytest.mark.parametrize("policy", POLICIES)
def test_ties_rotate(policy: str) -> None:
    assert Counter(in_turn(table_of(policy, IDLE), 40)) == dict.fromkeys("abcd", 10)


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_replicas_share_requests_that_run_side_by_side(policy: str) -> None:
    assert at_once(table_of(policy, IDLE), 40) == dict.fromkeys("abcd", 10)


# --- round_robin --------------------------------------------------------------------------------


def test_round_robin_takes_turns_whatever_the_load() -> None:
    table = table_of("round_robin", IDLE[:3])
    running = list(leases(table, 2))
    assert "".join(lease.replica.url for lease in running) == "ab"
    assert in_turn(table, 6) == "cabcab"


def test_round_robin_gives_a_new_replica_one_turn_and_then_its_place() -> None:
    table = table_of("round_robin", IDLE[:3])
    assert in_turn(table, 4) == "abca"
    table.apply(IDLE, 0.0)
    assert in_turn(table, 9) == "dbcadbcad"


def test_round_robin_goes_on_with_the_others_when_one_leaves() -> None:
    table = table_of("round_robin", IDLE)
    assert in_turn(table, 5) == "abcda"
    table.apply([IDLE[0], IDLE[2], IDLE[3]], 0.0)
    assert in_turn(table, 6) == "cdacda"


def test_round_robin_ignores_the_order_of_the_list() -> None:
    table = table_of("round_robin", IDLE)
    assert in_turn(table, 2) == "ab"
    table.apply(IDLE[::-1], 0.0)
    assert in_turn(table, 4) == "cdab"


# --- least_load ---------------------------------------------------------------------------------


def test_least_load_takes_the_replica_with_the_fewest_requests_in_flight() -> None:
    table = table_of("least_load", IDLE[:3])
    running = list(leases(table, 6))
    assert "".join(lease.replica.url for lease in running) == "abcabc"
    running[1].release()
    running[4].release()
    running[5].release()
    assert [lease.replica.url for lease in leases(table, 3)] == ["b", "c", "b"]


def test_least_load_lets_a_new_replica_catch_up() -> None:
    table = table_of("least_load", IDLE[:2])
    at_once(table, 6)
    table.apply(IDLE[:3], 0.0)
    assert at_once(table, 6) == {"c": 4, "a": 1, "b": 1}


# --- instance_aware_least_load ------------------------------------------------------------------


def test_instance_aware_shares_by_target() -> None:
    replicas = [ReadyReplica("big", "A100"), ReadyReplica("small", "L4")]
    table = table_of("instance_aware_least_load", replicas, {"A100": 3.0, "L4": 1.0})
    assert at_once(table, 40) == {"big": 30, "small": 10}


def test_instance_aware_follows_an_accelerator_that_changes() -> None:
    table = table_of("instance_aware_least_load", IDLE[:2], {"A100": 9.0})
    assert at_once(table, 10) == {"a": 5, "b": 5}
    table.apply([ReadyReplica("a", "A100"), ReadyReplica("b", None)], 0.0)
    assert at_once(table, 40) == {"a": 40}


@pytest.mark.parametrize(
    ("accelerator", "target_qps", "target"),
    [
        ("A100", {"A100": 4.0, "A100:1": 5.0}, 4.0),  # the exact name wins
        ("A100:8", {"A100": 4.0, "A100:8": 5.0}, 5.0),
        ("A100", {"L4:1": 2.0, "A100:4": 6.0, "A100:8": 7.0}, 6.0),  # the first base name
        ("A100:8", {"A100": 4.0}, 1.0),  # the base name of the target counts, not the replica's
        ("A10", {"A100:1": 4.0}, 1.0),  # a beginning is no match
        ("a100", {"A100": 4.0}, 1.0),
        ("V100", {"A100": 4.0}, 1.0),
        (None, {"A100": 4.0}, 1.0),
        ("A100", {}, 1.0),
        ("A100", 2.5, 2.5),  # a plain number is everyone's
        (None, 2.5, 2.5),
        ("A100", None, 1.0),
    ],
)
def test_the_target_of_an_accelerator(
    accelerator: str | None, target_qps: TargetQps, target: float
) -> None:
    assert target_of(accelerator, target_qps) == target


@pytest.mark.parametrize("policy", ["least_load", "instance_aware_least_load"])
def test_a_lease_of_before_a_list_counts_no_more_when_it_is_released(policy: str) -> None:
    table = table_of(policy, IDLE[:2])
    a, b = leases(table, 2)
    table.apply(IDLE[:2], 1.0)
    b.release()
    assert in_turn(table, 2) == "bb"
    assert a.replica.inflight == 1


def test_balancers_with_the_same_list_begin_at_different_replicas() -> None:
    begun = set()
    for seed in range(20):
        table = ReplicaTable(
            POLICIES["least_load"](None),
            grace_period=30.0,
            drain_timeout=600.0,
            jitter=random.Random(seed),
        )
        table.apply(IDLE, 0.0)
        begun.add(in_turn(table, 1))
    assert begun == set("abcd")
