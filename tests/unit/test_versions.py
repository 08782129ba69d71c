"""The rules of versions: active sets, reuse, who comes and who goes. SkyPilot's own are in tests/skypilot."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller_client.embedded.versions import (
    STAYING,
    Mode,
    Replica,
    Scaler,
    Service,
    Status,
    active_versions,
    reusable,
    service_status,
)

READY, STARTING, PROVISIONING = Status.READY, Status.STARTING, Status.PROVISIONING
GONE, FAILED, NOT_READY = Status.SHUTTING_DOWN, Status.FAILED, Status.NOT_READY
ROLLING, BLUE_GREEN = Mode.ROLLING, Mode.BLUE_GREEN


def config(count: int = 2, **rest: object) -> dict[str, object]:
    service = {"replica_policy": {"min_replicas": count}}
    return {"service": service, "run": "x", "resources": {}, "file_mounts": {}, **rest}


def service(*replicas: tuple[int, Status], wanted: int = 3, **values: object) -> Service:
    """A service whose version 1 and 2 differ in what they run, updated from the one to the other."""
    tasks = {1: config(2), 2: config(wanted, run="y"), 3: config(wanted + 1, run="y")}
    made = Service("svc", tasks, wanted, 1, 2, latest=2, **values)  # type: ignore[arg-type]
    made.replicas = [
        Replica(number, version, status) for number, (version, status) in enumerate(replicas, 1)
    ]
    made.settle(0.0)
    return made


# --- the active set -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("states", "rolling", "blue_green"),
    [
        ([], [], []),
        ([(1, STARTING)], [], []),
        ([(1, READY), (1, READY), (2, PROVISIONING)], [1], [1]),
        ([(1, READY), (1, READY), (2, READY), (2, STARTING)], [1, 2], [1]),
        ([(1, READY), (2, READY), (2, READY)], [1, 2], [2]),
        ([(1, GONE), (2, READY), (2, READY)], [2], [2]),
        ([(2, READY)], [2], [2]),
        ([(1, NOT_READY), (3, READY)], [3], [3]),
        ([(2, READY), (3, READY)], [2, 3], [2]),
    ],
)
def test_the_active_set(
    states: list[tuple[int, Status]], rolling: list[int], blue_green: list[int]
) -> None:
    replicas = [Replica(number, *state) for number, state in enumerate(states)]
    least = {1: 1, 2: 2}  # nothing is known of version 3
    assert active_versions(replicas, ROLLING, least) == rolling
    assert active_versions(replicas, BLUE_GREEN, least) == blue_green


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ([], "NO_REPLICA"),
        ([STARTING, PROVISIONING], "REPLICA_INIT"),
        ([STARTING, FAILED], "FAILED"),
        ([FAILED, READY], "READY"),
    ],
)
def test_the_status_of_a_service(statuses: list[Status], expected: str) -> None:
    assert service_status(statuses) == expected


# --- reuse --------------------------------------------------------------------------------------


def test_only_the_service_section_may_differ() -> None:
    assert reusable(config(2), config(3))
    assert not reusable(config(2), config(2, run="y"))
    assert not reusable(config(2), config(2, envs={"A": "b"}))
    assert not reusable(config(2), config(2, resources={"cpus": 2}))


def test_the_order_of_any_of_means_nothing() -> None:
    one, other = {"cpus": 1}, {"cpus": 2}
    old = config(2, resources={"any_of": [one, other]})
    assert reusable(old, config(2, resources={"any_of": [other, one]}))
    assert not reusable(old, config(2, resources={"any_of": [one]}))


def test_mounts_forbid_reuse() -> None:
    mounted = config(2, file_mounts={"/data": "s3://bucket"})
    assert not reusable(mounted, mounted)
    assert not reusable(mounted, config(2))
    assert not reusable(config(2), mounted)
    bare = {"service": {}, "run": "x"}
    assert not reusable(bare, bare), (
        "as SkyPilot's, whose files always say that there are no mounts"
    )
    assert reusable({**bare, "file_mounts": {}}, {**bare, "file_mounts": {}})


# --- an update ----------------------------------------------------------------------------------


def test_a_change_of_the_number_relabels_and_lists_as_one() -> None:
    made = service((2, READY), (2, STARTING), (2, GONE), (1, READY), (2, FAILED))
    made.update(3, ROLLING, 0.0)
    assert [(each.id, each.version) for each in made.replicas] == [(1, 3), (2, 3), (3, 2), (4, 1)]
    assert made.active == [1, 3]
    assert [each.id for each in made.listed] == [1, 4]


def test_with_a_gap_the_list_is_empty_meanwhile() -> None:
    made = service((2, READY), (2, READY), gap=5.0)
    made.update(3, ROLLING, 100.0)
    assert (made.active, made.listed) == ([2], [])
    made.settle(104.9)
    assert made.listed == []
    made.settle(105.0)
    assert [each.id for each in made.listed] == [1, 2]


def test_an_older_version_changes_nothing_and_an_unknown_one_is_refused() -> None:
    made = service((1, READY))
    before = made.to_json()
    made.update(2, BLUE_GREEN, 0.0)
    made.update(1, BLUE_GREEN, 0.0)
    with pytest.raises(KeyError):
        made.update(4, BLUE_GREEN, 0.0)
    assert made.to_json() == before


def test_nothing_is_listed_anew_while_the_service_ends() -> None:
    made = service((1, READY), ending=True)
    assert (made.active, made.status) == ([], "SHUTTING_DOWN")


# --- what becomes of a replica ------------------------------------------------------------------


def test_what_is_first_ready_is_noted_once() -> None:
    made = service((2, STARTING))
    made.change(1, READY, 5.0)
    made.change(1, NOT_READY, 6.0)
    made.change(1, READY, 7.0)
    replica = made.replica(1)
    assert replica is not None
    assert (replica.first_ready_at, replica.changed_at, made.ready_since) == (5.0, 7.0, 5.0)
    assert (made.active, made.proven, made.status) == ([2], [2], "READY")


def test_a_replica_that_goes_does_not_come_back() -> None:
    made = service((2, READY), (2, READY))
    made.change(1, GONE, 1.0)
    made.change(1, READY, 2.0)
    made.change(9, READY, 2.0)
    assert [each.status for each in made.replicas] == [GONE, READY]
    assert [each.id for each in made.listed] == [2]
    made.remove(2, 3.0)
    assert ([each.id for each in made.replicas], made.active) == ([1], [])
    assert made.replica(2) is None


# --- who comes, who goes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("states", "launch", "gone"),
    [
        # the steps of the manual, 2 old and 3 new ones
        ([(1, READY), (1, READY)], 3, []),
        ([(1, READY), (1, READY), *[(2, PROVISIONING)] * 3], 0, []),
        ([(1, READY), (1, READY), (2, READY), *[(2, PROVISIONING)] * 2], 0, []),
        ([(1, READY), (1, READY), (2, READY), (2, READY), (2, PROVISIONING)], 0, [1]),
        ([(1, GONE), (1, READY), *[(2, READY)] * 3], 0, [2]),
        ([(1, GONE), (1, GONE), *[(2, READY)] * 3], 0, []),
        # old ones that are not ready go before those that are
        ([(1, READY), (1, STARTING), (2, READY), (2, READY), (2, STARTING)], 0, [2]),
        # more than are wanted
        ([(2, READY), (2, PROVISIONING), (2, READY), (2, READY)], 0, [2]),
        ([(2, READY)] * 5, 0, [1, 2]),
    ],
)
def test_a_rolling_update(states: list[tuple[int, Status]], launch: int, gone: list[int]) -> None:
    assert service(*states).plan() == (launch, gone)


@pytest.mark.parametrize(
    ("states", "launch", "gone"),
    [
        ([(1, READY), (1, READY)], 3, []),
        ([(1, READY), (1, READY), (2, READY), (2, READY), (2, STARTING)], 0, []),
        ([(1, READY), (1, STARTING), *[(2, READY)] * 3], 0, [1, 2]),
        ([(1, STARTING), *[(2, STARTING)] * 3], 0, []),
    ],
)
def test_a_blue_green_update(
    states: list[tuple[int, Status]], launch: int, gone: list[int]
) -> None:
    assert service(*states, mode=BLUE_GREEN).plan() == (launch, gone)


def test_a_failure_stops_a_version_that_was_never_ready() -> None:
    assert service((1, READY), (1, READY), (2, FAILED), (2, STARTING)).plan() == (0, [])
    proven = service((1, READY), (2, FAILED), (2, READY))
    assert proven.plan() == (2, [])


@given(
    st.lists(st.tuples(st.integers(1, 2), st.sampled_from(list(Status))), max_size=8),
    st.sampled_from(list(Mode)),
    st.integers(0, 4),
)
def test_no_plan_leaves_fewer_ready_replicas_than_it_finds_or_wants(
    states: list[tuple[int, Status]], mode: Mode, wanted: int
) -> None:
    made = service(*states, mode=mode, wanted=wanted)
    listed = len(made.listed)
    launch, gone = made.plan()
    assert len(gone) == len(set(gone))
    assert all(each.status in STAYING for each in made.replicas if each.id in gone)
    assert launch >= 0
    for replica_id in gone:
        made.change(replica_id, GONE, 1.0)
    assert len(made.listed) >= min(listed, wanted)


def test_a_service_is_kept_whole() -> None:
    made = service((1, READY), (2, STARTING), mode=BLUE_GREEN, gap=2.5)
    again = Service.from_json(made.to_json())
    assert again == made
    assert isinstance(again.replicas[0].status, Status)
    assert json.loads(made.to_json())["mode"] == "blue_green"
    assert again.replicas[0].url == "http://127.0.0.1:0"


# --- the number wanted --------------------------------------------------------------------------

POLICY = {
    "min_replicas": 1,
    "max_replicas": 4,
    "target_qps_per_replica": 2.0,
    "upscale_delay_seconds": 10,
    "downscale_delay_seconds": 20,
}


def test_without_a_rate_the_least_number_is_wanted_at_once() -> None:
    fixed = {**POLICY, "target_qps_per_replica": None, "min_replicas": 3, "max_replicas": 3}
    assert Scaler(2).decide(fixed, 0.0) == 3
    assert Scaler(5).decide(fixed, 0.0) == 3


def test_the_rate_counts_when_it_has_lasted() -> None:
    scaler = Scaler(1)
    now = 1000.0
    scaler.arrivals = [now - second / 6 for second in range(360)]  # 6 a second
    assert scaler.decide(POLICY, now) == 1
    assert scaler.decide(POLICY, now + 9) == 1
    assert scaler.decide(POLICY, now + 10) == 3
    assert scaler.decide(POLICY, now + 61) == 3
    assert scaler.arrivals == []
    assert scaler.decide(POLICY, now + 80) == 3
    assert scaler.decide(POLICY, now + 81) == 1


def test_a_rate_that_turns_starts_anew() -> None:
    scaler = Scaler(2)
    scaler.arrivals = [1000.0] * 1000
    scaler.decide(POLICY, 1000.0)
    scaler.arrivals = []
    assert scaler.decide(POLICY, 1011.0) == 2
    scaler.arrivals = [1012.0] * 1000
    assert scaler.decide(POLICY, 1012.0) == 2


def test_from_none_it_goes_up_at_once() -> None:
    scaler = Scaler(0)
    scaler.arrivals = [1000.0]
    assert scaler.decide({**POLICY, "min_replicas": 0}, 1000.0) == 1
