"""What the bench needs of the machine: cores, compiled helpers, CPU time and memory of processes."""

from __future__ import annotations

import hashlib
import os
import resource
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.skypilot.environment import cache_folder

HERE = Path(__file__).parent
CORES = sorted(os.sched_getaffinity(0))
# The proxy has one core of its own; replicas, load and the bench share the others.
PROXY_CORE = CORES[-1]
LOAD_CORES = CORES[:-1] or CORES
NANOSECONDS = 1e9


class BenchError(Exception):
    """A measurement that could not be made; the text says why."""


def stay_off_the_proxy_core() -> None:
    """For this process and those it starts."""
    os.sched_setaffinity(0, LOAD_CORES)


def on_proxy_core(command: Iterable[str]) -> list[str]:
    return ["taskset", "-c", str(PROXY_CORE), *command]


def raise_file_limit() -> int:
    """Allow as many open files as the system lets us; how many that is."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (65536, hard):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, max(wanted, hard)))
        except ValueError:  # only a privileged process may go beyond the hard limit
            continue
        return wanted
    return hard


def compiled(name: str) -> str:
    """The path of the helper `name`.c, compiled by gcc unless that was done before."""
    source = HERE / f"{name}.c"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    program = cache_folder() / "bench" / f"{name}-{digest}"
    if not program.exists():
        program.parent.mkdir(parents=True, exist_ok=True)
        made = program.with_suffix(f".{os.getpid()}")
        try:
            subprocess.run(["gcc", "-O2", "-o", str(made), str(source)], check=True)
        except FileNotFoundError:
            raise BenchError("the bench compiles two small helpers: install gcc") from None
        made.rename(program)
    return str(program)


def family(pid: int) -> list[int]:
    """The process and all its descendants."""
    found = [pid]
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in tasks.read_text().split():
            found += family(int(child))
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time that a process, its threads and its descendants have had, in seconds.

    From schedstat, which counts nanoseconds; stat counts ticks of 10 ms.
    """
    tasks = [task for each in family(pid) for task in Path(f"/proc/{each}/task").iterdir()]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / NANOSECONDS


def memory_kib(pid: int) -> int:
    """Memory of a process and its descendants; what they share is counted once."""
    total = 0
    for each in family(pid):
        for line in Path(f"/proc/{each}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1])
    return total


@dataclass(frozen=True)
class Replicas:
    """The raw replicas, all in one process."""

    ports: tuple[int, ...]

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports]


@contextmanager
def replicas(count: int) -> Iterator[Replicas]:
    command = [compiled("replica"), str(count)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Replicas(tuple(map(int, process.stdout.readline().split())))
        finally:
            process.kill()
