"""The composition root: everything is made and joined here, started, and shut down in order."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import socket
import ssl
import sys
import time
from collections.abc import Coroutine
from typing import Any
from urllib.parse import urlsplit

import anyio
import uvloop

from controller_client.client import ControllerClient
from lb.access import Token, is_loopback, why
from lb.admin import Admin
from lb.arrivals import Arrivals
from lb.certificates import ServerCertificate, describe, describe_ca, replica_context
from lb.errors import BadRequest, Rejected
from lb.facts import Facts
from lb.logs import Log
from lb.metrics import Metrics
from lb.policies import POLICIES
from lb.proxy import Proxy
from lb.replicas import ReplicaTable
from lb.server import Server
from lb.settings import Settings
from lb.syncer import Syncer
from lb.upstream import Pools
from lb.wakeup import Wakeup

EXIT_OK = 0
EXIT_BAD_CONFIGURATION = 2
EXIT_NO_PORT = 3

# How long a draining balancer still takes requests that were on their way when it was told to end.
LAST_CALL_SECONDS = 1.0
LAST_REPORT_SECONDS = 0.5
WATCH_SECONDS = 0.5
STDERR = 2

_FAULTS_OF_A_PORT = frozenset({errno.EADDRINUSE, errno.EACCES})


class StartError(Exception):
    """The balancer cannot start; `str` is one line for the operator."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Balancer:
    """One load balancer, put together from its settings."""

    def __init__(self, settings: Settings, log: Log, mode: str = "standalone") -> None:
        """Raises `StartError` for files that cannot be used."""
        self._settings = settings
        self._log = log
        self.metrics = Metrics(service=settings.service_name, policy=settings.policy, mode=mode)
        self._certificate, replica_tls = _tls(settings, log)
        self._token = _token(settings, log)
        self._files = [each for each in (self._certificate, self._token) if each is not None]
        self._arrivals = Arrivals()
        replicas_changed = Wakeup()
        self.table = ReplicaTable(
            POLICIES[settings.policy](settings.target_qps),
            grace_period=settings.grace_period,
            drain_timeout=settings.drain_timeout,
        )
        self._pools = Pools(
            connect_timeout=settings.connect_timeout,
            keepalive=settings.upstream_keepalive,
            tls=replica_tls,
            metrics=self.metrics,
        )
        self.proxy = Proxy(
            settings,
            table=self.table,
            pools=self._pools,
            arrivals=self._arrivals,
            replicas_changed=replicas_changed,
            metrics=self.metrics,
            log=log,
        )
        self.server = Server(
            self.proxy.handle,
            header_timeout=settings.header_timeout,
            keepalive_timeout=settings.keepalive_timeout,
            max_connections=settings.max_connections,
            refused=self._refused,
        )
        self._client = ControllerClient(settings.controller_url)
        self._syncer = Syncer(
            self._client.sync,
            interval=settings.sync_interval,
            table=self.table,
            pools=self._pools,
            arrivals=self._arrivals,
            replicas_changed=replicas_changed,
            metrics=self.metrics,
            log=log,
            on_first_answer=self._first_answer,
        )
        self._read_gauges()
        self._facts = Facts(
            settings,
            mode,
            metrics=self.metrics,
            table=self.table,
            pools=self._pools,
            not_ready=self._not_ready,
            sync=lambda: self._syncer.state,
            events=log.recent,
        )
        self._admin = Admin(
            not_ready=self._not_ready,
            snapshot=self._facts.snapshot,
            render_metrics=self.metrics.render,
            drain=self.drain,
            token=self._token,
        )
        self._drain_asked = asyncio.Event()
        self._forced = asyncio.Event()

    # --- life -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until told to end, then drain. Raises `StartError` for a port that cannot be bound."""
        try:
            await self._start()
            # If the syncer dies, all ends: a balancer that no longer syncs is worse than none.
            async with anyio.create_task_group() as background:
                background.start_soon(self._syncer.run)
                background.start_soon(self._watch)
                await self._drain_asked.wait()
                await self._drain()
                background.cancel_scope.cancel()
            await self._report_rest()
        finally:
            await self._stop()

    async def _start(self) -> None:
        settings = self._settings
        tls = self._certificate.context if self._certificate else None
        admin = await _bind(
            self._admin.start(settings.admin_host, settings.admin_port),
            (settings.admin_host, settings.admin_port),
            "admin-",
        )
        address = await _bind(
            self.server.start(settings.host, settings.port, tls),
            (settings.host, settings.port),
            "",
        )
        self._log.info(
            "server.started",
            address=address,
            admin=admin,
            controller=settings.controller_url,
            policy=settings.policy,
            service=settings.service_name,
        )

    def drain(self) -> None:
        """Begin to shut down; asked twice, end at once."""
        if self._drain_asked.is_set():
            self._forced.set()
        self._drain_asked.set()

    async def _drain(self) -> None:
        """Let what runs finish, within the drain time-out and unless forced."""
        self.server.drain_begun.set()
        self._log.info("drain.started", in_flight=self.server.unfinished)
        with anyio.move_on_after(self._settings.drain_timeout):
            await self._until_forced(LAST_CALL_SECONDS)
            self.server.stop_listening()
            while self.server.unfinished and not self._forced.is_set():
                self.server.close_idle()
                await self._until_forced(0.05)
        self.server.stop_listening()
        if left := self.server.unfinished:
            self._log.warning("drain.forced", in_flight=left)
        else:
            self._log.info("drain.finished")

    async def _report_rest(self) -> None:
        """Tell the autoscaler of the arrivals since the last sync, so that an exit is no dip in demand."""
        if len(self._arrivals) and not self._forced.is_set():
            with anyio.move_on_after(LAST_REPORT_SECONDS):
                await self._syncer.sync_once()

    async def _until_forced(self, seconds: float) -> None:
        with anyio.move_on_after(seconds):
            await self._forced.wait()

    async def _stop(self) -> None:
        self.server.close_idle()
        self.server.abort_all()
        self._pools.close_all()
        await self._client.aclose()
        await self._admin.stop()

    async def _watch(self) -> None:
        """Measure how late the loop is, keep the history, look after the files that may change."""
        while True:
            due = time.monotonic() + WATCH_SECONDS
            await anyio.sleep(WATCH_SECONDS)
            self.metrics.loop_lag(max(0.0, time.monotonic() - due))
            self.metrics.fold()
            self._facts.sample()
            for file in self._files:
                file.reload_if_changed()

    def reload(self) -> None:
        """Read certificate and token again."""
        for file in self._files:
            file.reload()

    # --- what the parts tell and ask ------------------------------------------------------------

    def _first_answer(self) -> None:
        self.proxy.synced = True

    def _refused(self, error: BadRequest | Rejected) -> None:
        """A client was refused before it made a request."""
        self.metrics.rejected(error.reason)
        self.metrics.request_finished(
            (error.outcome, error.status, "other", 0.0, None, None, 0, 0, "")
        )
        if self._settings.access_log != "off":
            self._log.info(
                "request.refused", status=error.status, reason=error.reason, cause=error.detail
            )

    def _not_ready(self) -> str | None:
        if self.server.draining:
            return "draining"
        if not self.proxy.synced:
            return "the controller has not answered yet"
        if not self.table.routable():
            return "no routable replica"
        return None

    def _read_gauges(self) -> None:
        gauges, running = self.metrics.gauges, self.proxy.running
        gauges.replicas = self.table.counts
        gauges.replica_inflight = lambda: {
            self._pools[replica].name: replica.inflight for replica in self.table
        }
        gauges.pool_connections = self._pools.connections
        gauges.inflight = lambda: len(running)
        gauges.inflight_oldest_seconds = lambda: (
            time.monotonic() - next(iter(running)).request.arrived if running else 0.0
        )
        gauges.arrivals_pending = lambda: len(self._arrivals)
        gauges.arrivals_dropped = lambda: {
            "overflow": self._arrivals.dropped_overflow,
            "expired": self._arrivals.dropped_expired,
        }
        gauges.draining = lambda: self.server.draining
        gauges.certificate_not_after = lambda: (
            self._certificate.not_after if self._certificate else None
        )
        gauges.now = time.monotonic


