"""The path of one request, from top to bottom.

count the arrival > choose a replica > lease it > send > on a failure before the commit point ask the
retry budget > relay > release, measure, log. What its two connections tell moves a request on; there
is one way back (`_choose`, after a failed attempt) and one way out (`_finish`).
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from lb.arrivals import Arrivals
from lb.body import LAST_CHUNK, NO_UPLOAD, Upload, chunk_of
from lb.deadlines import Deadlines
from lb.errors import (
    AttemptError,
    BadRequest,
    BadResponse,
    ConnectFailed,
    ProxyError,
    Rejected,
    ResponseCut,
    StaleConnection,
    TimedOut,
)
from lb.exchange import Exchange
from lb.headers import interim_head, own_answer, request_head, response_head
from lb.logs import Log
from lb.metrics import Metrics
from lb.replay import ReplayBudget
from lb.replicas import Lease, Replica, ReplicaTable
from lb.request import Request
from lb.retry import RetryBudget, RetryPolicy, is_safe_to_resend
from lb.server import ClientConnection
from lb.settings import Settings
from lb.stickiness import session_of
from lb.upstream import Pool, Pools, Response, UpstreamConnection
from lb.wakeup import Wakeup
from lb.websocket import join, say_goodbye

# While there is no routable replica the controller is asked every 2 s.
RETRY_AFTER_SECONDS = 2

Step = TypeVar("Step", bound=Callable[..., None])


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
        self.table = table
        self.pools = pools
        self.arrivals = arrivals
        self.replicas_changed = replicas_changed
        self.metrics = metrics
        self.log = log
        self.retry_policy = RetryPolicy(
            mode=settings.retry,
            total_timeout=settings.total_timeout,
            no_replica_wait=settings.no_replica_wait,
        )
        self.access_log = settings.access_log
        self.sticky = settings.sticky
        self.replay = ReplayBudget(limit=settings.replay_limit, total=settings.replay_budget)
        self.jitter = random.Random()
        # The wall of each request up to its commit point, and the limit of silence behind it.
        self.walls = Deadlines[Passage](settings.total_timeout, Passage.out_of_time)
        self.silences: Deadlines[Passage] | None = None
        if settings.stream_idle_timeout:
            self.silences = Deadlines(settings.stream_idle_timeout, Passage.silent_for_too_long)
        self.stream_idle_timeout = settings.stream_idle_timeout
        self.running: dict[Passage, None] = {}  # oldest first
        self.synced = False  # has the controller ever answered?

    def handle(self, request: Request, client: ClientConnection) -> Passage:
        """The passage of one request; the server starts it."""
        return Passage(self, request, client)


def guarded(step: Step) -> Step:
    """A fault of ours ends the request that met it, and nothing else."""

    @functools.wraps(step)
    def run(self: Passage, *told: Any) -> None:
        try:
            step(self, *told)
        except Exception as error:
            self.unforeseen(error)

    return run  # type: ignore[return-value]


class Passage(Exchange):
    """One request on its way. Every public method is an event; after `_finish` none comes any more."""

    _failure: AttemptError | None = None  # of the last attempt
    _lease: Lease | None = None
    _connection: UpstreamConnection | None = None
    _chunked = False  # is the answer to be?
    _ended = False  # is all of the answer written?
    _task: asyncio.Task[None] | None = None  # that connects, or looks after a tunnel
    _wait_began: float | None = None  # of a wait for a replica

    def __init__(self, proxy: Proxy, request: Request, client: ClientConnection) -> None:
        super().__init__(request, client)
        self._proxy = proxy
        self._tried: list[Replica] = []
        self._upload = (
            NO_UPLOAD
            if request.body is None
            else Upload(request, request.body, client, proxy.replay)
        )

    @guarded
    def start(self) -> None:
        """Its turn has come: from here on the wall bounds it."""
        proxy, now = self._proxy, time.monotonic()
        proxy.arrivals.record(time.time())
        proxy.running[self] = None
        proxy.walls.start(self, now)
        self._budget = RetryBudget(proxy.retry_policy, now, proxy.jitter)
        if proxy.sticky is not None:
            self.session = session_of(self.request.fields, proxy.sticky)
        self._choose()

    # --- attempts, up to the commit point -------------------------------------------------------

    def _choose(self) -> None:
        """Lease a replica that was not tried yet; wait for one, or to try them all once more."""
        now = time.monotonic()
        self._lease = self._proxy.table.lease(now, tried=self._tried, session=self.session)
        if self._lease is not None:
            self._connect(self._lease)
            return
        left = self._budget.wait_left(now)
        if left <= 0:
            self._answer(self._unserved())
            return
        if self._proxy.table.routable():
            left = min(left, self._budget.pause())
        self._wait_began = now
        self._proxy.replicas_changed.wait(self.wake, left)

    @guarded
    def wake(self) -> None:
        """The replicas have changed, or the pause is over."""
        self._stop_waiting()
        self._tried.clear()
        self._choose()

    def _stop_waiting(self) -> None:
        if self._wait_began is not None:
            self._proxy.replicas_changed.cancel(self.wake)
            self.waited += time.monotonic() - self._wait_began
            self._wait_began = None

    def _connect(self, lease: Lease) -> None:
        """A connection to the leased replica: an idle one, or a new one."""
        self.attempts += 1
        pool = self._proxy.pools[lease.replica]
        self.replica = lease.replica.name
        fresh = isinstance(self._failure, StaleConnection) or self._upload.may_outgrow
        connection = None if fresh else pool.reuse()
        if connection is None:
            self._task = asyncio.get_running_loop().create_task(self._open(pool, lease))
        else:
            self._send(connection)

    async def _open(self, pool: Pool, lease: Lease) -> None:
        started = time.monotonic()
        try:
            connection = await pool.connect()
        except ConnectFailed as error:
            self.connect_seconds += time.monotonic() - started
            # Given up in the turn in which its time was over: Python 3.10 tells of the latter alone.
            if not lease.released:
                self.lost(error)
        except Exception as error:
            self.unforeseen(error)
        else:
            self.connect_seconds += time.monotonic() - started
            self.connected(connection, lease)

    @guarded
    def connected(self, connection: UpstreamConnection, lease: Lease) -> None:
        """The new connection is open."""
        self._task, self._connection = None, connection
        if self._proxy.table.connected(lease):
            self._restored(lease.replica)
        self._send(connection)

    def _send(self, connection: UpstreamConnection) -> None:
        """Send the request; `answered` or `lost` comes next."""
        request, client = self.request, self.client
        self._connection = connection
        now = time.monotonic()
        self._budget.sent(now)
        if self.first_send is None:
            self.first_send = now
        head = request_head(
            request.method.encode(),
            request.target,
            request.fields,
            host=request.host,
            client=client.address.encode(),
            scheme=client.scheme,
            request_id=self.request_id,
            chunked=request.chunked,
            upgrade=request.upgrade,
        )
        connection.begin(self, request.method)
        connection.flow_into(client)
        self._upload.start(connection, head)

    @guarded
    def upload_came(self) -> None:
        """There is more of the request's body."""
        self._upload.go_on()

    @guarded
    def lost(self, error: AttemptError | ResponseCut) -> None:
        """The attempt failed; behind the commit point, the answer broke off."""
        if isinstance(error, ResponseCut):
            self._cut(error)
            return
        self._task = None
        lease, self._failure = self._lease, error
        assert lease is not None
        self._proxy.metrics.upstream_failed(error.reason)
        if error.ejects:
            self._set_aside(lease, error)
        self._give_up_attempt()
        request = self.request
        safe = is_safe_to_resend(request.method, request.fields.names)
        if not self._budget.may_resend(error, safe=safe, body_complete=self._upload.can_restart):
            self._answer(error)
            return
        self._retried(error)
        if not isinstance(error, StaleConnection):
            self._tried.append(lease.replica)
        self._choose()

    def _give_up_attempt(self) -> None:
        """Whatever is under way ends: a connect, an attempt, a wait."""
        self._upload.stop()
        self._stop_waiting()
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self._connection is not None:
            self._connection.give_up()
            self._connection = None
        if self._lease is not None:
            self._lease.release()

    # --- from the commit point on ---------------------------------------------------------------

    @guarded
    def answered(self, response: Response, data: bytes, ends: bool) -> None:
        """The head of an answer is here; pass it on with what came of the body."""
        request, client = self.request, self.client
        if response.status == 101 and request.upgrade is None:
            self.lost(BadResponse("protocol", f"{self.replica}: it switched protocols unasked"))
            return
        if response.status < 200 and response.status != 101:
            # Expect is answered here, so a 100 of the replica has nobody to go to; HTTP/1.0 knows
            # no interim answers (RFC 9110, section 15.2).
            if response.status != 100 and not request.is_http10:
                client.write(interim_head(response.status, response.reason, response.fields))
            return
        self._proxy.walls.stop(self)
        self._upload.let_go()
        assert self._lease is not None
        if self._proxy.table.answered(self._lease):
            self._restored(self._lease.replica)
        if response.status == 101:
            self._join(response)
            return
        self._chunked = not (response.has_length or request.is_http10)
        told = response.has_length or self._chunked
        request.keep_alive = request.keep_alive and told and not client.draining
        head = response_head(
            response.status,
            response.reason,
            response.fields,
            request_id=self.request_id,
            chunked=self._chunked,
            close=not request.keep_alive,
            keep_alive=request.is_http10,
            # A 426 must say what it wants instead (RFC 9110, section 15.5.22).
            upgrade=response.fields.first.get(b"upgrade") if response.status == 426 else None,
        )
        self.commit(response.status)
        self._relay(head, data, ends)

    @guarded
    def body_came(self, data: bytes, ends: bool) -> None:
        """There is more of the body, or its end."""
        self._relay(b"", data, ends)

    def _relay(self, head: bytes, data: bytes, ends: bool) -> None:
        self.bytes_out += len(data)
        if self._chunked:
            if data:
                head += chunk_of(data)
            if ends:
                head += LAST_CHUNK
            self.client.write(head)
        else:
            self.client.write(head + data)
        if ends:
            self._ended = True
            self._relayed()
        elif self._proxy.silences is not None:
            self._proxy.silences.start(self, time.monotonic())

    def _relayed(self) -> None:
        """All of the answer is written; the request is over when the client has taken most of it."""
        if self._proxy.silences is not None:
            self._proxy.silences.stop(self)
        if self.client.full:
            return  # `room` comes next
        assert self._connection is not None
        if self._upload.finished:
            self._connection.end()
        else:
            self._connection.give_up()  # the replica has answered without reading all
        self.judge_status()
        self._finish()

    @guarded
    def room(self) -> None:
        """The client has taken most of what was written."""
        if self._ended:
            self._relayed()
        elif self.committed and self._proxy.silences is not None:
            self._proxy.silences.start(self, time.monotonic())

    # --- upgraded connections -------------------------------------------------------------------

    def _join(self, response: Response) -> None:
        assert self._connection is not None
        join(self, self._connection, response)
        goodbye = say_goodbye(self.client, self._connection)
        self._task = asyncio.get_running_loop().create_task(goodbye)

    @guarded
    def tunnel_ended(self) -> None:
        """One of the two ends is gone, which is the end of the other, too."""
        assert self._connection is not None
        assert self._task is not None
        self._task.cancel()
        self.bytes_in, self.bytes_out = self.client.tunnel_bytes, self._connection.tunnel_bytes
        self._finish()

    # --- the ways in which a request fails ------------------------------------------------------

    @guarded
    def client_left(self) -> None:
        """Whatever is under way is in vain."""
        if self.status == 101:
            self.tunnel_ended()
            return
        body = self.request.body
        phase = self.left(uploading=body is not None and not body.is_eof())
        if self.client.cut_off:
            self.outcome, self.reason = "lb_error", "shutting_down"
            self._proxy.metrics.rejected("shutting_down")
        else:
            self._proxy.metrics.client_disconnected(phase)
        self._give_up_attempt()
        self._finish()

    @guarded
    def upload_failed(self, fault: BadRequest) -> None:
        """The rest of the request is not valid HTTP."""
        if self._ended:
            self._upload.stop()  # the client has yet to read an answer that is all written
        else:
            self._answer(fault)

    @guarded
    def out_of_time(self) -> None:
        """The wall was met: while looking for a replica, or while one was at work."""
        looking = self._connection is None and self._failure is not None
        if looking or self._wait_began is not None:
            self._answer(self._unserved())
            return
        self._proxy.metrics.upstream_failed("timeout")
        last = f" The last failure: {self._failure.detail}." if self._failure else ""
        limit = self._proxy.retry_policy.total_timeout
        self._answer(TimedOut(f"No answer within {limit:g} s.{last}"))

    @guarded
    def silent_for_too_long(self) -> None:
        """Nothing came for `--stream-idle-timeout`; unless it is the client that holds us up."""
        assert self._proxy.silences is not None
        if self.client.full:
            self._proxy.silences.start(self, time.monotonic())
            return
        limit = f"the stream was silent for {self._proxy.stream_idle_timeout:g} s"
        self._cut(ResponseCut("timeout", limit))

    def _set_aside(self, lease: Lease, error: AttemptError) -> None:
        unreachable = error.retry_reason == "connect_error"
        if self._proxy.table.failed(lease, time.monotonic(), unreachable=unreachable):
            self._proxy.metrics.replica_set_changed("ejected")
            self._proxy.log.warning("replica.ejected", replica=self.replica, cause=error.detail)

    def _restored(self, replica: Replica) -> None:
        self._proxy.metrics.replica_set_changed("restored")
        self._proxy.log.info("replica.restored", replica=replica.name)

    def _retried(self, error: AttemptError) -> None:
        self._proxy.metrics.retried(error.retry_reason)
        self._proxy.log.info(
            "request.retried",
            request_id=self.request_id.decode(),
            attempt=self.attempts,
            reason=error.retry_reason,
            cause=error.detail,
        )

    def _unserved(self) -> ProxyError:
        """Why a request found no replica in all the time it had."""
        failure = self._failure
        if failure is not None and failure.retry_reason != "connect_error":
            return failure
        if self._proxy.table.routable():
            cause = failure.detail if failure else "every replica is set aside"
            return Rejected(
                "all_ejected",
                f"No ready replicas. None of those in the ready list could be reached; the last: {cause}.",
                retry_after=RETRY_AFTER_SECONDS,
            )
        waited = f"within {self._proxy.retry_policy.no_replica_wait:g} s"
        if self._proxy.synced:
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

    def _answer(self, error: ProxyError) -> None:
        """Tell the client why there is no answer of a replica."""
        self._give_up_attempt()
        self.failed(error)
        detail, extra = error.detail, []
        if isinstance(error, Rejected):
            self._proxy.metrics.rejected(error.reason)
            extra.append((b"Retry-After", b"%d" % error.retry_after))
        elif isinstance(error, BadRequest):
            self._proxy.metrics.rejected(error.reason)
        else:
            self._proxy.metrics.retries_exhausted()
            detail = f"{detail} ({self.attempts} attempts)"
        if self.committed:  # the client broke the rules of its body after it had its answer
            self.client.abort(reset=True)
        else:
            extra.append((b"X-Request-Id", self.request_id))
            self._write_own(error.status, detail, extra)
        self._finish()

    def _write_own(self, status: int, detail: str, extra: list[tuple[bytes, bytes]]) -> None:
        request, client = self.request, self.client
        unread = request.body is not None and not request.body.is_eof()
        ends = client.draining or unread or request.is_http10
        request.keep_alive = request.keep_alive and not ends
        body = b"" if request.method == "HEAD" else json.dumps({"detail": detail}).encode()
        self.commit(status)
        client.write(own_answer(status, body, close=not request.keep_alive, extra=extra))

    def _cut(self, error: ResponseCut) -> None:
        """The answer broke off: end the connection in a way that no client takes for a good end."""
        self._give_up_attempt()
        self.failed(error)
        self._proxy.metrics.upstream_failed(error.reason)
        self.client.abort(reset=True)
        self._finish()

    def unforeseen(self, error: Exception) -> None:
        """A fault of ours. Its place is logged; its message might hold what a client sent."""
        self.outcome, self.reason = "lb_error", "internal"
        frames = traceback.extract_tb(error.__traceback__)
        self._proxy.log.error(
            "request.failed",
            request_id=self.request_id.decode(),
            error=type(error).__name__,
            where=[f"{frame.name}:{frame.lineno}" for frame in frames],
        )
        self._give_up_attempt()
        if self.committed:
            self.client.abort(reset=True)
        else:
            self.request.keep_alive = False
            self._write_own(500, "The load balancer failed; see its log.", [])
        self._finish()

    def _finish(self) -> None:
        """The one exit of every request: nothing of it is left behind, and it is measured and logged."""
        proxy = self._proxy
        if self not in proxy.running:
            return  # a fault met it on its way out
        del proxy.running[self]
        proxy.walls.stop(self)
        if proxy.silences is not None:
            proxy.silences.stop(self)
        self._upload.close()
        self.bytes_in += self._upload.bytes_read
        if self._lease is not None:
            self._lease.release()
        self.finish(proxy.metrics, proxy.log, proxy.access_log)
        self.client.served()
