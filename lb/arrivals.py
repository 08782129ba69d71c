"""Arrivals: the timestamps of client requests on their way to the controller's autoscaler.

Pure. The syncer takes a batch and reports it; after a failed sync it restores the batch. So each
arrival is reported at least once if its sync can be.
"""

from __future__ import annotations

from collections import deque

# The autoscaler counts the arrivals of the last 60 s: an older one changes nothing there.
WINDOW_SECONDS = 60.0
# 60 s at 8,000 requests/s; beyond it the oldest go first.
CAPACITY = 500_000


class Arrivals:
    """Pending arrivals, in unix seconds.

    `dropped_expired` and `dropped_overflow` count those that were given up for good.
    """

    def __init__(self, *, window: float = WINDOW_SECONDS, capacity: int = CAPACITY) -> None:
        self._window = window
        self._capacity = capacity
        self._pending: deque[float] = deque()
        self.dropped_expired = 0
        self.dropped_overflow = 0

    def __len__(self) -> int:
        return len(self._pending)

    def record(self, timestamp: float) -> None:
        """Note one arrival."""
        self._pending.append(timestamp)
        if len(self._pending) > self._capacity:
            self._pending.popleft()
            self.dropped_overflow += 1

    def take(self, now: float) -> list[float]:
        """Remove and return all pending arrivals younger than the window, ascending.

        The controller trims its own list by bisection, which needs them sorted, and a clock that
        was set back leaves them unsorted here.
        """
        oldest = now - self._window
        batch = sorted(t for t in self._pending if t >= oldest)
        self.dropped_expired += len(self._pending) - len(batch)
        self._pending.clear()
        return batch

    def restore(self, batch: list[float]) -> None:
        """Put a taken batch back: its sync failed."""
        self._pending.extendleft(reversed(batch))
        excess = max(0, len(self._pending) - self._capacity)
        for _ in range(excess):
            self._pending.popleft()
        self.dropped_overflow += excess
