"""Server-sent events: the status, again and again, for as long as somebody looks.

A listener holds one payload at the most beside what its socket takes: it is sent the newest one
when it is ready for it, and what came in between is never queued. One that does not read is cut off.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable

import anyio
from aiohttp import web

MAX_LISTENERS = 16
INTERVAL_SECONDS = 1.0
STALL_SECONDS = 20.0
RECONNECT_SECONDS = 2


class Live:
    """Sends what `render` makes, in one line, to up to `MAX_LISTENERS`; made once for all of them."""

    def __init__(self, render: Callable[[], str]) -> None:
        self._render = render
        self._event = b""
        self._made_at = float("-inf")
        self.listeners = 0

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Feed one listener until it leaves, is cut off or the server ends."""
        if self.listeners >= MAX_LISTENERS:
            return web.Response(
                status=503,
                text=f"{MAX_LISTENERS} pages are fed already; GET /status works\n",
                headers={"Retry-After": "5"},
            )
        self.listeners += 1
        try:
            return await self._feed(request)
        finally:
            self.listeners -= 1

    async def _feed(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-store",
                "X-Accel-Buffering": "no",  # a proxy of nginx's would hold it back
            }
        )
        await response.prepare(request)
        try:
            await response.write(b"retry: %d\n\n" % (RECONNECT_SECONDS * 1000))
            while True:
                with anyio.fail_after(STALL_SECONDS):
                    await response.write(self._newest())
                await anyio.sleep(INTERVAL_SECONDS)
        except ConnectionError:
            pass  # it has left
        except TimeoutError:
            _reset(request)
        return response

    def _newest(self) -> bytes:
        now = time.monotonic()
        if now - self._made_at >= INTERVAL_SECONDS / 2:
            self._made_at = now
            self._event = b"data: " + self._render().encode() + b"\n\n"
        return self._event


def _reset(request: web.Request) -> None:
    """End its connection, and let the kernel forget what it holds for it."""
    if request.transport is not None:
        sock = request.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request.transport.abort()
