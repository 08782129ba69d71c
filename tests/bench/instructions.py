"""The guard of the hot path: how many instructions a GET, a POST and a streamed chunk take.

    python -m tests.bench.instructions            compare with the committed figures
    python -m tests.bench.instructions --update   measure and commit to new ones

The real process runs under valgrind's callgrind, which counts instructions, not time: a busy
machine changes nothing. Client and replica are plain sockets of this process that take turns with
it, so that each unit is the same sequence of reads and writes. Of two sizes of a run the difference
is taken, and what is no part of a unit falls out.

The figures belong to one build of Python, the one that CI runs; on another nothing is compared:
CPython 3.10 took 60 % more, 3.12 and 3.13 15 to 20 % more, Debian's build of 3.11 9 % less. The tolerance of 5 % covers, on that build: 1 % from run to run (when the
collector of cycles comes, and timers), and up to 3.4 % when glibc takes other copy routines for a
processor without AVX2. Other versions of aiohttp and uvloop can go beyond it (uvloop 0.21: 6 % for
a chunk), and are named when they do.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import selectors
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import click

from controller_client.embedded.places import free_port
from controller_client.testing import FakeController
from tests.skypilot.environment import ROOT
from tests.system.process import environment

FIGURES = Path(__file__).with_name("instructions.json")
TOLERANCE = 0.05
WARM = 300  # units before any is counted: the interpreter adapts its code to what it sees
SMALL = 20  # units
LARGE = {"GET": 420, "POST": 420, "chunk": 2020}  # a chunk is cheap: one timer more is seen
IDLE_SECONDS = 2.0
PATIENCE_SECONDS = 60.0
Size = TypeVar("Size", int, float)

HEADERS = (
    "Host: 127.0.0.1:8080\r\nAccept: application/json\r\nAccept-Encoding: gzip, deflate\r\n"
    "User-Agent: OpenAI/Python 1.99.0\r\nAuthorization: Bearer sk-0123456789abcdef0123456789abcdef\r\n"
)
GET = f"GET /v1/models HTTP/1.1\r\n{HEADERS}\r\n".encode()
POST = (
    f"POST /v1/chat/completions HTTP/1.1\r\n{HEADERS}Content-Type: application/json\r\n"
    f"Content-Length: 8192\r\n\r\n{'x' * 8192}"
).encode()


def answer(size: int) -> bytes:
    head = (
        "HTTP/1.1 200 OK\r\ndate: Thu, 01 Jan 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
        f"content-length: {size}\r\ncontent-type: application/json\r\n\r\n"
    )
    return head.encode() + b"x" * size


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Thu, 01 Jan 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
EVENT = b"data: " + b"x" * 192 + b"\n\n"
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
LAST_CHUNK = b"0\r\n\r\n"


class Ends:
    """The client and the replica, on both sides of the balancer. They take turns with it."""

    def __init__(self, port: int, listener: socket.socket) -> None:
        self.client = socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._listener = listener

    def ask(self, request: bytes) -> socket.socket:
        """Send a request; the replica's connection on which all of it has come."""
        self.client.sendall(request)
        received: dict[socket.socket, bytes] = {}
        while True:
            ready = self._selector.select(PATIENCE_SECONDS)
            if not ready:
                raise TimeoutError("the request did not reach the replica")
            for key, _ in ready:
                if key.fileobj is self._listener:
                    made, _ = self._listener.accept()
                    made.settimeout(PATIENCE_SECONDS)
                    self._selector.register(made, selectors.EVENT_READ)
                    continue
                upstream = key.fileobj
                assert isinstance(upstream, socket.socket)
                data = upstream.recv(65536)
                if not data:
                    self._selector.unregister(upstream)
                    upstream.close()
                received[upstream] = received.get(upstream, b"") + data
                head, mark, body = received[upstream].partition(b"\r\n\r\n")
                length = re.search(rb"(?i)content-length: (\d+)", head)
                if mark and len(body) >= (int(length[1]) if length else 0):
                    return upstream

    def read_until(self, end: bytes) -> None:
        data = b""
        while not data.endswith(end):
            part = self.client.recv(65536)
            if not part:
                raise ConnectionError("the balancer closed the client's connection")
            data += part

    def exchange(self, request: bytes, response: bytes) -> None:
        self.ask(request).sendall(response)
        self.read_until(response[-16:])

    def get(self, count: int) -> None:
        for _ in range(count):
            self.exchange(GET, answer(96))

    def post(self, count: int) -> None:
        for _ in range(count):
            self.exchange(POST, answer(2048))

    def chunk(self, count: int) -> None:
        upstream = self.ask(POST)
        upstream.sendall(STREAM_HEAD)
        self.read_until(b"\r\n\r\n")
        for _ in range(count):
            upstream.sendall(CHUNK)
            self.read_until(CHUNK[-16:])
        upstream.sendall(LAST_CHUNK)
        self.read_until(LAST_CHUNK)


@dataclass(frozen=True)
class Count:
    instructions: int
    seconds: float


