"""One TCP or TLS connection as the data path sees it: write, wait for room, pause reading, abort.

Base of both sides: `lb.server.ClientConnection` and `lb.upstream.UpstreamConnection`. What one side
sends flows into the other at once; where that is full, the first one's socket is held, so that a
slow reader stalls the writer and not our memory. The bodies that aiohttp's parsers fill are
`aiohttp.StreamReader`s, which hold the socket in the same way while nobody takes them.
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
        self.full = False  # has the peer enough to take for now?
        # Whose bytes are written here, and where those that come in here are written to.
        self._source: Connection | None = None
        self._sink: Connection | None = None
        # The other side of an upgraded connection, which gets all that comes in here.
        self.tunnel: Connection | None = None
        self.tunnel_bytes = 0
        self.frames: FrameStream | None = None  # what comes in, where that is WebSocket frames
        self._reading_held = False
        self._news: select.poll | None = None

    @property
    def connected(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

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
        self.full = True
        if self._source is not None:
            self._source.pause_reading()

    def resume_writing(self) -> None:
        self.full = False
        if self._source is not None:
            self._source.resume_reading()

    def flow_into(self, sink: Connection) -> None:
        """From now on what comes in here is written there: hold this socket while that one is full."""
        self._sink = sink
        sink._source = self
        if sink.full:
            self.pause_reading()
        elif self._reading_held:
            self.resume_reading()

    def end_flow(self) -> None:
        """What comes in from now on is not for the other side any more."""
        if self._sink is not None:
            self._sink._source = None
            self._sink = None
            if self._reading_held:
                self.resume_reading()

    def join(self, other: Connection) -> None:
        """Make the two the ends of a tunnel."""
        self.begin_tunnel(other)
        other.begin_tunnel(self)

    def begin_tunnel(self, other: Connection) -> None:
        """From now on what comes in here is the other end's, as it is."""
        self.tunnel = other
        self.flow_into(other)

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

    def write_all(self, pieces: list[bytes]) -> None:
        """Send them all, together and without a copy."""
        if self.transport is not None:
            self.transport.writelines(pieces)

    def pause_reading(self) -> None:
        if not self._reading_held and self.transport is not None:
            self._reading_held = True
            self.transport.pause_reading()

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Read again, unless what comes in has nowhere to go.

        `resume_parser` is part of aiohttp's call, and its parser is never paused here.
        """
        if not self._reading_held or (self._sink is not None and self._sink.full):
            return
        if self.transport is not None:
            self._reading_held = False
            self.transport.resume_reading()

    def has_hung_up(self) -> bool:
        """Has the peer closed, though we do not read? Asks the kernel (a paused socket tells nothing)."""
        return self.transport is None or bool(self._poller(select.POLLRDHUP).poll(0))

    def has_news(self) -> bool:
        """Is anything here to be read, the end included, that the loop has not yet seen?"""
        if not self.connected:
            return True
        if self._news is None:
            self._news = self._poller(select.POLLIN | select.POLLRDHUP)
        return bool(self._news.poll(0))

    def _poller(self, events: int) -> select.poll:
        poller = select.poll()
        poller.register(self._socket().fileno(), events)
        return poller

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
