"""Several processes that serve one port, as the control process sees them (`--workers`).

Each has a socket of its own on the port (SO_REUSEPORT: the kernel gives each new connection to one of
them), a replica table and pools of its own. The sockets are made and kept here: when a worker dies,
what connects to its socket waits there for the next one. The list is synced here, once, and passed
on; arrivals, counts and events come here in reports.
"""

from __future__ import annotations

import asyncio
import math
import socket
import sys
import time
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import anyio

from controller_client.protocol import ReadyReplica
from lb.arrivals import Arrivals
from lb.certificates import ServerCertificate
from lb.dataplane import LAST_CALL_SECONDS, WATCH_SECONDS, table_of, until
from lb.errors import EXIT_BAD_CONFIGURATION, StartError
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
from lb.replicas import Replica, ReplicaTable, TableChange
from lb.server import BACKLOG
from lb.settings import Settings
from lb.worker import LOADS_SECONDS

# With our own module path: `-m` would put the working directory first, with whatever it holds.
PROGRAM = f"import sys; sys.path[:] = {sys.path}; from lb.worker import main; sys.exit(main())"
# How long one may take to start.
START_SECONDS = 30.0
# One that dies sooner than this after its start is started again no sooner.
SHORT_LIFE_SECONDS = 1.0
# How long the answer to a question is waited for...
ANSWER_SECONDS = 1.0
# ...and after how long one that answers nothing is taken for dead.
SILENCE_SECONDS = 30.0
# To end, beyond the drain time-out.
END_SECONDS = 5.0


class Worker:
    """One worker, or the place of one: process and link change when it dies, number and sockets stay."""

    def __init__(self, number: int, sockets: list[socket.socket]) -> None:
        self.number = number
        self.sockets = sockets
        self.process: Process | None = None
        self.link: Link | None = None
        self.in_flight: dict[str, int] = {}  # by URL, without those at 0
        self.told: dict[str, int] = {}  # the same of all others, as it was told
        self.moved = False  # has its own changed since then?
        self.report: Report | None = None  # the last one
        self.left = 0  # requests that were unfinished at its end
        self._asked: dict[int, tuple[float, asyncio.Future[None]]] = {}  # since when, by number

    async def start(self) -> None:
        """Start a process and a link to it."""
        ours, theirs = socket.socketpair()
        with theirs:
            descriptors = [theirs.fileno(), *(sock.fileno() for sock in self.sockets)]
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", PROGRAM, *map(str, descriptors), pass_fds=descriptors
            )
        self.link = await Link.over(ours)

    def send(self, message: Message) -> None:
        """To one that is gone, nothing."""
        if self.link is not None:
            self.link.send(message)

    def ask(self, number: int) -> asyncio.Future[None]:
        """Done when it has answered, or is gone."""
        answered = asyncio.get_running_loop().create_future()
        if self.link is None:
            answered.set_result(None)
        else:
            self._asked[number] = time.monotonic(), answered
            self.link.send(Ask(number))
        return answered

    def answered(self, number: int) -> None:
        if number in self._asked:
            self._asked.pop(number)[1].set_result(None)

    @property
    def silent_for(self) -> float:
        """Seconds since it was asked the first of what it has not answered."""
        since = next(iter(self._asked.values()), None)
        return 0.0 if since is None else time.monotonic() - since[0]

    async def ended(self) -> int:
        """Wait for its end; the exit code."""
        assert self.process is not None
        code = await self.process.wait()
        if self.link is not None:
            self.link.close()
        self.left = 0 if self.report is None else self.report.unfinished
        self.link = self.report = None
        self.in_flight, self.told, self.moved = {}, {}, False
        for number in tuple(self._asked):
            self.answered(number)
        return code

    def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()