class Counted:
    """A balancer under callgrind."""

    def __init__(self, process: subprocess.Popen[bytes], dumps: Path) -> None:
        self._process = process
        self._dumps = dumps
        self._taken = 0

    def control(self, *words: str) -> None:
        done = subprocess.run(
            ["callgrind_control", *words, str(self._process.pid)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise click.ClickException(f"callgrind_control: {done.stderr.strip()}")

    def count(self, work: Callable[[Size], None], size: Size) -> Count:
        """What it took while `work` was done."""
        self.control("--zero")
        began = time.monotonic()
        work(size)
        seconds = time.monotonic() - began
        self.control("--dump")
        self._taken += 1
        text = (self._dumps / f"out.{self._taken}").read_text()
        total = re.search(r"^totals: (\d+)", text, re.MULTILINE)
        assert total is not None
        return Count(int(total[1]), seconds)


@contextmanager
def counted(controller_url: str, port: int, folder: Path) -> Iterator[Counted]:
    command = [
        *("valgrind", "--tool=callgrind", "--instr-atstart=no", "--quiet"),
        *(f"--callgrind-out-file={folder}/out", sys.executable, "-m", "lb", "serve"),
        *("--controller-url", controller_url, "--host", "127.0.0.1", "--port", str(port)),
        *("--admin-port", "0", "--access-log", "off", "--upstream-keepalive", "1h"),
        # Its own pace, not that of the machine: no sync comes between.
        *("--sync-interval", "1h", "--connect-timeout", "30s", "--header-timeout", "60s"),
    ]
    log = folder / "log"
    variables = environment() | {"PYTHONHASHSEED": "0"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=output, stderr=output)
    try:
        give_up = time.monotonic() + 2 * PATIENCE_SECONDS
        while b"replica.added" not in log.read_bytes():
            if process.poll() is not None or time.monotonic() > give_up:
                raise click.ClickException(f"it did not start: {log.read_text()[-500:]}")
            time.sleep(0.05)
        yield Counted(process, folder)
    finally:
        process.kill()
        process.wait()


def measure() -> dict[str, int]:
    figures = {}
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        port = free_port()
        with FakeController([url]) as controller, counted(controller.url, port, Path(name)) as run:
            ends = Ends(port, listener)
            kinds = {"GET": ends.get, "POST": ends.post, "chunk": ends.chunk}
            for work in kinds.values():
                work(WARM)
            run.control("--instr=on")
            run.count(time.sleep, 0.1)  # it translates its code anew
            idle = run.count(time.sleep, IDLE_SECONDS)
            for kind, work in kinds.items():
                small, large = run.count(work, SMALL), run.count(work, LARGE[kind])
                # The clock ticks while it works, and how often depends on the machine.
                ticks = idle.instructions / idle.seconds * (large.seconds - small.seconds)
                units = large.instructions - small.instructions - ticks
                figures[kind] = round(units / (LARGE[kind] - SMALL))
    return figures


def build() -> str:
    """What makes one Python other than the next, to the instruction."""
    how = sysconfig.get_config_var("CONFIG_ARGS") or ""
    flags = [flag for flag in ("--enable-optimizations", "--with-lto") if flag in how]
    return " ".join([platform.python_version(), platform.python_compiler(), *flags])


def conditions() -> dict[str, str]:
    versions = {name: importlib.metadata.version(name) for name in ("aiohttp", "uvloop")}
    return {"python": build(), **versions}


def hold(measured: dict[str, int], here: dict[str, str]) -> None:
    text = json.dumps({"conditions": here, "instructions": measured}, indent=2)
    FIGURES.write_text(text + "\n")
    click.echo(text)


def compare(measured: dict[str, int], committed: dict[str, int]) -> list[str]:
    """What became dearer by more than the tolerance."""
    dearer = []
    for kind, count in measured.items():
        change = count / committed[kind] - 1
        click.echo(f"{kind:>5}: {count:>9,} instructions, {change:+.1%}")
        if change > TOLERANCE:
            dearer.append(kind)
        elif change < -TOLERANCE:
            click.echo("       cheaper than the tolerance explains: hold it with --update")
    return dearer


@click.command(help="Count the instructions of a GET, a POST and a streamed chunk.")
@click.option("--update", is_flag=True, help="Take what is measured as the new figures.")
def main(update: bool) -> None:
    if shutil.which("valgrind") is None:
        raise click.ClickException("valgrind is missing: install it")
    here = conditions()
    if update:
        hold(measure(), here)
        return
    committed = json.loads(FIGURES.read_text())
    then = committed["conditions"]
    if here["python"] != then["python"]:
        click.echo(
            f"skipped: the figures are those of Python {then['python']}, this is {here['python']}"
        )
        return
    if dearer := compare(measure(), committed["instructions"]):
        changed = [
            f"{name} {then[name]} -> {here[name]}" for name in here if here[name] != then[name]
        ]
        raise click.ClickException(
            f"{', '.join(dearer)}: more than {TOLERANCE:.0%} dearer"
            + (f" (changed since: {', '.join(changed)})" if changed else "")
            + "; find out why, or accept it with --update"
        )


if __name__ == "__main__":
    main()
