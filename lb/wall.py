"""The wall: the end of a request's time, however it is spent."""

from __future__ import annotations

import asyncio
import sys
import time


class Wall:
    """Ends what the current task waits for at a moment, with TimeoutError, unless it is lifted before.

    `at` is a time of the monotonic clock. anyio.fail_after is the general form of this; it costs
    18 us where this costs 3, of about 100 us that a whole request costs.
    """

    def __init__(self, at: float) -> None:
        self._at = at
        self._met = False

    def __enter__(self) -> Wall:
        loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._timer = loop.call_later(max(0.0, self._at - time.monotonic()), self._meet)
        return self

    def _meet(self) -> None:
        self._met = True
        if self._task is not None:
            self._task.cancel()

    def lift(self) -> None:
        """From now on there is no limit."""
        self._timer.cancel()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.lift()
        if self._met and kind is asyncio.CancelledError:
            if sys.version_info >= (3, 11) and self._task is not None:
                self._task.uncancel()
            raise TimeoutError
