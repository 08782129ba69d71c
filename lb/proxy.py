"""The path of one request, from top to bottom.

count the arrival > choose a replica > lease it > send > on a failure before the commit point ask the
retry budget > relay > release, measure, log. One retry loop (`_forward`), one exit (`handle`).
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
import traceback

import anyio
from aiohttp import StreamReader

from lb.arrivals import Arrivals
from lb.body import LAST_CHUNK, Upload, chunk_of
from lb.errors import (
    AttemptError,
    BadRequest,
    BadResponse,
    ProxyError,
    Rejected,
    ResponseCut,
    StaleConnection,
    TimedOut,
)
from lb.exchange import Exchange
from lb.headers import first, interim_head, own_answer, request_head, response_head
from lb.logs import Log
from lb.metrics import Metrics
from lb.replay import ReplayBudget
from lb.replicas import Lease, Replica, ReplicaTable
from lb.request import Request
from lb.retry import RetryBudget, RetryPolicy, is_safe_to_resend
from lb.server import ClientConnection
from lb.settings import Settings
from lb.stickiness import session_of
from lb.upstream import Pools, Response, UpstreamConnection
from lb.wakeup import Wakeup
from lb.wall import Wall
from lb.websocket import tunnel

# While there is no routable replica the controller is asked every 2 s.
RETRY_AFTER_SECONDS = 2


class Proxy:
    """Forwards requests; `handle` is what the server calls for each."""

    def __init__(
        self,
        settings: Settings,
        *,
        table: ReplicaTable,
        pools: Pools,
        arrivals: Arrivals,
        replicas_changed: Wakeup,
        metrics: Metrics,
        log: Log,
    ) -> None:
        self._table = table
        self._pools = pools
        self._arrivals = arrivals
        self._replicas_changed = replicas_changed
        self._metrics = metrics
        self._log = log
        self._retry_policy = RetryPolicy(
            mode=settings.retry,
            total_timeout=settings.total_timeout,
            no_replica_wait=settings.no_replica_wait,
        )
        self._access_log = settings.access_log
        self._sticky = settings.sticky
        self._stream_idle_timeout = settings.stream_idle_timeout or math.inf
        self._replay = ReplayBudget(limit=settings.replay_limit, total=settings.replay_budget)
        self._jitter = random.Random()
        self.running: dict[Exchange, None] = {}  # oldest first
        self.synced = False  # has the controller ever answered?

    async def handle(self, request: Request, client: ClientConnection) -> None:
        """Serve one request; every way out of it ends in `Exchange.finish`."""
        self._arrivals.record(time.time())
        exchange = Exchange(request, client)
        self.running[exchange] = None
        upload = Upload(request, client, self._replay)
        try:
            await self._forward(exchange, upload)
            exchange.judge_status()
        except asyncio.CancelledError:
            self._client_left(exchange, upload)
            raise
        except ProxyError as error:
            self._answer(exchange, error)
        except ResponseCut as error:
            self._cut(exchange, error)
        except Exception as error:
            self._unforeseen(exchange, error)
        finally:
            upload.close()
            exchange.bytes_in += upload.bytes_read
            del self.running[exchange]
            exchange.finish(self._metrics, self._log, self._access_log)

    # --- attempts, up to the commit point -------------------------------------------------------

    async def _forward(self, exchange: Exchange, upload: Upload) -> None:
        """Try replicas until one answers, and relay its answer.

        The wall bounds all of it up to the commit point, a running attempt too.
        """
        if self._sticky is not None:
            exchange.session = session_of(exchange.request.headers, self._sticky)
        arrived = exchange.request.arrived
        budget = RetryBudget(self._retry_policy, arrived, self._jitter)
        tried: list[Replica] = []
        failure: AttemptError | None = None
        try:
            with Wall(budget.wall) as wall:
                while True:
                    with await self._lease(exchange, budget, tried, failure) as lease:
                        fresh = isinstance(failure, StaleConnection) or upload.may_outgrow
                        try:
                            await self._attempt(exchange, upload, budget, lease, wall, fresh=fresh)
                            return
                        except AttemptError as error:
                            failure = error
                            self._attempt_failed(exchange, lease, error)
                    await upload.stop()
                    if not self._may_resend(exchange, upload, budget, failure):
                        raise failure
                    self._retried(exchange, failure)
                    if not isinstance(failure, StaleConnection):
                        tried.append(lease.replica)
        except TimeoutError:
            raise self._out_of_time(exchange, failure) from None

    async def _attempt(
        self,
        exchange: Exchange,
        upload: Upload,
        budget: RetryBudget,
        lease: Lease,
        wall: Wall,
        *,
        fresh: bool,
    ) -> None:
        """One send to one replica, and what comes of it. Raises `AttemptError` if that is nothing."""
        connection = await self._connect(exchange, lease, fresh=fresh)
        try:
            budget.sent(time.monotonic())
            response = await self._send(exchange, upload, connection)
            wall.lift()
            self._answered(lease)
            await self._relay(exchange, upload, connection, response)
        except BaseException:
            connection.abort()
            raise

    async def _lease(
        self,
        exchange: Exchange,
        budget: RetryBudget,
        tried: list[Replica],
        failure: AttemptError | None,
    ) -> Lease:
        """Lease a replica that was not tried yet; wait for one, or to try them all once more."""
        while True:
            now = time.monotonic()
            lease = self._table.lease(now, tried=tried, session=exchange.session)
            if lease is not None:
                return lease
            left = budget.wait_left(now)
            if left <= 0:
                raise self._unserved(failure)
            exchange.waiting = True
            if self._table.routable():
                await self._replicas_changed.wait(min(left, budget.pause()))
                tried.clear()
            else:
                await self._replicas_changed.wait(left)
            exchange.waiting = False
            exchange.waited += time.monotonic() - now

    async def _connect(
        self, exchange: Exchange, lease: Lease, *, fresh: bool
    ) -> UpstreamConnection:
        """A connection to the leased replica: an idle one, or a new one."""
        exchange.attempts += 1
        pool = self._pools[lease.replica]
        exchange.replica = pool.name
        connection = None if fresh else pool.reuse()
        if connection is None:
            started = time.monotonic()
            try:
                connection = await pool.connect()
            finally:
                exchange.connect_seconds += time.monotonic() - started
            if self._table.connected(lease):
                self._restored(lease.replica)
        return connection

    async def _send(
        self, exchange: Exchange, upload: Upload, connection: UpstreamConnection
    ) -> Response:
        """Send the request and wait for the head of the answer; interim answers are passed on."""
        request, client = exchange.request, exchange.client
        connection.begin(request.method)
        head = request_head(
            request.method.encode(),
            request.target,
            request.headers,
            host=request.host,
            client=client.address.encode(),
            scheme=client.scheme,
            request_id=exchange.request_id,
            chunked=request.chunked,
            upgrade=request.upgrade,
        )
        if exchange.first_send is None:
            exchange.first_send = time.monotonic()
        upload.start(connection, head)
        while True:
            response = await connection.answer()
            if response.status == 101 and request.upgrade is None:
                raise BadResponse("protocol", f"{exchange.replica}: it switched protocols unasked")
            if response.status >= 200 or response.status == 101:
                return response
            # Expect is answered here, so a 100 of the replica has nobody to go to; HTTP/1.0 knows
            # no interim answers (RFC 9110, section 15.2).
            if response.status != 100 and not request.is_http10:
                client.write(interim_head(response.status, response.reason, response.headers))
                await client.drain()

    # --- from the commit point on ---------------------------------------------------------------

    async def _relay(
        self,
        exchange: Exchange,
        upload: Upload,
        connection: UpstreamConnection,
        response: Response,
    ) -> None:
        """Pass the answer on as it comes; then keep the replica's connection, or close it."""
        upload.let_go()
        request, client = exchange.request, exchange.client
        if response.status == 101:
            await tunnel(exchange, connection, response)
            return
        unbounded = response.body is not None and (response.chunked or response.until_eof)
        chunked = unbounded and not request.is_http10
        request.keep_alive = request.keep_alive and not client.draining and chunked == unbounded
        head = response_head(
            response.status,
            response.reason,
            response.headers,
            request_id=exchange.request_id,
            chunked=chunked,
            close=not request.keep_alive,
            keep_alive=request.is_http10,
            # A 426 must say what it wants instead (RFC 9110, section 15.5.22).
            upgrade=first(response.headers, b"upgrade") if response.status == 426 else None,
        )
        exchange.commit(response.status)
        if response.body is None:
            client.write(head)
        else:
            await self._relay_body(exchange, response.body, head, chunked=chunked)
        if upload.finished:
            connection.end()
        else:
            connection.abort()  # the replica has answered without reading all

    async def _relay_body(
        self, exchange: Exchange, body: StreamReader, head: bytes, *, chunked: bool
    ) -> None:
        """Head, body and end, each written as soon as it is here."""
        client = exchange.client
        pieces = [head]
        data = body.read_nowait()
        while True:
            if data:
                exchange.bytes_out += len(data)
                pieces.append(chunk_of(data) if chunked else data)
            if body.at_eof():
                break
            client.write(b"".join(pieces))
            await client.drain()
            pieces.clear()
            data = await self._next_chunk(body)
        if chunked:
            pieces.append(LAST_CHUNK)
        client.write(b"".join(pieces))
        await client.drain()

    async def _next_chunk(self, body: StreamReader) -> bytes:
        if self._stream_idle_timeout == math.inf:
            return await body.readany()
        try:
            with anyio.fail_after(self._stream_idle_timeout):
                return await body.readany()
        except TimeoutError:
            limit = f"the stream was silent for {self._stream_idle_timeout:g} s"
            raise ResponseCut("timeout", limit) from None

    # --- the ways in which a request fails ------------------------------------------------------

    def _attempt_failed(self, exchange: Exchange, lease: Lease, error: AttemptError) -> None:
        self._metrics.upstream_failed(error.reason)
        if error.ejects:
            now = time.monotonic()
            unreachable = error.retry_reason == "connect_error"
            if self._table.failed(lease, now, unreachable=unreachable):
                self._metrics.replica_set_changed("ejected")
                self._log.warning("replica.ejected", replica=exchange.replica, cause=error.detail)

    def _answered(self, lease: Lease) -> None:
        if self._table.answered(lease):
            self._restored(lease.replica)

    def _restored(self, replica: Replica) -> None:
        self._metrics.replica_set_changed("restored")
        self._log.info("replica.restored", replica=self._pools[replica].name)

    def _may_resend(
        self, exchange: Exchange, upload: Upload, budget: RetryBudget, error: AttemptError
    ) -> bool:
        request = exchange.request
        safe = is_safe_to_resend(request.method, (name for name, _ in request.headers))
        return budget.may_resend(error, safe=safe, body_complete=upload.can_restart)

    def _retried(self, exchange: Exchange, error: AttemptError) -> None:
        self._metrics.retried(error.retry_reason)
        self._log.info(
            "request.retried",
            request_id=exchange.request_id.decode(),
            attempt=exchange.attempts,
            reason=error.retry_reason,
            cause=error.detail,
        )

    def _out_of_time(self, exchange: Exchange, failure: AttemptError | None) -> ProxyError:
        """The wall was met: while waiting for a replica, or for the answer of one."""
        if exchange.waiting:
            return self._unserved(failure)
        self._metrics.upstream_failed("timeout")
        last = f" The last failure: {failure.detail}." if failure else ""
        return TimedOut(f"No answer within {self._retry_policy.total_timeout:g} s.{last}")

    def _unserved(self, failure: AttemptError | None) -> ProxyError:
        """Why a request found no replica in all the time it had."""
        if failure is not None and failure.retry_reason != "connect_error":
            return failure
        if self._table.routable():
            cause = failure.detail if failure else "every replica is set aside"
            return Rejected(
                "all_ejected",
                f"No ready replicas. None of those in the ready list could be reached; the last: {cause}.",
                retry_after=RETRY_AFTER_SECONDS,
            )
        waited = f"within {self._retry_policy.no_replica_wait:g} s"
        if self.synced:
            return Rejected(
                "no_replicas",
                f"No ready replicas. The controller named none {waited}.",
                retry_after=RETRY_AFTER_SECONDS,
            )
        return Rejected(
            "not_synced",
            f"No ready replicas. The controller has not answered yet ({waited}).",
            retry_after=RETRY_AFTER_SECONDS,
        )

    def _answer(self, exchange: Exchange, error: ProxyError) -> None:
        """Tell the client why there is no answer of a replica."""
        exchange.failed(error)
        detail, extra = error.detail, []
        if isinstance(error, Rejected):
            self._metrics.rejected(error.reason)
            extra.append((b"Retry-After", b"%d" % error.retry_after))
        elif isinstance(error, BadRequest):
            self._metrics.rejected(error.reason)
        else:
            self._metrics.retries_exhausted()
            detail = f"{detail} ({exchange.attempts} attempts)"
        if exchange.committed:  # the client broke the rules of its body after it had its answer
            exchange.client.abort(reset=True)
            return
        request, client = exchange.request, exchange.client
        unread = request.body is not None and not request.body.is_eof()
        ends = client.draining or unread or request.is_http10
        request.keep_alive = request.keep_alive and not ends
        extra.append((b"X-Request-Id", exchange.request_id))
        body = b"" if request.method == "HEAD" else json.dumps({"detail": detail}).encode()
        exchange.commit(error.status)
        client.write(own_answer(error.status, body, close=not request.keep_alive, extra=extra))

    def _cut(self, exchange: Exchange, error: ResponseCut) -> None:
        """The answer broke off: end the connection in a way that no client takes for a good end."""
        exchange.failed(error)
        self._metrics.upstream_failed(error.reason)
        exchange.client.abort(reset=True)

    def _client_left(self, exchange: Exchange, upload: Upload) -> None:
        phase = exchange.left(uploading=not upload.finished)
        self._metrics.client_disconnected(phase)

    def _unforeseen(self, exchange: Exchange, error: Exception) -> None:
        """A fault of ours. Its place is logged; its message might hold what a client sent."""
        exchange.outcome, exchange.reason = "lb_error", "internal"
        frames = traceback.extract_tb(error.__traceback__)
        self._log.error(
            "request.failed",
            request_id=exchange.request_id.decode(),
            error=type(error).__name__,
            where=[f"{frame.name}:{frame.lineno}" for frame in frames],
        )
        if exchange.committed:
            exchange.client.abort(reset=True)
        else:
            exchange.commit(500)
            exchange.request.keep_alive = False
            body = json.dumps({"detail": "The load balancer failed; see its log."}).encode()
            exchange.client.write(own_answer(500, body, close=True))
