"""Proxies at work: started in front of raw replicas, and put under the load of load.c."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from controller_client.embedded.places import free_port
from controller_client.testing import FakeController
from tests.bench.machine import (
    BenchError,
    Replicas,
    compiled,
    cpu_seconds,
    memory_kib,
    on_proxy_core,
    replicas,
)
from tests.bench.proxies import Job, Proxy
from tests.system.process import end_at_once

START_SECONDS = 60.0
POLL_SECONDS = 0.001
# The stock balancer never answers some requests that came before its first list.
PROBE_SECONDS = 1.0
PROBE = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"


@dataclass(frozen=True)
class Running:
    """A proxy that answers."""

    port: int
    pid: int
    start_seconds: float

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.pid)

    def memory_kib(self) -> int:
        return memory_kib(self.pid)


@dataclass(frozen=True)
class Measured:
    """What load.c reported, and the CPU time that the proxy had meanwhile."""

    report: dict[str, Any]
    cpu_seconds: float


@contextmanager
def load(*words: object) -> Iterator[subprocess.Popen[str]]:
    """A run of load.c that has begun to measure."""
    command = [compiled("load"), *map(str, words)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            if process.stdout.readline() != "begin\n":
                raise BenchError(process.stderr.read().strip() or "the load did not begin")
            yield process
        finally:
            process.kill()


def end_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The report; raises BenchError if a request failed, for its cost would say nothing."""
    assert process.stdout is not None
    assert process.stderr is not None
    line = process.stdout.readline()
    if not line.startswith("end "):
        raise BenchError(process.stderr.read().strip() or "the load ended early")
    report: dict[str, Any] = json.loads(line.removeprefix("end "))
    if report.get("failed"):
        raise BenchError(f"{report['failed']} requests failed")
    if report.get("unanswered"):
        raise BenchError(f"overloaded: {report['unanswered']} requests were left")
    return report


def direct(port: int, mode: str, *words: object) -> dict[str, Any]:
    """Load on a replica with no proxy between."""
    with load(mode, port, *words) as process:
        return end_of(process)


def measure(running: Running, mode: str, *words: object) -> Measured:
    with load(mode, running.port, *words) as process:
        before = running.cpu_seconds()
        report = end_of(process)
        return Measured(report, running.cpu_seconds() - before)


def answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), PROBE_SECONDS) as sock:
            sock.sendall(PROBE)
            return bool(re.match(rb"HTTP/1.1 200", sock.recv(64)))
    except OSError:
        return False


@contextmanager
def started(
    command: list[str], job: Job, root: Path, variables: dict[str, str]
) -> Iterator[Running]:
    """A proxy from its first answer on; its output goes into the job's folder."""
    log = job.folder / "output"
    with log.open("w") as output:
        began = time.monotonic()
        process = subprocess.Popen(command, cwd=root, env=variables, stdout=output, stderr=output)
    try:
        while not answers(job.port):
            if process.poll() is not None or time.monotonic() - began > START_SECONDS:
                raise BenchError(f"it did not start: {log.read_text()[-300:].strip()}")
            time.sleep(POLL_SECONDS)
        yield Running(job.port, process.pid, time.monotonic() - began)
    finally:
        end_at_once(process)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass
class Stage:
    """Raw replicas, a controller that lists them, and the proxies in front of them."""

    programs: dict[str, str]
    replicas: Replicas
    controller_url: str
    folder: Path
    _stack: ExitStack
    _running: dict[str, Running] = field(default_factory=dict)
    _failed: set[str] = field(default_factory=set)

    def running(self, proxy: Proxy) -> Running:
        """The proxy's one process on this stage, started when it is first asked for."""
        if proxy.name in self._failed:
            raise BenchError("it did not start before")
        if proxy.name not in self._running:
            self._failed.add(proxy.name)
            self._running[proxy.name] = self._stack.enter_context(self.fresh(proxy))
            self._failed.remove(proxy.name)
        return self._running[proxy.name]

    @contextmanager
    def fresh(self, proxy: Proxy) -> Iterator[Running]:
        """A process of its own."""
        folder = self.folder / f"{proxy.name}-{time.monotonic_ns()}"
        folder.mkdir()
        job = Job(free_port(), self.replicas, self.controller_url, folder)
        command = on_proxy_core(proxy.command(self.programs[proxy.name], job))
        with started(command, job, proxy.root, proxy.environment()) as running:
            yield running


@contextmanager
def stage(programs: dict[str, str], replica_count: int, folder: Path) -> Iterator[Stage]:
    with ExitStack() as stack:
        fleet = stack.enter_context(replicas(replica_count))
        controller = stack.enter_context(FakeController(fleet.urls))
        yield Stage(programs, fleet, controller.url, folder, stack)
