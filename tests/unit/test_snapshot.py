"""Snapshots: what people are told of them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lb.events import EventFacts
from lb.history import Tick
from lb.snapshot import ReplicaFacts, Snapshot, percentiles, status

NOW = 10_000.0
EDGES = [0.1, 1.0, 10.0]


def replica(name: str = "a:1", **facts: Any) -> ReplicaFacts:
    plain: ReplicaFacts = {
        "name": name,
        "url": f"http://{name}",
        "state": "serving",
        "since": 1.0,
        "accelerator": "L4",
        "ejected": False,
        "ejected_until": None,
        "failures": 0,
        "in_flight": 0,
        "idle_connections": 0,
        "active_connections": 0,
        "finished": 0,
        "failed": 0,
    }
    return {**plain, **facts}  # type: ignore[typeddict-item]


def tick(at: int, latency: tuple[int, ...] = (0, 0, 0, 0), **facts: Any) -> Tick:
    plain: Tick = {
        "at": at,
        "seconds": 5.0,
        "outcomes": {},
        "first_byte": list(latency),
        "duration": list(latency),
        "in_flight": 0,
    }
    return {**plain, **facts}  # type: ignore[typeddict-item]


def event(at: float) -> EventFacts:
    return {"at": at, "level": "info", "event": "replica.added", "fields": {}}


def snapshot(*replicas: ReplicaFacts, **facts: Any) -> Snapshot:
    plain: Snapshot = {
        "about": {
            "version": "1",
            "service": "chat",
            "policy": "least_load",
            "sticky": None,
            "mode": "standalone",
            "started": 5.0,
        },
        "now": NOW,
        "processes": 1,
        "not_ready": None,
        "draining": False,
        "in_flight": 0,
        "oldest_seconds": 0.0,
        "sync": {
            "interval": 20.0,
            "grace_period": 30.0,
            "result": "ok",
            "cause": "",
            "last_answer": NOW - 1,
            "failing_since": None,
            "empty_since": None,
        },
        "replicas": list(replicas),
        "edges": {"first_byte": EDGES, "duration": EDGES},
        "ticks": [],
        "events": [],
    }
    return {**plain, **facts}  # type: ignore[typeddict-item]


def test_a_balancer_that_has_seen_nothing() -> None:
    found = status(snapshot())
    nothing = {"p50": None, "p95": None, "p99": None}
    assert found["recent"] == {
        "rate": 0.0,
        "failed": None,
        "first_byte": nothing,
        "duration": nothing,
    }
    assert found["history"]["at"] == []
    assert (found["held"], found["replicas"]) == (None, [])


def test_replicas_by_name_with_their_shares() -> None:
    found = status(
        snapshot(
            replica("b:1", finished=30, state="draining"),
            replica("a:1", finished=10, ejected=True),
            replica("c:1", state="held"),
        )
    )
    assert [(each["name"], each["share"]) for each in found["replicas"]] == [
        ("a:1", 0.25),
        ("b:1", 0.75),
        ("c:1", 0.0),
    ]
    assert found["counts"] == {"serving": 1, "held": 1, "draining": 1, "ejected": 1}
    assert status(snapshot(replica()))["replicas"][0]["share"] is None


@pytest.mark.parametrize(
    ("state", "empty_since", "held"),
    [
        ("held", 100.0, {"since": 100.0, "until": 130.0}),
        ("draining", 100.0, None),
        ("serving", None, None),
    ],
)
def test_the_list_is_held_while_a_replica_is(
    state: str, empty_since: float | None, held: object
) -> None:
    one = snapshot(replica(state=state))
    one["sync"] = {**one["sync"], "empty_since": empty_since}
    assert status(one)["held"] == held


def test_the_last_minute_and_the_history() -> None:
    outcomes = {
        "ok": 70,
        "client_error": 10,
        "upstream_error": 5,
        "lb_error": 5,
        "client_closed": 60,
    }
    ticks = [
        tick(9000, outcomes={"ok": 1000}),
        tick(9990, (10, 10, 0, 0), outcomes=outcomes, in_flight=4),
        tick(9995, outcomes={"ok": 50}, seconds=5.0),
    ]
    found = status(snapshot(ticks=ticks))
    assert found["recent"]["rate"] == 20.0
    assert found["recent"]["failed"] == pytest.approx(10 / 140, rel=0.001)
    assert found["recent"]["first_byte"] == {"p50": 0.1, "p95": 0.91, "p99": 0.982}
    history = found["history"]
    assert history["at"] == [9000, 9990, 9995]
    assert history["in_flight"] == [0, 4, 0]
    assert history["rate"]["ok"] == [200.0, 14.0, 10.0]
    assert history["rate"]["lb_error"] == [0.0, 1.0, 0.0]
    assert history["duration"]["p50"] == [None, 0.1, None]
    assert history["first_byte"]["p99"] == [None, 0.982, None]


@pytest.mark.parametrize(
    ("counts", "p50", "p99"),
    [
        ([0, 0, 0, 0], None, None),
        ([100, 0, 0, 0], 0.05, 0.099),
        ([0, 100, 0, 0], 0.55, 0.991),
        ([0, 0, 0, 100], 10.0, 10.0),
        ([50, 0, 49, 1], 0.1, 10.0),
    ],
)
def test_percentiles(counts: list[int], p50: float | None, p99: float | None) -> None:
    found = percentiles(counts, EDGES)
    assert (found["p50"], found["p99"]) == (p50, p99)


@given(st.lists(st.integers(0, 1000), min_size=4, max_size=4))
def test_percentiles_rise_and_stay_within_the_edges(counts: list[int]) -> None:
    found = percentiles(counts, EDGES)
    values = [each for each in found.values() if each is not None]
    assert values == sorted(values)
    assert all(0 < each <= EDGES[-1] for each in values)
    assert len(values) == (3 if any(counts) else 0)
