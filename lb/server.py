"""The client side: accept connections, parse requests, hand them to the proxy one at a time.

A connection serves its requests in order, one at a time; whoever handles one is told as its body
comes and if the client leaves. What is no valid request never gets further than this module.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from aiohttp import StreamReader
from aiohttp.http import HttpProcessingError, RawRequestMessage

from lb.chunks import ChunkScanner
from lb.errors import BadRequest, Rejected
from lb.headers import own_answer
from lb.request import Request
from lb.transport import Connection
from lb.wire import END_OF_HEAD, MAX_HEAD_BYTES, READ_LIMIT, fault_of, request_parser, status_of

# Requests that a client may have sent ahead (pipelined) before we stop reading from it.
MAX_AHEAD = 8
# Connections that wait to be accepted.
BACKLOG = 1024
# After an answer that came before its request was read: how long, and how much, we go on reading,
# so that the client gets the answer rather than an RST (RFC 9112, section 9.6).
LINGER_SECONDS = 5.0
LINGER_BYTES = 64 * 1024 * 1024
# The same for connections that are too many: these are not counted, so they must be short.
LINGER_REFUSED_SECONDS = 1.0
SWEEP_SECONDS = 0.5
LINE_ENDS = re.compile(rb"[\r\n]+")


class Handling(Protocol):
    """One request being served; it ends with `ClientConnection.served`."""

    def start(self) -> None: ...

    def upload_came(self) -> None:
        """There is more of the request's body, or its end."""

    def upload_failed(self, fault: BadRequest) -> None:
        """The rest of the body is not valid HTTP."""

    def room(self) -> None:
        """The client has taken enough for more to be written."""

    def tunnel_ended(self) -> None:
        """One end of the upgraded connection is gone."""

    def client_left(self) -> None: ...


Handler = Callable[[Request, "ClientConnection"], Handling]


