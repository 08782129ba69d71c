"""Services on one machine, run by the command line as a user runs it, and steady requests to them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import aiohttp

from controller_client.embedded.store import Store
from lb.services import rows

ROOT = Path(__file__).parents[2]
REPLICA = Path(__file__).with_name("file_replica.py")
MARK = "EMBEDDED_TEST_MARK"
NAME = "svc"
PATIENCE_SECONDS = 60.0
RATE = 20
AT_ONCE = 7

Found = TypeVar("Found")


def until(condition: Callable[[], Found], what: object = "") -> Found:
    """Wait for what no event tells: what is in files, tables and the system's list of processes."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(0.02)
    return found


class Machine:
    """A state folder, the commands on it, and all processes that they start.

    Replicas are ``file_replica.py``, which does what the files in `gates` say.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.gates = folder / "gates"
        self.gates.mkdir()
        self._mark = str(uuid.uuid4())

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "lb", *words, "--state-dir", str(self.state)]

    def environ(self) -> dict[str, str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("SKYSERVE_LB_")}
        return clean | {"PYTHONPATH": str(ROOT), "COLUMNS": "120", MARK: self._mark}

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*words),
            cwd=self.folder,
            env=self.environ(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str, code: int = 0) -> tuple[str, list[str]]:
        """What a command printed, and the lines on its stderr."""
        with self.start(*words) as process:
            output, errors = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == code, errors
        return output, errors.splitlines()

    def write(self, name: str = "service.yaml", *, run: str = "", **values: Any) -> Path:
        """A task file; `text` is what its replicas answer, other values go into its service."""
        text = values.pop("text", "one")
        run = run or f"'{sys.executable}' '{REPLICA}' '{self.gates}' {{port}}"
        task = {
            "service": {"readiness_probe": {"path": "/health"}, **values},
            "envs": {"TEXT": text},
            "setup": f"until [ -e '{self.gates}/setup-'$SKYPILOT_SERVE_REPLICA_ID ]; do sleep 0.02; done",
            "run": run,
        }
        path = self.folder / name
        path.write_text(json.dumps(task))  # which is YAML too
        return path

    def up(self, path: Path, *words: str) -> str:
        output, _ = self.run("up", str(path), "--name", NAME, *words)
        return output.strip()

    def open(self, *names: str) -> None:
        for name in names:
            (self.gates / name).touch()

    def let(self, *replica_ids: int, end: bool = True) -> None:
        """Let these replicas become ready, and end when they are told to."""
        for replica_id in replica_ids:
            self.open(f"setup-{replica_id}", f"ready-{replica_id}")
            if end:
                self.open(f"end-{replica_id}")

    def service(self) -> dict[str, Any]:
        """As `status --json` has it."""
        store = Store(self.state)
        try:
            (row,) = rows(store, self.state, NAME)
        finally:
            store.close()
        return row

    def states(self, service: dict[str, Any] | None = None) -> dict[int, tuple[int, str]]:
        """Version and status of each replica, by its id."""
        rows = (service or self.service())["replicas"]
        return {each["id"]: (each["version"], each["status"]) for each in rows}

    def wait_for(self, states: dict[int, tuple[int, str]]) -> dict[str, Any]:
        """Wait until the replicas are in these states, and no others are there."""
        service = until(
            lambda: row if self.states(row := self.service()) == states else None, self.service
        )
        assert service is not None
        return service

    def tables(self) -> tuple[list[str], list[list[str]]]:
        """The row of the service and those of its replicas, as `status` prints them."""
        output, _ = self.run("status", NAME)
        services, replicas = output.split("\nService Replicas\n")
        headings, row = [re.split(r" {2,}", line.strip()) for line in services.splitlines()[1:3]]
        assert headings == ["NAME", "VERSION", "UPTIME", "STATUS", "REPLICAS", "ENDPOINT"]
        lines = [re.split(r" {2,}", line.strip()) for line in replicas.splitlines() if line]
        assert lines[0] == ["SERVICE_NAME", "ID", "VERSION", "ENDPOINT", "LAUNCHED", "STATUS"]
        return row, lines[1:]

    def processes(self) -> dict[int, str]:
        """The command lines of all that was started here, by process id."""
        lines = {int(each.name): self._line(each) for each in Path("/proc").glob("[0-9]*")}
        return {pid: line for pid, line in lines.items() if line is not None}

    def _line(self, process: Path) -> str | None:
        try:
            if f"{MARK}={self._mark}".encode() in (process / "environ").read_bytes():
                return (process / "cmdline").read_bytes().decode().replace("\0", " ")
        except OSError:
            pass  # it has ended meanwhile, or is not ours to read
        return None

    def controllers(self) -> set[int]:
        return {
            pid
            for pid, line in self.processes().items()
            if "-m controller_client.embedded " in line
        }


@contextmanager
def machine(folder: Path) -> Iterator[Machine]:
    """A machine; whatever is left of it at the end is killed, and is a fault."""
    made = Machine(folder)
    try:
        yield made
        if (made.state / "services" / NAME).exists():
            made.open("end-all")
            made.run("down", NAME)
        until(lambda: not made.processes(), made.processes)
    finally:
        while left := made.processes():
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


Scenario = Callable[[Machine], None]


@contextmanager
def at_once(scenarios: Sequence[Scenario], folder: Path) -> Iterator[dict[Scenario, Future[None]]]:
    """Play scenarios beside each other, each on a machine of its own: they wait more than they work."""

    def play(scenario: Scenario) -> None:
        (folder / scenario.__name__).mkdir()
        with machine(folder / scenario.__name__) as made:
            scenario(made)

    with ThreadPoolExecutor(AT_ONCE) as threads:
        yield {scenario: threads.submit(play, scenario) for scenario in scenarios}


class Load:
    """`with Load(url) as load: ...`: requests at a steady rate, whatever becomes of them."""

    def __init__(self, url: str) -> None:
        self.answers: list[tuple[float, str]] = []  # when it was sent, and what came of it
        self._url = url
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._send()))

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join(PATIENCE_SECONDS)

    def outcomes(self, since: float = 0.0) -> Counter[str]:
        """How many requests had which outcome: `200` and the replica's text, or what went wrong."""
        return Counter(outcome for sent, outcome in list(self.answers) if sent >= since)

    def wait_for(self, count: int = RATE) -> Counter[str]:
        """The outcomes of the next requests, so many of them, that are sent from now on."""
        now = time.monotonic()
        return until(lambda: found if (found := self.outcomes(now)).total() >= count else None)

    async def _send(self) -> None:
        limit = aiohttp.ClientTimeout(total=30)
        requests = set()
        # A connection a request, for POSTs: aiohttp then sends none again by itself.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=limit) as session:
            while not self._over.is_set():
                requests.add(asyncio.ensure_future(self._request(session)))
                await asyncio.sleep(1 / RATE)
            await asyncio.gather(*requests)

    async def _request(self, session: aiohttp.ClientSession) -> None:
        sent = time.monotonic()
        try:
            async with session.post(self._url, data=b"{}") as answer:
                text = (await answer.text()).split()[0] if answer.status == 200 else ""
                outcome = f"{answer.status} {text}".strip()
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            outcome = type(error).__name__
        self.answers.append((sent, outcome))
