"""Wakes all who wait: here, for the set of routable replicas to change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Wakeup:
    """Calls back at the next `fire`, or when a time is over."""

    def __init__(self) -> None:
        self._timers: dict[Callable[[], None], asyncio.TimerHandle] = {}

    def fire(self) -> None:
        """Wake everyone who waits now."""
        for wake in tuple(self._timers):
            self._end(wake)

    def wait(self, wake: Callable[[], None], seconds: float) -> None:
        """Call `wake` once: at the next fire, or after so many seconds."""
        loop = asyncio.get_running_loop()
        self._timers[wake] = loop.call_later(seconds, self._end, wake)

    def cancel(self, wake: Callable[[], None]) -> None:
        """Wait no more."""
        timer = self._timers.pop(wake, None)
        if timer is not None:
            timer.cancel()

    def _end(self, wake: Callable[[], None]) -> None:
        if wake in self._timers:  # another's waking may have ended its wait
            self.cancel(wake)
            wake()