class ClientConnection(Connection):
    """One connection of a client."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._server = server
        self._parser: Any = None
        # Where we are in what the client sends.
        self._receive: Callable[[bytes], bytes] = self._in_head
        self._requests: deque[Request] = deque()
        self._request: Request | None = None  # the one being served...
        self._handling: Handling | None = None  # ...and by whom
        self._serving = False  # guards `_serve` against being entered twice
        self._body: StreamReader | None = None  # of the newest request...
        self._left = 0  # ...and what is to come of it, if it has a length...
        self._chunks: ChunkScanner | None = None  # ...or its chunks
        self._fault: BadRequest | None = None
        self._head_bytes = 0
        self._since = time.monotonic()  # of being idle, or of the first byte of a head
        self._lingering_until: float | None = None
        self._unsent = 0  # bytes of the last answer, when the sweep last looked
        self._ignored = 0
        self.after_upgrade: bytes | None = None
        self.busy = False
        self.cut_off = False  # by us, at the end of the drain
        self.address = ""
        self.scheme = b"http"

    # --- life of the connection -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        self.address = peer[0] if isinstance(peer, tuple) else ""
        if transport.get_extra_info("sslcontext") is not None:
            self.scheme = b"https"
        self._parser = request_parser(self)
        if not self._server.admit(self):
            self.refuse(Rejected("overload", "Too many connections."))
            self._linger()
            asyncio.get_running_loop().call_later(LINGER_REFUSED_SECONDS, self.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.forget(self)
        self._requests.clear()
        super().connection_lost(exc)
        if self._handling is not None:
            self._handling.client_left()
        # Each of these leads back here, and would keep the connection until the next collection.
        self._receive, self._parser, self._body = _nothing, None, None

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._handling is not None and self.connected and self.tunnel is None:
            self._handling.room()

    def eof_received(self) -> None:
        """A client that sends no more counts as one that left: a gone one sends that much, too."""
        if self.busy:
            # A close would wait for it to read what we have written. Where it does read on, half of
            # an answer must not look like all of it.
            self.abort(reset=self._handling is not None and self.tunnel is None)

    def close(self) -> None:
        """Close as soon as all is sent; where the client does not take it, in a while all the same."""
        if self._lingering_until is None:
            self._lingering_until = time.monotonic() + self._server.keepalive_timeout
        super().close()

    def _serve(self) -> None:
        """Serve request after request until one is being worked on, or no more can follow."""
        if self._serving:
            return
        self._serving = True
        while self._requests and not self.busy:
            self.busy = True
            self._request = self._requests.popleft()
            if self._reading_held:
                self.resume_reading()
            self._handling = self._server.handler(self._request, self)
            self._handling.start()
        self._serving = False
        if self._fault is not None and not self.busy and self._lingering_until is None:
            self.refuse(self._fault)
            self._linger()

    def served(self) -> None:
        """A request is over: go on with the next one, or end, as it says."""
        request = self._request
        assert request is not None
        self._handling = self._request = None
        if not self.connected or self.tunnel is not None:
            return  # its loss is still to be told, if it was aborted
        if request.body is not None and not request.body.is_eof():
            self._linger()
        elif not request.keep_alive or self._server.draining:
            self._end()
        else:
            self.busy = False
            self._since = time.monotonic()
            if request.upgrade is not None:
                self._resume_parsing()
            self._serve()

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Read again, unless enough is here already; the end of each body asks for it."""
        if len(self._requests) < MAX_AHEAD:
            super().resume_reading()

    def refuse(self, error: BadRequest | Rejected) -> None:
        """Answer what never became a request, and say that the connection ends."""
        self._server.refused(error)
        body = json.dumps({"detail": error.detail}).encode()
        extra = [(b"Retry-After", b"%d" % error.retry_after)] if isinstance(error, Rejected) else []
        self.write(own_answer(error.status, body, close=True, extra=extra))

    def _end(self) -> None:
        """Close behind an answer that said so; what was sent ahead in vain is answered no more."""
        if self._fault is not None or self._requests or self.after_upgrade or self._head_bytes:
            self._linger()
        else:
            self.close()

    def _linger(self) -> None:
        """Close, but read on for a while: closing with unread bytes would destroy the answer."""
        self._lingering_until = time.monotonic() + LINGER_SECONDS
        self._receive = self._in_vain
        self.after_upgrade = None
        self._requests.clear()
        if self.transport is not None:
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self.resume_reading()

    def partner_lost(self) -> None:
        """The replica ended the upgraded connection: so do we, and the client gets all of it."""
        if self.transport is not None and self.transport.can_write_eof():
            self._linger()
        else:
            self.close()
        if self._handling is not None:
            self._handling.tunnel_ended()

    # --- what comes in: each `_in_...` takes its part of the data and returns the rest -------------

    def data_received(self, data: bytes) -> None:
        while data:
            data = self._receive(data)
        self._hand_on()

    def _hand_on(self) -> None:
        """Tell of what has come: more of a body, or a request."""
        if self._handling is None:
            self._serve()
        elif self._request is not None and self._request.body is not None:
            self._handling.upload_came()

    def _in_head(self, data: bytes) -> bytes:
        """Up to the end of a head: within one piece the parser would drop what follows that of an
        upgrade, and forget the requests ahead of a bad one."""
        if data[0] in b"\r\n":  # within a head it may be the rest of its end, and no byte more
            end = 1 if self._head_bytes else LINE_ENDS.match(data).end()  # type: ignore[union-attr]
        else:
            found = data.find(END_OF_HEAD)
            end = len(data) if found < 0 else found + len(END_OF_HEAD)
        piece = data[:end]
        if not self._head_bytes:
            self._since = time.monotonic()
        messages, upgraded = self._feed(piece)
        if messages:
            self._head_bytes = 0
            for message, body in messages:
                self._take(message, body)
            if upgraded and self.after_upgrade is None and self._fault is None:
                self._parser = request_parser(self)  # an upgrade that we do not take for one
        elif self._head_bytes or piece.strip(
            b"\r\n"
        ):  # empty lines go before a head: RFC 9112, 2.2
            self._head_bytes += len(piece)
            if self._head_bytes > MAX_HEAD_BYTES:
                detail = f"the head is longer than {MAX_HEAD_BYTES} bytes"
                self._reject(BadRequest(detail, status=431))
        return data[end:]

    def _in_body(self, data: bytes) -> bytes:
        """Up to the end of a body with a length."""
        piece = data[: self._left]
        self._left -= len(piece)
        _, upgraded = self._feed(piece)
        if not self._left:
            self._receive = self._in_head
            if upgraded:
                self._parser = request_parser(self)
        return data[len(piece) :]

    def _in_chunks(self, data: bytes) -> bytes:
        """Up to the end of a chunked body: the parser would take the last trailer for the first header
        of the next request, so that one gets a parser of its own."""
        assert self._chunks is not None
        end = self._chunks.end_in(data, 0)
        self._feed(data[:end])
        if end is None or self._fault is not None:
            return b""
        self._receive = self._in_head
        self._parser = request_parser(self)
        return data[end:]

    def _in_upgrade(self, data: bytes) -> bytes:
        """What follows is the other protocol's, once it is agreed."""
        assert self.after_upgrade is not None
        self.after_upgrade += data
        if len(self.after_upgrade) > READ_LIMIT:
            self.pause_reading()
        return b""

    def _in_tunnel(self, data: bytes) -> bytes:
        self.tunnel_data(data)
        return b""

    def _in_vain(self, data: bytes) -> bytes:
        """No request can follow: read so much, and no more, that the client gets its answer."""
        self._ignored += len(data)
        if self._ignored > LINGER_BYTES:
            self.abort()
        return b""

    def _feed(self, piece: bytes) -> tuple[Any, bool]:
        """The messages that end in this piece, and whether the parser stops for another protocol."""
        try:
            messages, upgraded, _ = self._parser.feed_data(piece)
        except HttpProcessingError as error:
            self._reject(_bad_request(error, piece))
            return (), False
        return messages, upgraded

    def _take(self, message: RawRequestMessage, body: StreamReader) -> None:
        request = Request(message, body)
        self._body = request.body
        if request.refused is not None:
            self._reject(request.refused)
            return
        if request.upgrade is not None:
            self.after_upgrade = b""
            self._receive = self._in_upgrade
        elif request.chunked:
            self._chunks = ChunkScanner()
            self._receive = self._in_chunks
        elif request.length is not None:
            self._left = int(request.length)
            if self._left:
                self._receive = self._in_body
        self._requests.append(request)
        if len(self._requests) >= MAX_AHEAD:
            self.pause_reading()

    def begin_tunnel(self, other: Connection) -> None:
        super().begin_tunnel(other)
        self._receive = self._in_tunnel

    def _reject(self, fault: BadRequest) -> None:
        """Take no more from this client; what it sent before the fault is still served."""
        if self._fault is not None:
            return
        self._fault = fault
        self._receive = self._in_vain
        if self._body is not None and not self._body.is_eof():
            if self._requests and self._requests[-1].body is self._body:
                self._requests.pop()  # its turn had not come: no replica needs to hear of it
            elif self._handling is not None:
                self._handling.upload_failed(fault)

    def _resume_parsing(self) -> None:
        """After a refused upgrade: what follows are requests again."""
        if self.after_upgrade is not None:
            rest, self.after_upgrade = self.after_upgrade, None
            self._parser = request_parser(self)
            self._receive = self._in_head
            self.resume_reading()
            self.data_received(rest)

    # --- limits of time, seen to by the server's sweep ------------------------------------------

    def check(self, now: float) -> None:
        """End what has gone on for too long; notice a client that left while we do not read."""
        if self._lingering_until is not None:
            self._check_the_end(self._lingering_until, now)
        elif self.tunnel is not None:
            pass  # what it sent before it left is still on its way to the replica
        elif self._reading_held:
            if self.has_hung_up():
                self.eof_received()
        elif self.busy or self._requests or self._fault is not None:
            pass
        elif self._head_bytes and now - self._since >= self._server.header_timeout:
            self._reject(BadRequest("the request head did not come in time", status=408))
            self._serve()
        elif not self._head_bytes and now - self._since >= self._server.keepalive_timeout:
            self.close()

    def _check_the_end(self, until: float, now: float) -> None:
        """The time to linger begins when the answer is sent; a client that takes none of it is cut."""
        unsent = self.transport.get_write_buffer_size() if self.transport is not None else 0
        if unsent != self._unsent:
            self._unsent = unsent
            seconds = self._server.keepalive_timeout if unsent else LINGER_SECONDS
            self._lingering_until = now + seconds
        elif now >= until:
            self.abort()

    @property
    def draining(self) -> bool:
        return self._server.draining

    async def drain_begins(self) -> None:
        """Wait until the server drains."""
        await self._server.drain_begun.wait()

    @property
    def unfinished(self) -> bool:
        """Is there a request, or an answer that is not all sent?"""
        unsent = self.transport is not None and self.transport.get_write_buffer_size() > 0
        return self.busy or bool(self._requests) or unsent

    @property
    def idle(self) -> bool:
        """Is there no request, not even a part of one?"""
        return not (self.unfinished or self._head_bytes)


