"""The retry budget of one request: its wall, the verdict on a failed attempt, the pause before the next.

Pure: the time is passed in as `now` (seconds of a monotonic clock).
"""

from __future__ import annotations

import random
from collections.abc import Container
from dataclasses import dataclass

from lb.errors import AttemptError, Resend
from lb.settings import RetryMode

# A request that is lost after it was sent may be what breaks the replica, so it is not sent to all
# of them: three times is what SkyServe's own balancer tries (LB_MAX_RETRY).
MAX_SENDS = 3
FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 1.0

# RFC 9110, section 9.2.2.
IDEMPOTENT_METHODS = frozenset({"GET", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE"})


@dataclass(frozen=True)
class RetryPolicy:
    """The limits of every request: what `--retry` says of a request that was sent and lost before
    any response byte, and two times in seconds."""

    mode: RetryMode
    total_timeout: float
    no_replica_wait: float


def is_safe_to_resend(method: str, header_names: Container[bytes]) -> bool:
    """Does sending the request twice do what sending it once does? The names are in lower case."""
    return method in IDEMPOTENT_METHODS or b"idempotency-key" in header_names


class RetryBudget:
    """What one request may still spend.

    The *wall* is `total_timeout` after arrival; it bounds attempts, waits and pauses together.
    The *wait* is the time, in all, that the request may be without a replica that accepts it.
    """

    __slots__ = ("_jitter", "_pauses", "_policy", "_sends", "_unserved_since", "_waited", "wall")

    def __init__(self, policy: RetryPolicy, now: float, jitter: random.Random) -> None:
        self._policy = policy
        self._jitter = jitter
        self._sends = 0
        self._pauses = 0
        self._waited = 0.0
        self._unserved_since: float | None = None
        self.wall = now + policy.total_timeout

    def sent(self, now: float) -> None:
        """A replica accepted the request, so the wait is interrupted."""
        self._sends += 1
        self._pauses = 0
        if self._unserved_since is not None:
            self._waited += now - self._unserved_since
            self._unserved_since = None

    def may_resend(self, error: AttemptError, *, safe: bool, body_complete: bool) -> bool:
        """May the request of this failed attempt be sent again?

        `safe` is `is_safe_to_resend`; `body_complete` tells whether all that was read of its body
        is still here.
        """
        if not body_complete or error.resend is Resend.NEVER:
            return False
        if error.resend is Resend.ALWAYS:
            return True
        allowed = self._policy.mode == "before-response" or safe
        return allowed and self._sends < MAX_SENDS

    def wait_left(self, now: float) -> float:
        """Seconds that the request may still wait for a replica; starts the wait if it is not running."""
        if self._unserved_since is None:
            self._unserved_since = now
        waited = self._waited + now - self._unserved_since
        return min(self._policy.no_replica_wait - waited, self.wall - now)

    def pause(self) -> float:
        """Seconds to pause before all replicas are tried once more: doubling, jittered."""
        longest = min(FIRST_PAUSE_SECONDS * 2.0 ** min(self._pauses, 10), LONGEST_PAUSE_SECONDS)
        self._pauses += 1
        return longest * self._jitter.uniform(0.5, 1.0)
