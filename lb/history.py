"""The last 15 minutes, as what was counted in each few seconds of them. Pure.

The data path counts anyway; every `STEP_SECONDS` the counts are compared with those of the time
before. What is kept is a bounded number of differences, which add up: over time, for a percentile
of the last minute, and over processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

STEP_SECONDS = 5
WINDOW_SECONDS = 900


@dataclass(frozen=True)
class Counts:
    """What has been counted since the start; `replicas` has the finished and the failed of each."""

    outcomes: Mapping[str, int]
    first_byte: Sequence[int]
    duration: Sequence[int]
    replicas: Mapping[str, tuple[int, int]]


class Tick(TypedDict):
    """What was counted in one step, which ended at `at` (Unix time) and took `seconds`.

    `first_byte` and `duration` are counts by histogram bucket; `in_flight` is as it was at its end.
    """

    at: int
    seconds: float
    outcomes: dict[str, int]
    first_byte: list[int]
    duration: list[int]
    in_flight: int


class History:
    """The ticks of the last `WINDOW_SECONDS`, and the sums of each replica over them."""

    def __init__(self, now: float, counts: Counts) -> None:
        """`now` is a Unix time here and below: ticks of several processes end together."""
        self._ticks: deque[Tick] = deque()
        self._replicas: deque[dict[str, tuple[int, int]]] = deque()  # of each tick
        self._sums: dict[str, tuple[int, int]] = {}
        self._begin(now, counts)

    def _begin(self, now: float, counts: Counts) -> None:
        self._sampled = now
        self._counts = counts

    def __iter__(self) -> Iterator[Tick]:
        return iter(self._ticks)

    def due(self, now: float) -> bool:
        """Has a step ended, or the clock been set back, since the last sample?"""
        return _step(now) != _step(self._sampled)

    def of_replica(self, name: str) -> tuple[int, int]:
        """How many requests of the replica have finished and failed within the window."""
        return self._sums.get(name, (0, 0))

    def sample(self, now: float, counts: Counts, in_flight: int) -> None:
        """Keep what was counted since the last sample, and forget what is too old."""
        before, since = self._counts, self._sampled
        self._begin(now, counts)
        if now <= since:  # the clock was set back: ticks to come would end before those we have
            self._forget(len(self._ticks))
            return
        self._ticks.append(
            {
                "at": _step(now) * STEP_SECONDS,
                "seconds": now - since,
                "outcomes": {
                    name: count - before.outcomes.get(name, 0)
                    for name, count in counts.outcomes.items()
                },
                "first_byte": _differences(before.first_byte, counts.first_byte),
                "duration": _differences(before.duration, counts.duration),
                "in_flight": in_flight,
            }
        )
        fresh = {
            name: difference
            for name, count in counts.replicas.items()
            if any(difference := _since(before.replicas.get(name, (0, 0)), count))
        }
        self._replicas.append(fresh)
        self._add(fresh, 1)
        old = (tick for tick in self._ticks if tick["at"] <= now - WINDOW_SECONDS)
        self._forget(len(list(old)))

    def _forget(self, count: int) -> None:
        for _ in range(count):
            self._ticks.popleft()
            self._add(self._replicas.popleft(), -1)

    def _add(self, replicas: Mapping[str, tuple[int, int]], sign: int) -> None:
        for name, (finished, failed) in replicas.items():
            old_finished, old_failed = self._sums.get(name, (0, 0))
            total = (old_finished + sign * finished, old_failed + sign * failed)
            if any(total):
                self._sums[name] = total
            else:
                del self._sums[name]


def _step(now: float) -> int:
    return int(now // STEP_SECONDS)


def _differences(old: Sequence[int], new: Sequence[int]) -> list[int]:
    return [after - before for before, after in zip(old, new, strict=True)]


def _since(old: tuple[int, int], new: tuple[int, int]) -> tuple[int, int]:
    """The difference; all of it where the replica was forgotten meanwhile and counts anew."""
    if new[0] < old[0]:
        return new
    return new[0] - old[0], new[1] - old[1]
