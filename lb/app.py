"""The composition root: everything is made and joined here, started, and shut down in order."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import socket
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
from lb.certificates import load_tls
from lb.dataplane import WATCH_SECONDS, DataPlane
from lb.errors import EXIT_BAD_CONFIGURATION, EXIT_NO_PORT, StartError
from lb.facts import Facts
from lb.logs import Log
from lb.metrics import Metrics
from lb.plane import Plane
from lb.settings import Settings
from lb.syncer import Syncer
from lb.workers import Workers

EXIT_OK = 0

LAST_REPORT_SECONDS = 0.5
STDERR = 2

_FAULTS_OF_A_PORT = frozenset({errno.EADDRINUSE, errno.EACCES})


class Balancer:
    """One load balancer, put together from its settings."""

    def __init__(self, settings: Settings, log: Log, mode: str = "standalone") -> None:
        """Raises `StartError` for files that cannot be used."""
        self._settings = settings
        self._log = log
        self._drain_asked = asyncio.Event()
        self._forced = asyncio.Event()
        self.metrics = Metrics(service=settings.service_name, policy=settings.policy, mode=mode)
        self._certificate, replica_tls = load_tls(settings, log)
        self._token = _token(settings, log)
        self.plane: Plane
        if settings.workers > 1:
            self.plane = Workers(
                settings, certificate=self._certificate, metrics=self.metrics, log=log
            )
        else:
            self.plane = DataPlane(
                settings,
                certificate=self._certificate,
                replica_tls=replica_tls,
                metrics=self.metrics,
                log=log,
            )
        self._client = ControllerClient(settings.controller_url)
        self._syncer = Syncer(
            self._client.sync,
            interval=settings.sync_interval,
            replicas=self.plane,
            metrics=self.metrics,
            log=log,
        )
        self._read_gauges()
        self._facts = Facts(
            settings,
            mode,
            metrics=self.metrics,
            plane=self.plane,
            not_ready=self._not_ready,
            sync=lambda: self._syncer.state,
            events=log.recent,
        )
        self._admin = Admin(
            not_ready=self._not_ready,
            refresh=self.plane.refresh,
            snapshot=self._facts.snapshot,
            render_metrics=self.metrics.render,
            drain=self.drain,
            token=self._token,
        )

    # --- life -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until told to end, then drain. Raises `StartError` for a port that cannot be bound."""
        try:
            await self._start()
            # If one of these dies, all ends: a balancer that no longer syncs is worse than none.
            async with anyio.create_task_group() as background:
                background.start_soon(self._syncer.run)
                background.start_soon(self.plane.run)
                background.start_soon(self._watch)
                await self._drain_asked.wait()
                await self._drain()
                background.cancel_scope.cancel()
            await self._report_rest()
        finally:
            await self._stop()

    async def _start(self) -> None:
        settings = self._settings
        admin = await _bind(
            self._admin.start(settings.admin_host, settings.admin_port),
            (settings.admin_host, settings.admin_port),
            "admin-",
        )
        address = await _bind(self.plane.start(), (settings.host, settings.port), "")
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
        await self.plane.refresh()
        self._log.info("drain.started", in_flight=self.plane.unfinished)
        if left := await self.plane.drain(self._forced):
            self._log.warning("drain.forced", in_flight=left)
        else:
            self._log.info("drain.finished")

    async def _report_rest(self) -> None:
        """Tell the autoscaler of the arrivals since the last sync, so that an exit is no dip in demand."""
        if len(self.plane.arrivals) and not self._forced.is_set():
            with anyio.move_on_after(LAST_REPORT_SECONDS):
                await self._syncer.sync_once()

    async def _stop(self) -> None:
        await self.plane.close()
        await self._client.aclose()
        await self._admin.stop()

    async def _watch(self) -> None:
        """Keep the history, look after the token, which may change."""
        while True:
            await anyio.sleep(WATCH_SECONDS)
            await self.plane.refresh()
            self._facts.sample()
            if self._token is not None:
                self._token.reload_if_changed()

    def reload(self) -> None:
        """Read certificate and token again."""
        self.plane.reload()
        if self._token is not None:
            self._token.reload()

    # --- what the parts tell and ask ------------------------------------------------------------

    def _not_ready(self) -> str | None:
        if self._drain_asked.is_set():
            return "draining"
        if not self._syncer.answered:
            return "the controller has not answered yet"
        if not self.plane.table.routable():
            return "no routable replica"
        return None

    def _read_gauges(self) -> None:
        gauges, plane = self.metrics.gauges, self.plane
        gauges.replicas = plane.table.counts
        gauges.replica_inflight = lambda: {each.name: each.inflight for each in plane.table}
        gauges.pool_connections = self._pool_connections
        gauges.inflight = lambda: plane.in_flight
        gauges.inflight_oldest_seconds = lambda: (
            0.0 if plane.oldest_arrival is None else time.monotonic() - plane.oldest_arrival
        )
        gauges.arrivals_pending = lambda: len(plane.arrivals)
        gauges.arrivals_dropped = lambda: {
            "overflow": plane.arrivals.dropped_overflow,
            "expired": plane.arrivals.dropped_expired,
        }
        gauges.draining = self._drain_asked.is_set
        gauges.certificate_not_after = lambda: (
            self._certificate.not_after if self._certificate else None
        )
        gauges.now = time.monotonic

    def _pool_connections(self) -> dict[str, int]:
        open_ones = [self.plane.connections(replica) for replica in self.plane.table]
        return {
            "idle": sum(idle for idle, _ in open_ones),
            "active": sum(active for _, active in open_ones),
        }


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