def _tls(settings: Settings, log: Log) -> tuple[ServerCertificate | None, ssl.SSLContext]:
    try:
        certificate = None
        if settings.tls_keyfile and settings.tls_certfile:
            certificate = ServerCertificate(settings.tls_keyfile, settings.tls_certfile, log)
    except (OSError, ValueError) as error:
        raise StartError(
            f"--tls-certfile {settings.tls_certfile}, --tls-keyfile {settings.tls_keyfile}: "
            f"{describe(error)}",
            EXIT_BAD_CONFIGURATION,
        ) from None
    try:
        context = replica_context(ca=settings.upstream_ca, insecure=settings.upstream_insecure)
    except OSError as error:
        raise StartError(
            f"--upstream-ca {settings.upstream_ca}: {describe_ca(error)}", EXIT_BAD_CONFIGURATION
        ) from None
    return certificate, context


def _token(settings: Settings, log: Log) -> Token | None:
    if settings.admin_token_file is None:
        return None
    try:
        return Token(settings.admin_token_file, log)
    except (OSError, ValueError) as error:
        raise StartError(
            f"--admin-token-file {settings.admin_token_file}: {why(error)}", EXIT_BAD_CONFIGURATION
        ) from None


async def _bind(
    start: Coroutine[Any, Any, list[tuple[str, int]]], wanted: tuple[str, int], prefix: str
) -> str:
    """Start to listen; the addresses bound, as text."""
    try:
        bound = await start
    except OSError as error:
        in_way = "port" if error.errno in _FAULTS_OF_A_PORT else "host"
        raise StartError(
            f"cannot listen on {_shown(*wanted)}: {_reason(error)}; choose another with --{prefix}{in_way}",
            EXIT_NO_PORT,
        ) from None
    return ", ".join(_shown(host, port) for host, port in bound)


