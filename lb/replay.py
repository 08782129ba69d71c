"""How much of the request bodies may be kept, so that a lost request can be sent again.

Pure accounting: one budget for the process (`--replay-budget`), one limit a body (`--replay-limit`).
"""

from __future__ import annotations


class ReplayBudget:
    """Bytes that may be kept: `limit` for one body, `total` for all bodies at a time."""

    def __init__(self, *, limit: int, total: int) -> None:
        self.limit = limit
        self.total = total
        self.used = 0


class ReplayBuffer:
    """The part of one request body that was read from the client, kept until a response comes.

    A body that outgrows the budget is let go of: from then on it is not `complete`, and its
    request is single-attempt.
    """

    def __init__(self, budget: ReplayBudget) -> None:
        self._budget = budget
        self._size = 0
        self.chunks: list[bytes] = []
        self.complete = True

    def keep(self, chunk: bytes) -> None:
        """Keep one chunk, or let go of all of them if it does not fit."""
        if not self.complete:
            return
        size = len(chunk)
        if self._size + size > self._budget.limit or self._budget.used + size > self._budget.total:
            self.release()
            return
        self.chunks.append(chunk)
        self._size += size
        self._budget.used += size

    def release(self) -> None:
        """Give the kept bytes back to the budget; calling it again changes nothing."""
        self._budget.used -= self._size
        self._size = 0
        self.chunks = []
        self.complete = False
