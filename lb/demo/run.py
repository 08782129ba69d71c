"""What is measured in the demo, and what it has to show. Pure.

Times within a run are in seconds since its first request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from typing import Any

from lb.settings import GRACE_INTERVALS

# What takes 20 s, 10 s or 60 s in a real service takes a tenth of it here.
SCALE = 10
SYNC_INTERVAL = 2.0
NO_REPLICA_WAIT = 1.0
CLIENT_TIMEOUT = 6.0
GRACE_PERIOD = GRACE_INTERVALS * SYNC_INTERVAL
# From 1.4 s after a sync, so that the next meets it and the one after that does not: syncs are
# up to 10 % early or late.
GAP = 1.2
UPDATE_AFTER_SYNC = 1.4

RATE = 20
DURATION = 14.0
# No sooner than this; and from an update to the end of its empty list there are two syncs.
UPDATES = (0.5, 5.0, 9.5)
LATE = 0.5

# Beside those that an embedded service gives its balancer.
OPTIONS = (
    *("--sync-interval", f"{SYNC_INTERVAL:g}s"),
    *("--no-replica-wait", f"{NO_REPLICA_WAIT:g}s"),
)


class Outcome(IntEnum):
    """What became of a request, from good to bad."""

    ANSWERED = 0  # with a 200
    ANSWERED_LATE = 1  # after more than LATE
    REFUSED = 2  # with a 503
    FAILED = 3  # in any other way
    HUNG = 4  # no answer within CLIENT_TIMEOUT


@dataclass(frozen=True, slots=True)
class Result:
    """One request: when it was sent, when it ended, and how."""

    sent: float
    ended: float
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Sync:
    """When the balancer was told the ready list, and whether that was empty."""

    time: float
    empty: bool


@dataclass(slots=True)
class Run:
    """A service under load: the load balancer with `options`, and what its clients saw.

    `began` is the time of its first request (monotonic clock, which the event loop goes by), `sent`
    the number of requests so far; `results` holds those that have ended.
    """

    name: str
    options: tuple[str, ...] = ()
    gap: float = 0.0
    began: float = 0.0
    sent: int = 0
    results: list[Result] = field(default_factory=list)
    syncs: list[Sync] = field(default_factory=list)

    @property
    def answered(self) -> int:
        return self.count(Outcome.ANSWERED) + self.count(Outcome.ANSWERED_LATE)

    @property
    def empty_lists(self) -> int:
        return sum(sync.empty for sync in self.syncs)

    def count(self, outcome: Outcome) -> int:
        return sum(result.outcome is outcome for result in self.results)

    def longest_gap(self) -> float:
        """The longest time in which no request was answered with a 200."""
        answers = (each.ended for each in self.results if each.outcome <= Outcome.ANSWERED_LATE)
        last_sent = max((each.sent for each in self.results), default=0.0)
        times = sorted([0.0, *answers, last_sent])
        return max(later - earlier for earlier, later in pairwise(times))

    def worst(self, slice_seconds: float) -> dict[int, Outcome]:
        """By the number of the slice of time: the worst that befell a request sent in it."""
        worst: dict[int, Outcome] = {}
        for result in self.results:
            number = int(result.sent / slice_seconds)
            worst[number] = max(result.outcome, worst.get(number, result.outcome))
        return worst

    def list_is_empty(self, time: float) -> bool:
        """Whether the last ready list that was given out by then was empty."""
        given = [sync for sync in self.syncs if sync.time <= time]
        return bool(given) and given[-1].empty


@dataclass(frozen=True, slots=True)
class Frame:
    """The service at a time, as `skyserve-lb status --json` has it."""

    time: float
    row: dict[str, Any]

    @property
    def state(self) -> object:
        """What makes one frame another than the one before."""
        replicas = ((each["id"], each["version"], each["status"]) for each in self.row["replicas"])
        return self.row["version"], *replicas

    def ready(self, version: int) -> int:
        """How many replicas of this version are ready."""
        rows = self.row["replicas"]
        return sum((each["version"], each["status"]) == (version, "READY") for each in rows)

    def settled(self, version: int, count: int) -> bool:
        """Whether the service has so many replicas of this version ready, and no others."""
        return self.ready(version) == count == len(self.row["replicas"])


@dataclass(slots=True)
class Step:
    """One update of the service: its number becomes the version, `count` the number of replicas."""

    title: str
    version: int
    count: int
    text: str
    mode: str
    began: float = 0.0
    frames: list[Frame] = field(default_factory=list)

    @property
    def shown(self) -> list[Frame]:
        """The frames to show: the first new replica ready beside old ones, and the end."""
        mixed = [each for each in self.frames if each.ready(self.version) and not self._over(each)]
        return [*mixed[:1], *self.frames[-1:]]

    def _over(self, frame: Frame) -> bool:
        return frame.settled(self.version, self.count)

    @property
    def done(self) -> bool:
        return bool(self.frames) and self._over(self.frames[-1])


Over = Callable[[Run], bool]


def plan() -> list[Run]:
    """The two runs with the fault, which differ in the grace period alone."""
    return [
        Run("no grace period", options=(*OPTIONS, "--grace-period", "0"), gap=GAP),
        Run(f"grace period {GRACE_PERIOD:g} s", options=OPTIONS, gap=GAP),
    ]


def steps() -> list[Step]:
    """The updates without the fault, of a service of two replicas."""
    return [
        Step("A count-only update, 2 replicas to 3", 2, 3, "Hello", "rolling"),
        Step("A rolling update to another text", 3, 3, "Hi", "rolling"),
        Step("A blue-green update to another text", 4, 3, "Hey", "blue_green"),
    ]


def fault(runs: Sequence[Run], updated: Run, steps: Sequence[Step]) -> str | None:
    """Why it did not show what it should, or None if it did."""
    without, with_grace = runs
    for run in runs:
        if run.empty_lists != len(UPDATES):
            return f"{run.name}: {run.empty_lists} ready lists were empty, not {len(UPDATES)}"
    for run in (with_grace, updated):
        if run.answered != run.sent:
            lost = run.sent - run.answered
            return f"{run.name}: {lost} of {run.sent} requests were not answered 200"
    if not without.count(Outcome.REFUSED):
        return f"{without.name}: no request was answered 503, so there was nothing to cure"
    return next((f"{step.title}: it did not end" for step in steps if not step.done), None)


def full(run: Run) -> bool:
    """Whether a run of the two has sent all its requests."""
    return run.sent >= round(RATE * DURATION)
