"""One of several processes that serve the port (`--workers`): a data plane, told of replicas by the
control process (`lb.workers`). It ends when that is gone.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from collections.abc import Sequence

import anyio
import uvloop

from lb.certificates import load_tls
from lb.dataplane import WATCH_SECONDS, DataPlane
from lb.errors import StartError
from lb.link import (
    Ask,
    Begin,
    Drain,
    Link,
    Listed,
    Loads,
    Message,
    Reload,
    ReplicaReport,
    Report,
    Serving,
    changed_loads,
)
from lb.logs import Log
from lb.metrics import Metrics

# How often workers tell each other, by way of the control process, how many requests they have in
# flight. In between each takes the others to do what it does itself (`Replica.load`).
LOADS_SECONDS = 0.05


class Worker:
    """The parts of a worker, joined."""

    def __init__(self, link: Link, begin: Begin, sockets: Sequence[socket.socket]) -> None:
        settings = begin.settings
        self._link = link
        self._sockets = sockets
        self._log = Log(
            log_format=settings.log_format, level=settings.log_level, worker=begin.number
        )
        self._metrics = Metrics(service=settings.service_name, policy=settings.policy)
        certificate, replica_tls = load_tls(settings, self._log)
        self._plane = DataPlane(
            settings,
            certificate=certificate,
            replica_tls=replica_tls,
            metrics=self._metrics,
            log=self._log,
        )
        self._told: dict[str, int] = {}  # in flight, by URL
        self._drain_asked = asyncio.Event()
        self._forced = asyncio.Event()

    async def run(self) -> None:
        """Serve until told to end, then drain."""
        await self._plane.start_on(self._sockets)
        self._link.send(Serving())
        async with anyio.create_task_group() as background:
            background.start_soon(self._plane.run)
            background.start_soon(self._listen)
            background.start_soon(self._retire)
            background.start_soon(self._tell_loads)
            await self._drain_asked.wait()
            await self._plane.drain(self._forced)
            background.cancel_scope.cancel()
        self._report(0)
        await self._plane.close()
        await self._link.flush()

    async def _listen(self) -> None:
        while (message := await self._link.receive()) is not None:
            self._take(message)
        # Without the control process nobody would tell us of replicas.
        self._drain_asked.set()

    def _take(self, message: Message) -> None:
        match message:
            case Listed(ready, at):
                self._plane.apply(ready, at)
            case Loads(in_flight):
                self._plane.table.take_loads(in_flight, self._told)
            case Ask(number):
                self._report(number)
            case Reload():
                self._plane.reload()
            case Drain():
                if self._drain_asked.is_set():
                    self._forced.set()
                self._drain_asked.set()

    async def _retire(self) -> None:
        while True:
            await anyio.sleep(WATCH_SECONDS)
            self._plane.retire(time.monotonic())

    async def _tell_loads(self) -> None:
        while True:
            await anyio.sleep(LOADS_SECONDS)
            if not self._link.jammed:
                self._tell_changed_loads()

    def _tell_changed_loads(self) -> None:
        now = {replica.url: replica.inflight for replica in self._plane.table}
        if changed := changed_loads(self._told, now):
            self._link.send(Loads(changed))
        self._told = now

    def _report(self, number: int) -> None:
        plane = self._plane
        self._tell_changed_loads()
        replicas = {}
        for each in plane.table:
            idle, active = plane.connections(each)
            replicas[each.url] = ReplicaReport(each.ejected_until, each.failures, idle, active)
        self._link.send(
            Report(
                number=number,
                numbers=self._metrics.take(),
                arrivals=plane.arrivals.take(time.time()),
                events=self._log.recent.take(),
                replicas=replicas,
                in_flight=plane.in_flight,
                oldest_arrival=plane.oldest_arrival,
                unfinished=plane.unfinished,
            )
        )


async def _main(descriptors: Sequence[int]) -> None:
    link = await Link.over(socket.socket(fileno=descriptors[0]))
    begin = await link.receive()
    if isinstance(begin, Begin):  # else the control process is gone already
        sockets = [socket.socket(fileno=each) for each in descriptors[1:]]
        await Worker(link, begin, sockets).run()


def main() -> int:
    """Its arguments: the descriptors of the socket pair and of the sockets that listen."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A terminal sends them to all; the control process tells.
        signal.signal(number, signal.SIG_IGN)
    try:
        uvloop.run(_main([int(each) for each in sys.argv[1:]]))
    except StartError as error:
        # The files are not what they were when the control process read them.
        print(f"skyserve-lb: {error}", file=sys.stderr)  # noqa: T201 - the operator's terminal
        return error.exit_code
    return 0
