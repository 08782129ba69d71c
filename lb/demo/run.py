"""What one run is, and what is measured in it. Pure.

Times within a run are in seconds since its first request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise

from lb.settings import GRACE_INTERVALS

# Everything that takes 20 s, 10 s or 60 s in a real service takes a tenth of it here.
SCALE = 10
SYNC_INTERVAL = 2.0
NO_REPLICA_WAIT = 1.0
CLIENT_TIMEOUT = 6.0

RATE = 20
# From an update to the end of its empty list: at most two syncs, each 10 % late.
UPDATES = (0.5, 5.0, 9.5)
DURATION = 14.0
LATE = 0.5


class Outcome(IntEnum):
    """What became of a request, from good to bad."""

    ANSWERED = 0
    ANSWERED_LATE = 1
    REFUSED = 2  # with a 503
    FAILED = 3  # in any other way
    HUNG = 4  # no answer within CLIENT_TIMEOUT


@dataclass(frozen=True, slots=True)
class Result:
    """One request: when it was sent, when it ended, and how."""

    sent: float
    ended: float
    outcome: Outcome


@dataclass(slots=True)
class Run:
    """One run: the load balancer with some options, and what its clients saw.

    `sent` counts the requests sent so far, `results` holds those that have ended, and `syncs`
    tells of each sync when it was and whether its ready list was empty.
    """

    name: str
    options: tuple[str, ...]
    sent: int = 0
    results: list[Result] = field(default_factory=list)
    syncs: list[tuple[float, bool]] = field(default_factory=list)

    @property
    def empty_lists(self) -> int:
        return sum(empty for _, empty in self.syncs)

    def list_is_empty(self, time: float) -> bool:
        """Whether the last ready list that was given out by then was empty."""
        return [False, *(empty for at, empty in self.syncs if at <= time)][-1]

    @property
    def answered(self) -> int:
        return self.count(Outcome.ANSWERED) + self.count(Outcome.ANSWERED_LATE)

    def count(self, outcome: Outcome) -> int:
        return sum(result.outcome is outcome for result in self.results)

    def longest_gap(self) -> float:
        """The longest time in which no request was answered with a 200."""
        answers = (each.ended for each in self.results if each.outcome <= Outcome.ANSWERED_LATE)
        last_sent = max((each.sent for each in self.results), default=0.0)
        times = sorted([0.0, *answers, last_sent])
        return max(later - earlier for earlier, later in pairwise(times))

    def worst(self, begin: float, end: float) -> Outcome | None:
        """The worst that befell a request sent in this time; None if none has ended."""
        return max(
            (each.outcome for each in self.results if begin <= each.sent < end), default=None
        )


def plan() -> list[Run]:
    """The two runs. They differ in the grace period alone."""
    same = ("--sync-interval", f"{SYNC_INTERVAL:g}s", "--no-replica-wait", f"{NO_REPLICA_WAIT:g}s")
    return [
        Run("no grace period", (*same, "--grace-period", "0")),
        Run(f"grace period {GRACE_INTERVALS * SYNC_INTERVAL:g} s", same),
    ]