class Workers:
    """The data planes of several processes as one (`lb.plane.Plane`)."""

    def __init__(
        self,
        settings: Settings,
        *,
        certificate: ServerCertificate | None,
        metrics: Metrics,
        log: Log,
    ) -> None:
        self._settings = settings
        self._certificate = certificate
        self._metrics = metrics
        self._log = log
        self._workers: list[Worker] = []
        self._lists: list[Listed] = []  # what brings a new worker up to date
        self._asks = 0
        self._draining = False
        self.table: ReplicaTable = table_of(settings)
        self.arrivals = Arrivals()

    # --- life -----------------------------------------------------------------------------------

    async def start(self) -> list[tuple[str, int]]:
        """Listen; the addresses bound. Raises OSError where that cannot be, and StartError."""
        addresses = await self._free_addresses()
        for number in range(1, self._settings.workers + 1):
            sockets = [_listener(family, address) for family, address in addresses]
            self._workers.append(Worker(number, sockets))
        for worker in self._workers:
            await worker.start()
        for worker in self._workers:
            if not await self._begun(worker):
                raise StartError(
                    f"worker {worker.number} ended as it started", EXIT_BAD_CONFIGURATION
                )
        return [address[:2] for _, address in addresses]

    async def _free_addresses(self) -> list[tuple[socket.AddressFamily, Any]]:
        """Family and address of all that host and port name. Asked for without SO_REUSEPORT, which
        would share a port with another balancer of ours."""
        settings = self._settings
        probe = await asyncio.get_running_loop().create_server(
            asyncio.Protocol, settings.host, settings.port
        )
        addresses = [(sock.family, sock.getsockname()) for sock in probe.sockets]
        probe.close()
        await probe.wait_closed()
        return addresses

    async def _begun(self, worker: Worker) -> bool:
        """Tell a new worker what it must know; does it serve?"""
        worker.send(Begin(worker.number, self._share()))
        for message in self._lists:
            worker.send(message)
        with anyio.move_on_after(START_SECONDS):
            assert worker.link is not None
            if isinstance(await worker.link.receive(), Serving):
                return True
        worker.kill()
        return False

    def _share(self) -> Settings:
        """What a worker may use of what is meant for all."""
        settings, count = self._settings, self._settings.workers
        return replace(
            settings,
            max_connections=math.ceil(settings.max_connections / count),
            replay_budget=math.ceil(settings.replay_budget / count),
        )

    async def run(self) -> None:
        """Keep the workers going, have them know each other's loads, look after the certificate."""
        async with anyio.create_task_group() as tasks:
            for worker in self._workers:
                tasks.start_soon(self._keep, worker)
            tasks.start_soon(self._exchange_loads)
            tasks.start_soon(self._watch)

    async def _keep(self, worker: Worker) -> None:
        """Hear a worker, and replace it when it dies."""
        while True:
            began = time.monotonic()
            await self._hear(worker)
            code = await worker.ended()
            if not self._draining:
                self._log.error("worker.died", worker=worker.number, exit_code=code)
                await anyio.sleep(max(0.0, began + SHORT_LIFE_SECONDS - time.monotonic()))
            if self._draining:
                return
            await worker.start()
            if await self._begun(worker):
                self._log.info("worker.started", worker=worker.number)

    async def _watch(self) -> None:
        while True:
            await anyio.sleep(WATCH_SECONDS)
            if self._certificate is not None:
                self._certificate.reload_if_changed()
            for worker in self._workers:
                if worker.silent_for > SILENCE_SECONDS:
                    self._log.error("worker.silent", worker=worker.number)
                    worker.kill()

    async def drain(self, forced: asyncio.Event) -> int:
        """Let what runs finish, within the drain time-out and unless forced; how many are left."""
        self._draining = True
        self._tell(Drain())
        await until(forced, LAST_CALL_SECONDS)
        self._stop_listening()
        await self._all_ended(forced, self._settings.drain_timeout + END_SECONDS)
        self._tell(Drain())
        await self._all_ended(asyncio.Event(), END_SECONDS)
        return sum(worker.left for worker in self._workers)

    async def _all_ended(self, forced: asyncio.Event, seconds: float) -> None:
        """Wait for that, so long at the most and unless forced."""
        with anyio.move_on_after(seconds):
            while any(worker.link for worker in self._workers) and not forced.is_set():
                await until(forced, 0.02)

    async def close(self) -> None:
        """Cut what is left."""
        self._stop_listening()
        for worker in self._workers:
            if worker.process is not None:
                worker.kill()
                await worker.ended()

    def _stop_listening(self) -> None:
        for worker in self._workers:
            for sock in worker.sockets:
                sock.close()

    def reload(self) -> None:
        """Read the certificate again."""
        if self._certificate is not None:
            self._certificate.reload()
        self._tell(Reload())

    def _tell(self, message: Message) -> None:
        for worker in self._workers:
            worker.send(message)

    # --- what the workers tell ------------------------------------------------------------------

    async def _hear(self, worker: Worker) -> None:
        """Take in what a worker tells, until it is gone."""
        assert worker.link is not None
        while (message := await worker.link.receive()) is not None:
            if isinstance(message, Loads):
                now = {**worker.in_flight, **message.in_flight}
                worker.in_flight = {url: count for url, count in now.items() if count}
                worker.moved = True
            elif isinstance(message, Report):
                self._take(worker, message)

    def _take(self, worker: Worker, report: Report) -> None:
        worker.report = report
        self._metrics.numbers.add(report.numbers)
        for arrival in report.arrivals:
            self.arrivals.record(arrival)
        self._log.recent.extend(report.events)
        worker.answered(report.number)

    async def _exchange_loads(self) -> None:
        while True:
            await anyio.sleep(LOADS_SECONDS)
            self._tell_loads()

    def _tell_loads(self) -> None:
        """Tell each worker what the others have in flight, or that what it told is known to them."""
        total = self._in_flight_by_url()
        for worker in self._workers:
            if worker.link is None or worker.link.jammed:
                continue
            others = {url: n - worker.in_flight.get(url, 0) for url, n in total.items()}
            changed = changed_loads(worker.told, others)
            if changed or worker.moved:
                worker.send(Loads(changed))
            worker.told, worker.moved = others, False

    def _in_flight_by_url(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for worker in self._workers:
            total.update(worker.in_flight)
        return total

    # --- what it is told ------------------------------------------------------------------------

    def apply(self, ready: Collection[ReadyReplica], now: float) -> TableChange:
        """Take in a ready list that the controller answered, and pass it on."""
        change = self.table.apply(ready, now)
        for replica in change.added:
            self._metrics.replica_added(replica.name)
        message = Listed(tuple(ready), now)
        self._tell(message)
        # An empty list says that those of the last other one are held, the first one since when.
        self._lists = [message] if ready else [*self._lists[:2], message]
        return change

    def retire(self, now: float) -> tuple[Replica, ...]:
        """Forget the replicas that nobody needs any more, and return them."""
        retired = self.table.retire(now)
        for replica in retired:
            self._metrics.replica_retired(replica.name, now)
        return retired

    # --- what it is asked -----------------------------------------------------------------------

    async def refresh(self) -> None:
        """Have the workers report."""
        self._asks += 1
        if asked := [worker.ask(self._asks) for worker in self._workers]:
            await asyncio.wait(asked, timeout=ANSWER_SECONDS)
        self._tell_loads()
        total = self._in_flight_by_url()
        for replica in self.table:
            replica.inflight = total[replica.url]
            seen = self._seen(replica)
            untils = [each.ejected_until for each in seen if each.ejected_until is not None]
            replica.ejected_until = max(untils, default=None)
            replica.failures = max((each.failures for each in seen), default=0)

    def _reports(self) -> list[Report]:
        return [worker.report for worker in self._workers if worker.report is not None]

    def _seen(self, replica: Replica) -> list[ReplicaReport]:
        """How the workers see a replica."""
        reports = self._reports()
        return [each.replicas[replica.url] for each in reports if replica.url in each.replicas]

    @property
    def processes(self) -> int:
        """How many serve."""
        return sum(worker.link is not None for worker in self._workers)

    @property
    def in_flight(self) -> int:
        return sum(report.in_flight for report in self._reports())

    @property
    def oldest_arrival(self) -> float | None:
        arrivals = (report.oldest_arrival for report in self._reports())
        return min((each for each in arrivals if each is not None), default=None)

    @property
    def unfinished(self) -> int:
        return sum(report.unfinished for report in self._reports())

    def connections(self, replica: Replica) -> tuple[int, int]:
        """How many are open to a replica: idle ones, active ones."""
        seen = self._seen(replica)
        return sum(each.idle for each in seen), sum(each.active for each in seen)


def _listener(family: socket.AddressFamily, address: Any) -> socket.socket:
    """One of several sockets that listen on the same address."""
    return socket.create_server(address, family=family, backlog=BACKLOG, reuse_port=True)
