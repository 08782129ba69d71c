"""What carries requests: the replicas, their connections and the data port. Each process that serves
has one; what tells it of replicas is above it (`lb.app`), in the same process or in another.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Collection, Sequence

import anyio

from controller_client.protocol import ReadyReplica
from lb.arrivals import Arrivals
from lb.certificates import ServerCertificate
from lb.errors import BadRequest, Rejected
from lb.logs import Log
from lb.metrics import Metrics
from lb.policies import POLICIES
from lb.proxy import Proxy
from lb.replicas import Replica, ReplicaTable, TableChange
from lb.server import Server
from lb.settings import Settings
from lb.upstream import Pools
from lb.wakeup import Wakeup

# How long a draining balancer still takes requests that were on their way when it was told to end.
LAST_CALL_SECONDS = 1.0
WATCH_SECONDS = 0.5


class DataPlane:
    """The parts of one process that a request meets, joined."""

    processes = 1

    def __init__(
        self,
        settings: Settings,
        *,
        certificate: ServerCertificate | None,
        replica_tls: ssl.SSLContext,
        metrics: Metrics,
        log: Log,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._log = log
        self._certificate = certificate
        self._replicas_changed = Wakeup()
        self.arrivals = Arrivals()
        self.table = table_of(settings)
        self.pools = Pools(
            connect_timeout=settings.connect_timeout,
            keepalive=settings.upstream_keepalive,
            tls=replica_tls,
            metrics=metrics,
        )
        self.proxy = Proxy(
            settings,
            table=self.table,
            pools=self.pools,
            arrivals=self.arrivals,
            replicas_changed=self._replicas_changed,
            metrics=metrics,
            log=log,
        )
        self.server = Server(
            self.proxy.handle,
            header_timeout=settings.header_timeout,
            keepalive_timeout=settings.keepalive_timeout,
            max_connections=settings.max_connections,
            refused=self._refused,
        )

    # --- life -----------------------------------------------------------------------------------

    async def start(self) -> list[tuple[str, int]]:
        """Listen; the addresses bound. Raises OSError where that cannot be."""
        tls = self._certificate.context if self._certificate else None
        return await self.server.start(self._settings.host, self._settings.port, tls)

    async def start_on(self, sockets: Sequence[socket.socket]) -> None:
        """Take the connections of sockets that listen already."""
        await self.server.start_on(
            sockets, self._certificate.context if self._certificate else None
        )

    async def run(self) -> None:
        """Measure how late the loop is, count what has finished, look after the certificate."""
        while True:
            due = time.monotonic() + WATCH_SECONDS
            await anyio.sleep(WATCH_SECONDS)
            self._metrics.loop_lag(max(0.0, time.monotonic() - due))
            self._metrics.fold()
            if self._certificate is not None:
                self._certificate.reload_if_changed()

    async def drain(self, forced: asyncio.Event) -> int:
        """Let what runs finish, within the drain time-out and unless forced; how many are left."""
        self.server.drain_begun.set()
        with anyio.move_on_after(self._settings.drain_timeout):
            await until(forced, LAST_CALL_SECONDS)
            self.server.stop_listening()
            while self.server.unfinished and not forced.is_set():
                self.server.close_idle()
                await until(forced, 0.05)
        self.server.stop_listening()
        return self.server.unfinished

    async def close(self) -> None:
        """Cut what is left."""
        self.server.close_idle()
        self.server.abort_all()
        self.pools.close_all()

    def reload(self) -> None:
        """Read the certificate again."""
        if self._certificate is not None:
            self._certificate.reload()

    # --- what it is told ------------------------------------------------------------------------

    def apply(self, ready: Collection[ReadyReplica], now: float) -> TableChange:
        """Take in a ready list: have a pool for each new replica, and wake who waits for one."""
        change = self.table.apply(ready, now)
        for replica in change.added:
            self.pools.open(replica)
            self._metrics.replica_added(replica.name)
        self.proxy.synced = True
        if change:
            self._replicas_changed.fire()
        return change

    def retire(self, now: float) -> tuple[Replica, ...]:
        """Forget the replicas that nobody needs any more, and return them."""
        retired = self.table.retire(now)
        for replica in retired:
            self.pools.close(replica)
            self._metrics.replica_retired(replica.name, now)
        return retired

    # --- what it is asked -----------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return len(self.proxy.running)

    @property
    def oldest_arrival(self) -> float | None:
        """When the oldest request in flight came (monotonic clock)."""
        running = self.proxy.running
        return next(iter(running)).request.arrived if running else None

    @property
    def unfinished(self) -> int:
        """How many clients wait for an answer, or for the rest of one."""
        return self.server.unfinished

    def connections(self, replica: Replica) -> tuple[int, int]:
        """How many are open to a replica: idle ones, active ones."""
        pool = self.pools[replica]
        return pool.idle, pool.active

    async def refresh(self) -> None:
        """What is asked above is known at any time."""

    def _refused(self, error: BadRequest | Rejected) -> None:
        """A client was refused before it made a request."""
        self._metrics.rejected(error.reason)
        self._metrics.request_finished(
            (error.outcome, error.status, "other", 0.0, None, None, 0, 0, "")
        )
        if self._settings.access_log != "off":
            self._log.info(
                "request.refused", status=error.status, reason=error.reason, cause=error.detail
            )


def table_of(settings: Settings) -> ReplicaTable:
    """An empty replica table."""
    return ReplicaTable(
        POLICIES[settings.policy](settings.target_qps),
        grace_period=settings.grace_period,
        drain_timeout=settings.drain_timeout,
        peers=settings.workers - 1,
    )


async def until(event: asyncio.Event, seconds: float) -> None:
    """Wait for the event, so long at the most."""
    with anyio.move_on_after(seconds):
        await event.wait()
