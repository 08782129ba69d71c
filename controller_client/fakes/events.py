"""Lets connections wait for a `threading.Event`, which an event loop cannot await."""

import asyncio
import threading

INTERVAL = 0.005  # seconds between two looks


class EventWatch:
    """Looks at every event that is waited for, once for all who wait: thousands may."""

    def __init__(self) -> None:
        self._waited_for: dict[threading.Event, asyncio.Future[None]] = {}

    def future(self, event: threading.Event) -> asyncio.Future[None]:
        """Return a future of the running loop that is done soon after the event was set."""
        loop = asyncio.get_running_loop()
        if not self._waited_for:
            loop.call_later(INTERVAL, self._look, loop)
        return self._waited_for.setdefault(event, loop.create_future())

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        for event in [event for event in self._waited_for if event.is_set()]:
            self._waited_for.pop(event).set_result(None)
        if self._waited_for:
            loop.call_later(INTERVAL, self._look, loop)
