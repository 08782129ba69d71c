"""What is measured. A column runs one load on one proxy and gives one or more figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.bench.proxies import Proxy
from tests.bench.stage import Measured, Running, Stage, measure

MICROSECONDS = 1e6
CONNECTIONS = 32
STREAMS = 200
FEW, SOME, MANY = 2, 100, 1000  # replicas


@dataclass(frozen=True)
class Scale:
    """How long and how much. A full run takes its time, a quick one gives the picture."""

    rounds: int = 3
    seconds: float = 3.0
    rate: int = 1000  # requests/s of the open loop
    mib: int = 512
    open_streams: int = 10_000
    streams: int = STREAMS
    some: int = SOME
    many: int = MANY


QUICK = Scale(rounds=1, seconds=1.0, open_streams=2_000, mib=256)


@dataclass(frozen=True)
class Column:
    """`run` gives figures by their titles; `replicas` is how many the proxy has."""

    name: str
    meaning: str
    run: Callable[[Stage, Proxy, Scale], dict[str, float]]
    replicas: Callable[[Scale], int] = lambda _: FEW


def warm(stage: Stage) -> int:
    """Answers before it counts: connections to all replicas, caches, counters."""
    return 300 + 4 * len(stage.replicas.ports)


def closed(stage: Stage, running: Running, kind: str, scale: Scale) -> Measured:
    return measure(running, "closed", kind, CONNECTIONS, scale.seconds, warm(stage))


def each(measured: Measured, count: str) -> float:
    return measured.cpu_seconds / measured.report[count] * MICROSECONDS


def get(stage: Stage, proxy: Proxy, scale: Scale) -> dict[str, float]:
    measured = closed(stage, stage.running(proxy), "get", scale)
    seconds = measured.report["seconds"]
    return {
        "GET, CPU us": each(measured, "answered"),
        "GET/s": measured.report["answered"] / seconds,
        "core busy at that, %": measured.cpu_seconds / seconds * 100,
    }


def post(stage: Stage, proxy: Proxy, scale: Scale) -> dict[str, float]:
    measured = closed(stage, stage.running(proxy), "post", scale)
    return {"POST 8 KB -> 2 KB, CPU us": each(measured, "answered")}


def sse(stage: Stage, proxy: Proxy, scale: Scale) -> dict[str, float]:
    measured = measure(stage.running(proxy), "streams", scale.streams, scale.seconds)
    report = measured.report
    return {
        "SSE chunk, CPU us": each(measured, "events"),
        "first byte of a stream p50, ms": report["first_byte"]["p50"] / 1000,
        "between chunks p99, ms": report["gap"]["p99"] / 1000,
        "chunk on its way p99, ms": report["delay"]["p99"] / 1000,
    }


def download(stage: Stage, proxy: Proxy, scale: Scale) -> dict[str, float]:
    measured = measure(stage.running(proxy), "bytes", scale.mib)
    return {"download, CPU us/MiB": each(measured, "mib")}


COLUMNS = (
    Column("get", "GET in a closed loop over 32 connections", get),
    Column("post", "POST of 8 KB answered with 2 KB, in the same way", post),
    Column("sse", "event streams, 25 chunks/s each", sse),
    Column("download", "one large answer", download),
)
