"""What `--workers` brings, and how even it stays.

    python -m tests.bench.workers

*Rate*: GET/s in a closed loop and the CPU of each GET, of one worker and of two. The workers have
cores of their own where there is one more for the load; else they share with it, and the rate says
nothing of them. *Evenness*: requests that take 20 to 180 ms over eight replicas by `least_load`, 64
at a time; how far the numbers of requests in flight lie apart, as the replicas see them. One worker
knows them all; several tell each other.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import click
import uvloop
from rich.console import Console
from rich.table import Table

from controller_client.embedded.places import free_port
from controller_client.testing import FakeController
from tests.bench.machine import CORES, BenchError, Replicas, raise_file_limit, replicas
from tests.bench.proxies import Job, ours
from tests.bench.stage import Running, measure, started
from tests.skypilot.environment import ROOT
from tests.system.process import environment

WARM = 500
CONNECTIONS = 64
REPLICAS = 8
SHORTEST, LONGEST = 0.02, 0.18  # seconds
SAMPLE_SECONDS = 0.01
REQUEST = b"GET / HTTP/1.1\r\nHost: bench\r\n\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
END_OF_HEAD = b"\r\n\r\n"


@contextmanager
def serving(workers: int, fleet: Replicas, cores: list[int]) -> Iterator[Running]:
    """Ours with so many workers, on these cores, once it answers."""
    with FakeController(fleet.urls) as controller, tempfile.TemporaryDirectory() as folder:
        job = Job(free_port(), fleet, controller.url, Path(folder))
        pinned = ("taskset", "-c", ",".join(map(str, cores)))
        command = [*pinned, *ours(sys.executable, job), "--workers", str(workers)]
        with started(command, job, ROOT, environment()) as running:
            yield running


# --- rate -----------------------------------------------------------------------------------------


def rate(workers: int, seconds: float) -> tuple[float, float]:
    """GET/s, and microseconds of CPU for each."""
    cores = CORES[-workers:] if len(CORES) > workers else CORES
    with replicas(2) as fleet, serving(workers, fleet, cores) as running:
        measured = measure(running, "closed", "get", CONNECTIONS, seconds, WARM)
    answered = measured.report["answered"]
    return answered / measured.report["seconds"], measured.cpu_seconds / answered * 1e6


def rates(seconds: float, rounds: int) -> Table:
    table = Table("workers", "GET/s", "x one", "GET, CPU us", title="rate (medians)")
    measured: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
    for _ in range(rounds):
        for workers, figures in measured.items():
            figures.append(rate(workers, seconds))
    alone = statistics.median(per_second for per_second, _ in measured[1])
    for workers, figures in measured.items():
        per_second, cpu = map(statistics.median, zip(*figures, strict=True))
        row = f"{per_second:,.0f}", f"{per_second / alone:.2f}", f"{cpu:.0f}"
        table.add_row(str(workers), *row)
    if len(CORES) < 3:
        table.caption = (
            f"{len(CORES)} cores: two workers share them with the load, so this is not what two "
            "free cores give"
        )
    return table


# --- evenness -------------------------------------------------------------------------------------


class SlowReplica(asyncio.Protocol):
    """Answers each request after a time of its own; counts those in flight in `counts[number]`."""

    def __init__(self, counts: list[int], number: int, chance: random.Random) -> None:
        self._counts = counts
        self._number = number
        self._chance = chance

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        for _ in range(data.count(END_OF_HEAD)):
            self._counts[self._number] += 1
            seconds = self._chance.uniform(SHORTEST, LONGEST)
            asyncio.get_running_loop().call_later(seconds, self._answer)

    def _answer(self) -> None:
        self._counts[self._number] -= 1
        if not self._transport.is_closing():  # at the end of the run
            self._transport.write(ANSWER)


async def ask_for_ever(port: int) -> None:
    """The next request as soon as one is answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while True:
        writer.write(REQUEST)
        await reader.readuntil(END_OF_HEAD)
        await reader.readexactly(2)


async def sampled(port: int, counts: list[int], seconds: float) -> list[tuple[int, ...]]:
    """The counts, again and again, while all clients ask."""
    clients = [asyncio.create_task(ask_for_ever(port)) for _ in range(CONNECTIONS)]
    await asyncio.sleep(1)  # until all have found their pace
    samples = []
    for _ in range(round(seconds / SAMPLE_SECONDS)):
        await asyncio.sleep(SAMPLE_SECONDS)
        samples.append(tuple(counts))
    for client in clients:
        client.cancel()
    return samples


async def spread(workers: int, seconds: float) -> tuple[float, float, float]:
    """Of the requests in flight at each replica: mean, mean of (most - fewest), standard deviation."""
    loop, counts, chance = asyncio.get_running_loop(), [0] * REPLICAS, random.Random(1)
    servers = [
        await loop.create_server(lambda at=at: SlowReplica(counts, at, chance), "127.0.0.1", 0)
        for at in range(REPLICAS)
    ]
    fleet = Replicas(tuple(server.sockets[0].getsockname()[1] for server in servers))
    balancer = serving(workers, fleet, CORES)
    # In a thread: its first answer comes from the replicas of this loop.
    running = await asyncio.to_thread(balancer.__enter__)
    try:
        samples = await sampled(running.port, counts, seconds)
    finally:
        await asyncio.to_thread(balancer.__exit__, None, None, None)
    return (
        statistics.mean(map(statistics.mean, samples)),
        statistics.mean(max(each) - min(each) for each in samples),
        statistics.mean(map(statistics.pstdev, samples)),
    )


def evenness(seconds: float) -> Table:
    table = Table(
        "workers", "in flight each", "most - fewest", "standard deviation", title="evenness"
    )
    for workers in (1, 2, 4):
        figures = uvloop.run(spread(workers, seconds))
        table.add_row(str(workers), *(f"{figure:.2f}" for figure in figures))
    return table


@click.command(help="Measure the rate and the evenness of several workers.")
@click.option("--seconds", default=5.0, show_default=True, help="How long each is measured.")
@click.option("--rounds", default=3, show_default=True, help="How often each rate is measured.")
def main(seconds: float, rounds: int) -> None:
    raise_file_limit()
    console = Console()
    try:
        console.print(rates(seconds, rounds))
        console.print(evenness(seconds))
    except BenchError as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
