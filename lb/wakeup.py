"""Wakes all who wait: here, for the set of routable replicas to change."""

from __future__ import annotations

import asyncio

import anyio


class Wakeup:
    """Wait for the next `fire`, or until a time is over."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def fire(self) -> None:
        """Wake everyone who waits now."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self, seconds: float) -> None:
        """Wait for the next fire, `seconds` at the most."""
        with anyio.move_on_after(seconds):
            await self._event.wait()
