"""The connection side of a replica: one pool a replica, and the translation of all that can fail there.

The only module that sees what the operating system, the TLS layer and the response parser raise; it
raises `lb.errors` instead. It sends what it is told, once: no re-sends, no redirects, no cookies, no
headers of its own, and it unpacks nothing.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import anyio
from aiohttp.http import HttpProcessingError, RawResponseMessage

from lb.errors import (
    AttemptError,
    BadResponse,
    ConnectFailed,
    LostBeforeResponse,
    ResponseCut,
    StaleConnection,
    UpstreamReason,
)
from lb.headers import Fields, has_no_body
from lb.metrics import Metrics
from lb.replicas import Replica
from lb.transport import Connection
from lb.wire import (
    CARRIED,
    END_OF_ANSWER_HEAD,
    MAX_HEAD_BYTES,
    check_answer,
    chunk_parser,
    fault_of,
    response_head_parser,
)

READ_SIZE = 256 * 1024
# 1xx answers to one request that are passed on; a replica that sends more is not well.
MAX_INTERIM = 100


@dataclass(slots=True)
class Response:
    """The head of a replica's answer, and how the end of its body is told, if it has one."""

    status: int
    reason: bytes
    fields: Fields
    has_body: bool
    chunked: bool
    length: bytes | None
    may_keep: bool  # may the connection be kept?

    @property
    def has_length(self) -> bool:
        """Can the client tell where it ends?"""
        return not self.has_body or (self.length is not None and not self.chunked)


class Taker(Protocol):
    """Who waits for an answer, and is told of it as it comes."""

    def answered(self, response: Response, data: bytes, ends: bool) -> None:
        """A head, of an interim (1xx) answer or of the answer proper, with what came of its body.

        `ends`: that is all of it.
        """

    def body_came(self, data: bytes, ends: bool) -> None:
        """More of the body of the answer proper, or its end."""

    def lost(self, error: AttemptError | ResponseCut) -> None:
        """No more will come; `ResponseCut` if the head of the answer proper was told."""


