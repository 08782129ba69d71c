"""The facts that the status page and `skyserve-lb status` show, as plain values for JSON. Pure.

A `Snapshot` is what is known; `status` draws the conclusions that people read: rates, shares,
percentiles. All times are Unix times, all spans seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TypedDict

from lb.events import EventFacts
from lb.history import Tick

RECENT_SECONDS = 60
FAILED = ("upstream_error", "lb_error")
PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


class ReplicaFacts(TypedDict):
    """One replica; `finished` and `failed` are requests within the history's window.

    `ejected`: set aside after `failures` in a row, until `ejected_until` at the least.
    """

    name: str
    url: str
    state: str
    since: float
    accelerator: str | None
    ejected: bool
    ejected_until: float | None
    failures: int
    in_flight: int
    idle_connections: int
    active_connections: int
    finished: int
    failed: int


class SyncFacts(TypedDict):
    """How the calls to the controller go, and since when its list is empty."""

    interval: float
    grace_period: float
    result: str | None
    cause: str
    last_answer: float | None
    failing_since: float | None
    empty_since: float | None


class Edges(TypedDict):
    """The upper edges of the histograms' buckets; one more bucket holds what is beyond the last."""

    first_byte: list[float]
    duration: list[float]


class About(TypedDict):
    """What runs."""

    version: str
    service: str
    policy: str
    sticky: str | None
    mode: str
    started: float


class Common(TypedDict):
    """What snapshot and status have in common."""

    about: About
    now: float
    processes: int
    not_ready: str | None
    draining: bool
    in_flight: int
    oldest_seconds: float
    sync: SyncFacts
    events: list[EventFacts]


class Snapshot(Common):
    """What is known."""

    replicas: list[ReplicaFacts]
    edges: Edges
    ticks: list[Tick]


class ReplicaStatus(ReplicaFacts):
    """`share`: of the requests that finished within the window; None while there are none."""

    share: float | None


class Held(TypedDict):
    """The list is empty, and its replicas are kept."""

    since: float
    until: float


class Recent(TypedDict):
    """The last minute: requests a second, the share of failed ones, percentiles in seconds."""

    rate: float
    failed: float | None
    first_byte: dict[str, float | None]
    duration: dict[str, float | None]


class Series(TypedDict):
    """The history in columns, one entry a tick."""

    at: list[int]
    rate: dict[str, list[float]]
    in_flight: list[int]
    first_byte: dict[str, list[float | None]]
    duration: dict[str, list[float | None]]


class Status(Common):
    """What people are shown."""

    held: Held | None
    counts: dict[str, int]
    replicas: list[ReplicaStatus]
    recent: Recent
    history: Series


def status(snapshot: Snapshot) -> Status:
    """The conclusions."""
    replicas = sorted(snapshot["replicas"], key=lambda each: each["name"])
    finished = sum(each["finished"] for each in replicas)
    return {
        "about": snapshot["about"],
        "now": snapshot["now"],
        "processes": snapshot["processes"],
        "not_ready": snapshot["not_ready"],
        "draining": snapshot["draining"],
        "in_flight": snapshot["in_flight"],
        "oldest_seconds": round(snapshot["oldest_seconds"], 3),
        "sync": snapshot["sync"],
        "held": _held(snapshot),
        "counts": _counts(replicas),
        "replicas": [
            {**each, "share": each["finished"] / finished if finished else None}
            for each in replicas
        ],
        "recent": _recent(snapshot),
        "history": _history(snapshot["ticks"], snapshot["edges"]),
        "events": snapshot["events"],
    }


def _held(snapshot: Snapshot) -> Held | None:
    since = snapshot["sync"]["empty_since"]
    if since is None or not any(each["state"] == "held" for each in snapshot["replicas"]):
        return None
    return {"since": since, "until": since + snapshot["sync"]["grace_period"]}


def _counts(replicas: Iterable[ReplicaFacts]) -> dict[str, int]:
    counts = {"serving": 0, "held": 0, "draining": 0, "ejected": 0}
    for each in replicas:
        counts[each["state"]] += 1
        counts["ejected"] += each["ejected"]
    return counts


def _recent(snapshot: Snapshot) -> Recent:
    ticks = [t for t in snapshot["ticks"] if t["at"] > snapshot["now"] - RECENT_SECONDS]
    outcomes = _sum_by_name(tick["outcomes"] for tick in ticks)
    seconds = sum(tick["seconds"] for tick in ticks)
    finished = sum(outcomes.values())
    # A client that left says nothing about us: it is in neither number, as in the objectives.
    judged = finished - outcomes.get("client_closed", 0)
    failed = sum(outcomes.get(each, 0) for each in FAILED)
    first_byte, duration = _latencies(ticks)
    return {
        "rate": _short(finished / seconds) if seconds else 0.0,
        "failed": _short(failed / judged) if judged else None,
        "first_byte": percentiles(first_byte, snapshot["edges"]["first_byte"]),
        "duration": percentiles(duration, snapshot["edges"]["duration"]),
    }


def _latencies(ticks: Sequence[Tick]) -> tuple[list[int], list[int]]:
    return _sum([t["first_byte"] for t in ticks]), _sum([t["duration"] for t in ticks])


def _history(ticks: Sequence[Tick], edges: Edges) -> Series:
    outcomes = sorted({name for tick in ticks for name in tick["outcomes"]})
    first_byte = [percentiles(tick["first_byte"], edges["first_byte"]) for tick in ticks]
    duration = [percentiles(tick["duration"], edges["duration"]) for tick in ticks]
    return {
        "at": [tick["at"] for tick in ticks],
        "rate": {
            name: [_short(tick["outcomes"].get(name, 0) / tick["seconds"]) for tick in ticks]
            for name in outcomes
        },
        "in_flight": [tick["in_flight"] for tick in ticks],
        "first_byte": {name: [each[name] for each in first_byte] for name in PERCENTILES},
        "duration": {name: [each[name] for each in duration] for name in PERCENTILES},
    }


def percentiles(counts: Sequence[int], edges: Sequence[float]) -> dict[str, float | None]:
    """Each of `PERCENTILES` of what fell into the buckets, or None where nothing did.

    Within a bucket values are taken to be spread evenly, as Prometheus does; of what is beyond the
    last edge that edge alone is known.
    """
    return dict(zip(PERCENTILES, _percentiles(tuple(counts), tuple(edges)), strict=True))


# A tick never changes, and is asked about each second for as long as a page is open.
@lru_cache(maxsize=1024)
def _percentiles(counts: tuple[int, ...], edges: tuple[float, ...]) -> tuple[float | None, ...]:
    total = sum(counts)
    if not total:
        return (None,) * len(PERCENTILES)
    ranks = (fraction * total for fraction in PERCENTILES.values())
    return tuple(_short(_quantile(rank, counts, edges)) for rank in ranks)


def _quantile(rank: float, counts: Sequence[int], edges: Sequence[float]) -> float:
    low = 0.0
    for count, edge in zip(counts, edges, strict=False):
        if rank <= count:
            return low + (edge - low) * rank / count
        rank -= count
        low = edge
    return low


def _sum(rows: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip(*rows, strict=True)]


def _sum_by_name(rows: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for row in rows:
        for name, count in row.items():
            total[name] = total.get(name, 0) + count
    return total


def _short(value: float) -> float:
    """Four digits: more are noise, and each costs a byte on the way to the page."""
    return float(f"{value:.4g}")
