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
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import anyio
from aiohttp import StreamReader
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
from lb.wire import END_OF_HEAD, MAX_HEAD_BYTES, check_answer, fault_of, response_parser

READ_SIZE = 256 * 1024
# 1xx answers to one request that are passed on; a replica that sends more is not well.
MAX_INTERIM = 100


@dataclass(slots=True)
class Response:
    """The head of a replica's answer, and its body as a stream (None where there is none)."""

    status: int
    reason: bytes
    fields: Fields
    body: StreamReader | None
    chunked: bool
    until_eof: bool


class Taker(Protocol):
    """Who waits for an answer, and is told of it as it comes."""

    def answered(self, response: Response) -> None:
        """A head is here, of an interim (1xx) answer or of the answer proper."""

    def body_came(self) -> None:
        """There is more of the body, or its end."""

    def lost(self, error: AttemptError | ResponseCut) -> None:
        """No more will come; `ResponseCut` if the head of the answer proper was told."""


class UpstreamConnection(Connection):
    """One connection to a replica; it carries one request at a time."""

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self._pool = pool
        self.reused = False
        self.idle_since = 0.0
        self.after_upgrade: bytes | None = None
        self._taker: Taker | None = None
        self._parser: Any = None
        self._method = "GET"
        self._answers: deque[Response] = deque()  # that the taker was not told of yet
        self._body: StreamReader | None = None
        self._failure: AttemptError | None = None
        self._answer_begun = False
        self._head_bytes = 0  # of the answer's head, so far
        self._interim = 0  # 1xx answers, so far
        self._final = False  # is the head of the answer proper here...
        self._told = False  # ...and was the taker told of it?
        self._keep = True
        self._aborted = False

    # --- one exchange ---------------------------------------------------------------------------

    def begin(self, taker: Taker, method: str) -> None:
        """Get ready for the answer to one request of this method."""
        self._taker = taker
        self._method = method
        self._parser = response_parser(self, method)
        self._answer_begun = False
        self._head_bytes = 0
        self._interim = 0
        self._final = False
        self._told = False

    def end(self) -> None:
        """The exchange is over, its body read to the end: keep the connection for another, or close it."""
        self.end_flow()
        in_order = self._is_in_order()
        self._taker = None
        self._parser = None
        self._body = None
        if not in_order:
            self.abort()
        elif self._keep:
            self._pool.keep(self)
        else:
            self.close()

    def _is_in_order(self) -> bool:
        """Is all of the request sent, and nothing here that would be taken for the next answer?"""
        if self.transport is None or self.transport.get_write_buffer_size() or self._answers:
            return False
        try:
            return self._parser.feed_eof() is None  # else the head of another answer has begun
        except HttpProcessingError:
            return False

    def give_up(self) -> None:
        """The exchange is over before its end: nobody waits for more of it."""
        self._taker = None
        self.end_flow()
        self.abort()

    def abort(self, *, reset: bool = True) -> None:
        """Close at once. A FIN would wait behind what the replica has not read; an RST does not.

        The end of an upgraded connection is a usual one, so it gets its FIN.
        """
        self._aborted = True
        super().abort(reset=reset and self.tunnel is None)

    # --- what the connection tells --------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.tunnel is not None:
            self.tunnel_data(data)
        elif self.after_upgrade is not None:
            self.after_upgrade += data
        elif self._taker is None:
            self.abort()  # nobody asked: an answer to nothing must not become the next one's answer
        else:
            self._feed(data)
            self._tell(self._taker)

    def _feed(self, data: bytes) -> None:
        """Cut behind each head: in one piece with it, bytes that belong to no answer would spoil it."""
        while data and self._failure is None:
            if self._final and (self._body is None or self._body.is_eof()):
                self._keep = False  # the answer was complete: these bytes belong to none
                return
            end = len(data)
            if not self._final and (found := data.find(END_OF_HEAD)) >= 0:
                end = found + len(END_OF_HEAD)
            self._feed_piece(data[:end])
            data = data[end:]
            if self.after_upgrade is not None:
                self.after_upgrade += data
                return

    def _feed_piece(self, data: bytes) -> None:
        self._answer_begun = True
        try:
            messages, upgraded, rest = self._parser.feed_data(data)
            for message, body in messages:
                self._take(message, body)
        except HttpProcessingError as error:
            self._refuse(f"its answer is no valid HTTP ({fault_of(error)})")
            return
        if upgraded:
            self.after_upgrade = rest
        if not self._final:
            self._head_bytes = 0 if messages else self._head_bytes + len(data)
            self._interim += len(messages)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(f"the head of its answer is longer than {MAX_HEAD_BYTES} bytes")
            elif self._interim > MAX_INTERIM:
                self._refuse(f"it sent more than {MAX_INTERIM} interim answers")

    def _refuse(self, what: str) -> None:
        """Take no more of this answer; a head that was not passed on yet will not be."""
        if self._body is not None and not self._body.is_eof():
            self._answers.clear()
        self._fail("protocol", what)

    def _take(self, message: RawResponseMessage, body: StreamReader) -> None:
        fields = Fields(message.raw_headers)
        check_answer(message, fields)
        status = message.code
        bodiless = has_no_body(self._method, status)
        length = fields.first.get(b"content-length")
        self._keep = self._keep and not message.should_close
        if status >= 200:
            self._final = True
            self._body = None if bodiless else body
            if bodiless and (message.chunked or length not in (None, b"0")):
                # Some replicas do send it, and it would be read as the next answer.
                self._keep = False
        self._answers.append(
            Response(
                status=status,
                reason=message.reason.encode("utf-8", "surrogateescape"),
                fields=fields,
                body=None if bodiless else body,
                chunked=message.chunked,
                until_eof=not (bodiless or message.chunked or length is not None),
            )
        )

    def _tell(self, taker: Taker) -> None:
        """Hand on what has come: heads with what is here of the body, or more of it, or the end of it all."""
        if self._told:
            taker.body_came()
        while self._answers and self._taker is taker:
            response = self._answers.popleft()
            self._told = response.status >= 200
            taker.answered(response)
        if self._failure is not None and self._taker is taker:
            failure = self._failure
            taker.lost(ResponseCut(failure.reason, failure.detail) if self._told else failure)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        if exc is not None and self._parser is not None and not self._aborted:
            self._read_rest()
        self._keep = False
        super().connection_lost(exc)
        if self._taker is not None and self.tunnel is None:
            self._lose(self._taker, exc)

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

    def _lose(self, taker: Taker, exc: Exception | None) -> None:
        if self._told and (self._body is None or self._body.is_eof()):
            return  # all of the answer is here
        if exc is None and not self._aborted and self._told:
            try:
                self._parser.feed_eof()  # the proper end of a body without a length
            except HttpProcessingError:
                pass
            else:
                taker.body_came()
                return
        self._fail(
            "truncated" if exc is None and self._answer_begun else "reset",
            "it closed the connection before its answer was complete",
        )
        self._tell(taker)

    def _fail(self, reason: UpstreamReason, what: str) -> None:
        """No more will come of this answer."""
        detail = f"{self._pool.name}: {what}"
        if self._answer_begun:
            self._failure = BadResponse(reason, detail)
        elif self.reused:
            self._failure = StaleConnection(detail)
        else:
            self._failure = LostBeforeResponse(detail)


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

    def keep(self, connection: UpstreamConnection) -> None:
        """Take back a connection whose exchange is over."""
        if self._closed:
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

    def connections(self) -> dict[str, int]:
        """Open connections, idle and active."""
        pools = self._pools.values()
        return {
            "idle": sum(pool.idle for pool in pools),
            "active": sum(pool.active for pool in pools),
        }


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
