"""One TCP or TLS connection as the data path sees it: write, wait for room, pause reading, abort.

Base of both sides: `lb.server.ClientConnection` and `lb.upstream.UpstreamConnection`. The bodies
that aiohttp's parsers fill are `aiohttp.StreamReader`s; they push back through `pause_reading` and
`resume_reading`, which hold the socket, so that a slow reader on one side stalls the writer on the
other and not our memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import struct
from typing import Any, cast

from lb.frames import FrameStream

WRITE_LIMIT = 64 * 1024

# A peer that vanishes without a FIN (its node is gone) is noticed after two minutes, on a silent
# stream or tunnel too: first probe after 60 s, then 4 in 15 s each. A live peer's kernel answers.
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
)

# Where to end a connection with an RST (SO_LINGER, on, 0 s): a FIN would look like a clean end.
_LINGER_RST = struct.pack("ii", 1, 0)


class Connection(asyncio.Protocol):
    """A connection with back-pressure both ways."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        # The other side of an upgraded connection, which gets all that comes in here.
        self.tunnel: Connection | None = None
        self.tunnel_bytes = 0
        self.frames: FrameStream | None = None  # what comes in, where that is WebSocket frames
        self._room: asyncio.Event | None = None
        self._reading_held = False

    @property
    def connected(self) -> bool:
        return self.transport is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=WRITE_LIMIT)
        sock = self.transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for level, option, value in _KEEPALIVE:
                sock.setsockopt(level, option, value)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self.resume_writing()
        if self.tunnel is not None:
            self.tunnel.partner_lost()

    def pause_writing(self) -> None:
        self._room = asyncio.Event()
        if self.tunnel is not None:
            self.tunnel.pause_reading()

    def resume_writing(self) -> None:
        if self._room is not None:
            self._room.set()
            self._room = None
        if self.tunnel is not None:
            self.tunnel.resume_reading()

    def join(self, other: Connection) -> None:
        """Make the two the ends of a tunnel; each holds its socket while the other one is full."""
        self.tunnel, other.tunnel = other, self
        for end, partner in ((self, other), (other, self)):
            if end._room is None:
                partner.resume_reading()
            else:
                partner.pause_reading()

    def tunnel_data(self, data: bytes) -> None:
        """Pass on what came in on an upgraded connection."""
        assert self.tunnel is not None
        self.tunnel_bytes += len(data)
        self.tunnel.write(data if self.frames is None else self.frames.feed(data))

    def partner_lost(self) -> None:
        """The other end of the tunnel is gone: this one ends when all is sent."""
        self.close()

    def write(self, data: bytes) -> None:
        """Send bytes; those for a closed connection are dropped, for its loss is told elsewhere."""
        if self.transport is not None:
            self.transport.write(data)

    async def drain(self) -> None:
        """Wait until the peer has taken enough for more to be written."""
        if self._room is not None:
            await self._room.wait()

    def pause_reading(self) -> None:
        if not self._reading_held and self.transport is not None:
            self._reading_held = True
            self.transport.pause_reading()

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Read again; `resume_parser` is part of aiohttp's call, and its parser is never paused here."""
        if self._reading_held and self.transport is not None:
            self._reading_held = False
            self.transport.resume_reading()

    def has_hung_up(self) -> bool:
        """Has the peer closed, though we do not read? Asks the kernel (a paused socket tells nothing)."""
        return self._poll(select.POLLRDHUP)

    def has_news(self) -> bool:
        """Is anything here to be read, the end included, that the loop has not yet seen?"""
        return self._poll(select.POLLIN | select.POLLRDHUP)

    def _poll(self, events: int) -> bool:
        sock = self._socket()
        if sock is None:
            return True
        poll = select.poll()
        poll.register(sock.fileno(), events)
        return bool(poll.poll(0))

    def abort(self, *, reset: bool = False) -> None:
        """Close at once and drop what is not sent; with `reset` so that the peer sees an error."""
        sock = self._socket()
        if reset and sock is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RST)
        if self.transport is not None:
            self.transport.abort()

    def close(self) -> None:
        """Close as soon as all is sent."""
        if self.transport is not None:
            self.transport.close()

    def _socket(self) -> Any:
        return self.transport.get_extra_info("socket") if self.transport is not None else None