class UpstreamConnection(Connection):
    """One connection to a replica; it carries one request at a time."""

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self._pool = pool
        self.reused = False
        self.idle_since = 0.0
        self.after_upgrade = b""
        self._taker: Taker | None = None
        # Where we are in what the replica sends.
        self._receive: Callable[[bytes], None] = self._unasked
        self._parser: Any = None  # of heads, or of a chunked body...
        self._stream: Any = None  # ...which it fills
        self._method = "GET"
        self._left = 0  # of a body with a length
        self._answer_begun = False
        self._head_bytes = 0  # of the answer's head, so far...
        self._carried = b""  # ...and the last of them, which may be the start of its end
        self._interim = 0  # 1xx answers, so far
        self._told = False  # of the head of the answer proper...
        self._complete = False  # ...and of all of it
        self._keep = True
        self._aborted = False

    # --- one exchange ---------------------------------------------------------------------------

    def begin(self, taker: Taker, method: str) -> None:
        """Get ready for the answer to one request of this method."""
        self._taker = taker
        self._method = method
        if self._parser is None:
            self._parser = response_head_parser(self)
        self._receive = self._in_head
        self._answer_begun = self._told = self._complete = False
        self._head_bytes = self._interim = 0

    def end(self) -> None:
        """The exchange is over, its body read to the end: keep the connection for another, or close it."""
        self.end_flow()
        in_order = self._is_in_order()
        self._taker = None
        self._receive = self._unasked
        if self._stream is not None:
            self._parser = self._stream = None
        if not in_order:
            self.abort()
        elif self._keep:
            self._pool.take_back(self)
        else:
            self.close()

    def _is_in_order(self) -> bool:
        """Is all of the request sent, and nothing here that would be taken for the next answer?"""
        if self.transport is None or self.transport.get_write_buffer_size():
            return False
        try:
            return self._stream is None or self._parser.feed_eof() is None
        except HttpProcessingError:
            return False

    def give_up(self) -> None:
        """The exchange is over before its end: nobody waits for more of it."""
        self._taker = None
        self._receive = self._unasked
        self.end_flow()
        self.abort()

    def abort(self, *, reset: bool = True) -> None:
        """Close at once. A FIN would wait behind what the replica has not read; an RST does not.

        The end of an upgraded connection is a usual one, so it gets its FIN.
        """
        self._aborted = True
        super().abort(reset=reset and self.tunnel is None)

    def begin_tunnel(self, other: Connection) -> None:
        super().begin_tunnel(other)
        self._receive = self.tunnel_data

    # --- what comes in --------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._receive(data)

    def _unasked(self, data: bytes) -> None:
        """An answer to nothing must not become the next one's answer."""
        self.abort()

    def _behind(self, data: bytes) -> None:
        """The answer was complete: these bytes belong to none."""
        self._keep = False

    def _in_head(self, data: bytes) -> None:
        """Up to the end of a head: the body is not for its parser."""
        self._answer_begun = True
        while data:
            piece = self._piece_of_head(data)
            data = data[len(piece) :]
            try:
                messages, _, _ = self._parser.feed_data(piece)
                for message, _ in messages:
                    self._head_bytes = 0
                    response = self._response(message)
                    if response.status >= 200 or response.status == 101:
                        self._answer(response, data)
                        return
                    self._pass_on(response)
            except HttpProcessingError as error:
                self._fail("protocol", f"its answer is no valid HTTP ({fault_of(error)})")
                return
            if self._head_bytes > MAX_HEAD_BYTES:
                what = f"the head of its answer is longer than {MAX_HEAD_BYTES} bytes"
                self._fail("protocol", what)
            if self._taker is None:
                return

    def _piece_of_head(self, data: bytes) -> bytes:
        """What of this belongs to the head."""
        known = self._carried + data
        found = END_OF_ANSWER_HEAD.search(known)
        if found is None:
            self._carried, piece = known[-CARRIED:], data
        else:
            piece = data[: found.end() - len(self._carried)]
            self._carried = b""
        self._head_bytes += len(piece)
        return piece

    def _response(self, message: RawResponseMessage) -> Response:
        """Raises HttpProcessingError for what must not be passed on."""
        fields = Fields(message.raw_headers)
        check_answer(message, fields)
        has_body = not has_no_body(self._method, message.code)
        return Response(
            message.code,
            message.reason.encode("utf-8", "surrogateescape"),
            fields,
            has_body,
            message.chunked,
            fields.first.get(b"content-length"),
            not message.should_close,
        )

    def _pass_on(self, response: Response) -> None:
        """An interim answer (1xx)."""
        assert self._taker is not None
        self._interim += 1
        if self._interim > MAX_INTERIM:
            self._fail("protocol", f"it sent more than {MAX_INTERIM} interim answers")
        else:
            self._taker.answered(response, b"", False)

    def _answer(self, response: Response, rest: bytes) -> None:
        """The answer proper; `rest` is what came behind its head. The last that is done with them:
        where that was all, the connection may carry the next request when this returns."""
        data = b""
        if response.status == 101:
            self._receive, self.after_upgrade = self._in_upgrade, rest
        elif not response.has_body:
            # Some replicas send one all the same, and it would be read as the next answer.
            announced = response.chunked or response.length not in (None, b"0")
            self._keep = self._keep and response.may_keep and not announced
            self._receive, self._complete = self._behind, True
        else:
            self._keep = self._keep and response.may_keep
            data = self._begin_body(response, rest)
        if self._taker is not None:  # else what came of the body was no chunked body
            self._told = True
            self._taker.answered(response, data, self._complete)

    def _begin_body(self, response: Response, rest: bytes) -> bytes:
        """What is here of the body."""
        if response.chunked:
            self._receive = self._in_chunks
            self._parser, self._stream = chunk_parser(self)
            return self._unchunk(rest)
        if response.length is None:
            self._receive = self._to_the_end
            return rest
        self._receive, self._left = self._in_body, int(response.length)
        return self._cut(rest)

    def _in_body(self, data: bytes) -> None:
        """A body with a length."""
        assert self._taker is not None
        self._taker.body_came(self._cut(data), self._complete)

    def _cut(self, data: bytes) -> bytes:
        """Of this, what belongs to the body with a length."""
        self._left -= len(data)
        if self._left > 0:
            return data
        self._receive, self._complete = self._behind, True
        if self._left < 0:
            self._keep = False
            return data[: self._left]
        return data

    def _to_the_end(self, data: bytes) -> None:
        """A body that the end of the connection ends."""
        assert self._taker is not None
        self._taker.body_came(data, False)

    def _in_chunks(self, data: bytes) -> None:
        """A chunked body."""
        assert self._taker is not None
        data = self._unchunk(data)
        if self._taker is not None and (data or self._complete):
            self._taker.body_came(data, self._complete)

    def _unchunk(self, data: bytes) -> bytes:
        """What this holds of the content of a chunked body; b"" where it is no chunked body."""
        try:
            messages, _, _ = self._parser.feed_data(data)
            self._keep = self._keep and not messages
        except HttpProcessingError as error:
            if not self._stream.is_eof():
                self._fail("protocol", f"its answer is no valid HTTP ({fault_of(error)})")
                return b""
            self._keep = False
        if self._stream.is_eof():
            self._receive, self._complete = self._behind, True
        content: bytes = self._stream.read_nowait()
        return content

    def _in_upgrade(self, data: bytes) -> None:
        self.after_upgrade += data

    # --- the ways in which an answer fails ------------------------------------------------------

    def eof_received(self) -> None:
        """The replica sends no more. Its loss would be told only when it has read all that we sent."""
        self._keep = False
        self._lose(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        self._keep = False
        if exc is not None and self._taker is not None and not self._aborted:
            self._read_rest()
        super().connection_lost(exc)
        self._lose(exc)
        # Each of these leads back here, and would keep the connection until the next collection.
        self._receive, self._parser, self._stream = _nothing, None, None

    def _read_rest(self) -> None:
        """Read what came before an RST; a loop whose write has met the RST reads no more.

        So an early answer gets through though its sender closed at once (envoy issue 2929). What
        has come over TLS cannot be had in this way.
        """
        assert self.transport is not None
        if self.transport.get_extra_info("ssl_object") is not None:
            return
        descriptor = self.transport.get_extra_info("socket").fileno()
        try:
            while data := os.read(descriptor, READ_SIZE):
                self.data_received(data)
        except OSError:
            pass  # no more is here

    def _lose(self, exc: Exception | None) -> None:
        """No more can come of an answer that is under way."""
        if self._taker is None or self._complete or self.tunnel is not None:
            return
        clean = exc is None and not self._aborted
        if clean and self._receive == self._to_the_end:
            self._complete = True
            self._taker.body_came(b"", True)
            return
        self._fail(
            "truncated" if exc is None and self._answer_begun else "reset",
            "it closed the connection before its answer was complete",
        )

    def _fail(self, reason: UpstreamReason, what: str) -> None:
        """No more will come of this answer; a head that was not told of yet will not be."""
        taker, detail = self._taker, f"{self._pool.name}: {what}"
        assert taker is not None
        self._taker = None
        self._receive = self._unasked
        if self._told:
            taker.lost(ResponseCut(reason, detail))
        elif self._answer_begun:
            taker.lost(BadResponse(reason, detail))
        elif self.reused:
            taker.lost(StaleConnection(detail))
        else:
            taker.lost(LostBeforeResponse(detail))


def _nothing(data: bytes) -> None:
    """Nothing comes from a connection that is lost."""


class Pool:
    """The connections to one replica, without a ceiling: idle ones are used again, newest first.

    `connect_timeout` and `keepalive` are in seconds. An idle connection is closed after `keepalive`,
    so that we let go of it before the replica does.
    """

    def __init__(
        self,
        url: str,
        *,
        connect_timeout: float,
        keepalive: float,
        tls: ssl.SSLContext | None,
        metrics: Metrics,
    ) -> None:
        parts = urlsplit(url)
        self.name = parts.netloc
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = tls if parts.scheme == "https" else None
        self._connect_timeout = connect_timeout
        self._keepalive = keepalive
        self._idle: OrderedDict[UpstreamConnection, None] = OrderedDict()  # oldest first
        self._open: set[UpstreamConnection] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False
        self._metrics = metrics

    @property
    def idle(self) -> int:
        return len(self._idle)

    @property
    def active(self) -> int:
        return len(self._open) - len(self._idle)

    def reuse(self) -> UpstreamConnection | None:
        """An idle connection, if there is one that is young enough."""
        now = time.monotonic()
        while self._idle:
            connection, _ = self._idle.popitem()
            young = now - connection.idle_since < self._keepalive
            if young and not connection.has_news():  # the replica's FIN, or bytes nobody asked for
                connection.reused = True
                self._metrics.connection_reused()
                return connection
            connection.close()
        return None

    async def connect(self) -> UpstreamConnection:
        """A new connection; raises `ConnectFailed`."""
        started = time.monotonic()
        try:
            with anyio.fail_after(self._connect_timeout):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: UpstreamConnection(self),
                    self._host,
                    self._port,
                    ssl=self._tls,
                    server_hostname=self._host if self._tls else None,
                )
        except (OSError, TimeoutError, asyncio.TimeoutError) as error:
            reason, what = _connect_fault(error, self._connect_timeout)
            raise ConnectFailed(reason, f"{self.name}: {what}") from None
        if self._closed or not connection.connected:
            connection.abort()
            raise ConnectFailed("reset", f"{self.name}: the new connection was closed at once")
        self._open.add(connection)
        self._metrics.connection_created(time.monotonic() - started)
        return connection

    def take_back(self, connection: UpstreamConnection) -> None:
        """The exchange of this connection is over.

        Over TLS it may be used again in the next turn of the loop: while it was held, the TLS layer
        may have taken in what nobody asked for, which `has_news` does not see, and gives it out now.
        """
        if self._tls is None:
            self.keep(connection)
        else:
            asyncio.get_running_loop().call_soon(self.keep, connection)

    def keep(self, connection: UpstreamConnection) -> None:
        """Have a connection wait for another exchange."""
        if self._closed or not connection.connected:
            connection.close()
            return
        connection.idle_since = time.monotonic()
        self._idle[connection] = None
        if self._sweep is None:
            self._schedule_sweep(self._keepalive)

    def forget(self, connection: UpstreamConnection) -> None:
        """A connection is gone."""
        self._open.discard(connection)
        self._idle.pop(connection, None)

    def close(self) -> None:
        """Close the idle connections and abort the others: the replica is retired."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in tuple(self._open):
            if connection in self._idle:
                connection.close()
            else:
                connection.abort()
        self._idle.clear()

    def _schedule_sweep(self, delay: float) -> None:
        self._sweep = asyncio.get_running_loop().call_later(delay, self._close_old)

    def _close_old(self) -> None:
        self._sweep = None
        now = time.monotonic()
        while self._idle:
            oldest = next(iter(self._idle))
            left = oldest.idle_since + self._keepalive - now
            if left > 0:
                self._schedule_sweep(left)
                return
            del self._idle[oldest]
            oldest.close()


class Pools:
    """The pool of each replica that the table knows."""

    def __init__(
        self,
        *,
        connect_timeout: float,
        keepalive: float,
        tls: ssl.SSLContext | None,
        metrics: Metrics,
    ) -> None:
        self._connect_timeout = connect_timeout
        self._keepalive = keepalive
        self._tls = tls
        self._metrics = metrics
        self._pools: dict[Replica, Pool] = {}

    def __getitem__(self, replica: Replica) -> Pool:
        return self._pools[replica]

    def open(self, replica: Replica) -> Pool:
        """The pool of a new replica; it connects when it is first used."""
        pool = self._pools[replica] = Pool(
            replica.url,
            connect_timeout=self._connect_timeout,
            keepalive=self._keepalive,
            tls=self._tls,
            metrics=self._metrics,
        )
        return pool

    def close(self, replica: Replica) -> None:
        """Close the pool of a replica that is retired."""
        self._pools.pop(replica).close()

    def close_all(self) -> None:
        """Close every pool."""
        for replica in tuple(self._pools):
            self.close(replica)


def _connect_fault(error: BaseException, timeout: float) -> tuple[UpstreamReason, str]:
    if isinstance(error, ssl.SSLCertVerificationError):
        return "tls", f"its certificate is not trusted ({error.verify_message})"
    if isinstance(error, ssl.SSLError):
        return "tls", f"the TLS handshake failed ({error.reason or 'connection closed'})"
    if isinstance(error, socket.gaierror):
        return "dns", "its host name cannot be resolved"
    if isinstance(error, ConnectionRefusedError):
        return "connect_refused", "it refuses connections"
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)) and not getattr(error, "errno", 0):
        return "connect_timeout", f"no connection within {timeout:g} s"
    return "connect_refused", f"no connection ({getattr(error, 'strerror', None) or 'closed'})"