def _nothing(data: bytes) -> bytes:
    """Nothing comes from a connection that is lost."""
    return b""


def _bad_request(error: HttpProcessingError, data: bytes) -> BadRequest:
    detail = f"The request is not valid HTTP: {fault_of(error)}."
    return BadRequest(detail, status=status_of(error, data))


class Server:
    """The data port: all client connections, and their limits (times in seconds)."""

    def __init__(
        self,
        handler: Handler,
        *,
        header_timeout: float,
        keepalive_timeout: float,
        max_connections: int,
        refused: Callable[[BadRequest | Rejected], None],
    ) -> None:
        self.handler = handler
        self.header_timeout = header_timeout
        self.keepalive_timeout = keepalive_timeout
        self.refused = refused
        self.drain_begun = asyncio.Event()
        self._max_connections = max_connections
        self._connections: set[ClientConnection] = set()
        self._listeners: list[asyncio.Server] = []
        self._sweeper: asyncio.TimerHandle | None = None

    async def start(
        self, host: str, port: int, tls: ssl.SSLContext | None
    ) -> list[tuple[str, int]]:
        """Listen; the addresses bound. Raises OSError where that cannot be."""
        listener = await self._listen(tls, host=host, port=port, backlog=BACKLOG)
        return [sock.getsockname()[:2] for sock in listener.sockets]

    async def start_on(self, sockets: Sequence[socket.socket], tls: ssl.SSLContext | None) -> None:
        """Take the connections of sockets that listen already."""
        for sock in sockets:
            await self._listen(tls, sock=sock, backlog=BACKLOG)

    async def _listen(self, tls: ssl.SSLContext | None, **where: Any) -> asyncio.Server:
        listener = await asyncio.get_running_loop().create_server(
            lambda: ClientConnection(self),
            ssl=tls,
            ssl_handshake_timeout=self.header_timeout if tls else None,
            **where,
        )
        self._listeners.append(listener)
        if self._sweeper is None:
            self._sweep()
        return listener

    def admit(self, connection: ClientConnection) -> bool:
        """Take a new connection in, unless there are too many."""
        if len(self._connections) >= self._max_connections:
            return False
        self._connections.add(connection)
        return True

    def forget(self, connection: ClientConnection) -> None:
        """A connection is gone."""
        self._connections.discard(connection)

    def __len__(self) -> int:
        return len(self._connections)

    @property
    def draining(self) -> bool:
        """Are we shutting down?"""
        return self.drain_begun.is_set()

    @property
    def unfinished(self) -> int:
        """How many clients wait for an answer, or for the rest of one."""
        return sum(connection.unfinished for connection in self._connections)

    def _sweep(self) -> None:
        # First, so that a fault of ours in one check would not be the last of all checks.
        self._sweeper = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep)
        now = time.monotonic()
        for connection in tuple(self._connections):
            connection.check(now)

    def stop_listening(self) -> None:
        """Accept no more connections."""
        for listener in self._listeners:
            listener.close()

    def close_idle(self) -> None:
        """Close the connections on which nothing goes on."""
        for connection in tuple(self._connections):
            if connection.idle:
                connection.close()

    def abort_all(self) -> None:
        """Cut every connection that is left."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in tuple(self._connections):
            connection.cut_off = True
            # An RST where an end without one might be taken for that of the answer.
            connection.abort(reset=connection.unfinished)