def _shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _reason(error: OSError) -> str:
    # asyncio words it anew, with the address once more; the look-up of a name has errors of its own.
    lookup = isinstance(error, socket.gaierror)
    return os.strerror(error.errno) if error.errno and not lookup else str(error.strerror or error)


async def _main(settings: Settings, mode: str) -> None:
    log = Log(log_format=settings.log_format, level=settings.log_level)
    balancer = Balancer(settings, log, mode)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, balancer.drain)
    loop.add_signal_handler(signal.SIGHUP, balancer.reload)
    _raise_descriptor_limit(settings.max_connections, log)
    await balancer.run()
    log.info("server.stopped")


def _raise_descriptor_limit(max_connections: int, log: Log) -> None:
    """Take all the file descriptors that we may have, and warn if they cannot be enough."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    needed = 2 * max_connections  # each client's own, and one to a replica
    if most != resource.RLIM_INFINITY and most < needed:
        log.warning(
            "server.few_descriptors", limit=most, needed=needed, max_connections=max_connections
        )


def _fill_standard_descriptors() -> None:
    """Open what of 0, 1 and 2 was closed (`>&-`): libuv aborts when a socket of its own gets one."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        pass
    os.close(descriptor)


def mode_of(controller_url: str) -> str:
    """How a balancer runs that is not embedded: in the controller's pod or on its machine, or apart."""
    host = urlsplit(controller_url).hostname or ""
    try:
        beside = is_loopback(host)
    except ValueError:  # a name
        beside = host == "localhost"
    return "sidecar" if beside else "standalone"


def run(settings: Settings, mode: str | None = None) -> int:
    """Run the load balancer until it is told to end; the exit code of the process.

    `mode` is a label of the info metric: `embedded` is inside SkyPilot's controller; None: what the
    controller's address tells.
    """
    _fill_standard_descriptors()
    try:
        uvloop.run(_main(settings, mode or mode_of(settings.controller_url)))
    except StartError as error:
        print(f"skyserve-lb: {error}", file=sys.stderr)  # noqa: T201 - the operator's terminal
        return error.exit_code
    return EXIT_OK
