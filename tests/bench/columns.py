"""What is measured. A column runs one load on one proxy and gives one or more figures."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass

from tests.bench.proxies import Proxy
from tests.bench.stage import Measured, Running, Stage, direct, load, measure

MICROSECONDS = 1e6
# Files that a proxy has open beside two for each stream.
OTHER_FILES = 1000
CONNECTIONS = 32


@dataclass(frozen=True)
class Scale:
    """How long and how much. A full run takes its time, a quick one gives the picture."""

    rounds: int = 3
    seconds: float = 3.0
    rate: int = 1000  # requests/s of the open loop
    mib: int = 512
    open_streams: int = 10_000
    streams: int = 200
    replicas: int = 2
    some: int = 100
    many: int = 1000


QUICK = Scale(rounds=1, seconds=1.0, open_streams=2_000, mib=256)


@dataclass(frozen=True)
class Column:
    """`run` gives figures by their titles; `replicas` is how many the proxy has."""

    name: str
    meaning: str
    run: Callable[[Stage, Proxy, Scale], dict[str, float]]
    replicas: Callable[[Scale], int] = lambda scale: scale.replicas


def most_streams() -> int:
    """As many as a proxy can hold, with a file for each of both sides."""
    return (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - OTHER_FILES) // 2


def warm(stage: Stage) -> int:
    """Answers before it counts: connections to all replicas, caches, counters."""
    return 300 + 4 * len(stage.replicas.ports)


def closed(stage: Stage, running: Running, kind: str, scale: Scale) -> Measured:
    return measure(running, "closed", kind, CONNECTIONS, scale.seconds, warm(stage))


def each(measured: Measured, count: str) -> float:
    units: int = measured.report[count]
    return measured.cpu_seconds / units * MICROSECONDS


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


def latency(stage: Stage, proxy: Proxy, scale: Scale) -> dict[str, float]:
    return added(stage, proxy, scale, scale.rate, f"at {scale.rate:,} GET/s")


def half(stage: Stage, proxy: Proxy, scale: Scale) -> dict[str, float]:
    """Half of what it reaches in a closed loop, which is found out first."""
    report = closed(stage, stage.running(proxy), "get", scale).report
    return added(stage, proxy, scale, report["answered"] / report["seconds"] / 2, "at half load")


def added(stage: Stage, proxy: Proxy, scale: Scale, rate: float, where: str) -> dict[str, float]:
    """Latency over that of a replica asked at the same rate just before, with no proxy between."""
    words = ("get", rate, scale.seconds, warm(stage))
    plain = direct(stage.replicas.ports[0], "rate", *words)["latency"]
    through = measure(stage.running(proxy), "rate", *words).report["latency"]
    return {
        f"added latency {name} {where}, ms": (through[key] - plain[key]) / 1000
        for name, key in (("p50", "p50"), ("p99", "p99"), ("p99.9", "p999"))
    }


def start(stage: Stage, proxy: Proxy, scale: Scale) -> dict[str, float]:
    with stage.fresh(proxy) as running:
        return {"start to first answer, ms": running.start_seconds * 1000}


def held(stage: Stage, proxy: Proxy, scale: Scale) -> dict[str, float]:
    """Streams that are open and silent: what they take, and what they do to other requests."""
    count = min(scale.open_streams, most_streams())
    with stage.fresh(proxy) as running:
        closed(stage, running, "get", scale)
        before = running.memory_kib()
        with load("hold", running.port, count):
            after = running.memory_kib()
            busy = closed(stage, running, "get", scale)
        return {
            f"KiB per open stream, of {count:,}": (after - before) / count,
            f"MiB with {count:,} open streams": after / 1024,
            f"GET beside {count:,} open streams, CPU us": each(busy, "answered"),
        }


def get_of(stage: Stage, proxy: Proxy, scale: Scale) -> dict[str, float]:
    measured = closed(stage, stage.running(proxy), "get", scale)
    count = len(stage.replicas.ports)
    return {f"GET over {count:,} replicas, CPU us": each(measured, "answered")}


COLUMNS = (
    Column("get", "GET in a closed loop over 32 connections", get),
    Column("post", "POST of 8 KB answered with 2 KB, in the same way", post),
    Column("sse", "event streams, 25 chunks/s each", sse),
    Column("download", "one large answer", download),
    Column("latency", "GET in an open loop, the same rate for all", latency),
    Column("half", "GET in an open loop, at half of what each reaches", half),
    Column("start", "from the start of the process to its first answer", start),
    # The stock balancer has 100 connections to a replica at most.
    Column("open", "silent streams", held, lambda scale: scale.some),
    Column("some", "GET as in get, with more replicas", get_of, lambda scale: scale.some),
    Column("many", "GET as in get, with many replicas", get_of, lambda scale: scale.many),
)
