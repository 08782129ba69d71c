"""What one run of the demo is, what is measured in it, and what it has to show. Pure.

Times within a run are in seconds since its first request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise

from controller_client.fakes.controller import Answer, SyncRecord
from lb.settings import GRACE_INTERVALS

# What takes 20 s, 10 s or 60 s in a real service takes a tenth of it here.
SCALE = 10
SYNC_INTERVAL = 2.0
NO_REPLICA_WAIT = 1.0
CLIENT_TIMEOUT = 6.0
GRACE_PERIOD = GRACE_INTERVALS * SYNC_INTERVAL

RATE = 20
DURATION = 14.0
# From an update to the end of its empty list there are at most two syncs, each 10 % late.
UPDATES = (0.5, 5.0, 9.5)
LATE = 0.5

EMPTY_LIST = Answer(body=b'{"replica_info": {}}')

# Beside the URL of the controller, which is known when there is one.
OPTIONS = (
    *("--host", "127.0.0.1", "--port", "0"),
    *("--sync-interval", f"{SYNC_INTERVAL:g}s", "--no-replica-wait", f"{NO_REPLICA_WAIT:g}s"),
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


@dataclass(slots=True)
class Run:
    """One run: the load balancer with OPTIONS and `options`, and what its clients saw.

    `began` is the time of its first request (monotonic clock, which the event loop goes by), `sent`
    the number of requests so far; `results` holds those that have ended, `syncs` what the
    controller has answered.
    """

    name: str
    options: tuple[str, ...] = ()
    began: float = 0.0
    sent: int = 0
    results: list[Result] = field(default_factory=list)
    syncs: list[SyncRecord] = field(default_factory=list)

    @property
    def answered(self) -> int:
        return self.count(Outcome.ANSWERED) + self.count(Outcome.ANSWERED_LATE)

    @property
    def empty_lists(self) -> int:
        return sum(sync.answer is EMPTY_LIST for sync in self.syncs)

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
        answers = [sync.answer for sync in self.syncs if sync.received_at - self.began <= time]
        return bool(answers) and answers[-1] is EMPTY_LIST


def plan() -> list[Run]:
    """The two runs, which differ in the grace period alone."""
    return [
        Run("no grace period", options=("--grace-period", "0")),
        Run(f"grace period {GRACE_PERIOD:g} s"),
    ]


def fault(runs: Sequence[Run]) -> str | None:
    """Why the runs did not show what they should, or None if they did."""
    without, with_grace = runs
    for run in runs:
        if run.empty_lists != len(UPDATES):
            return f"{run.name}: {run.empty_lists} ready lists were empty, not {len(UPDATES)}"
    if with_grace.answered != with_grace.sent:
        lost = with_grace.sent - with_grace.answered
        return f"{with_grace.name}: {lost} of {with_grace.sent} requests were not answered 200"
    if not without.count(Outcome.REFUSED):
        return f"{without.name}: no request was answered 503, so there was nothing to cure"
    return None
