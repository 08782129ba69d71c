"""The service under test: real controller, balancers and sampler as processes, told what to do."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from controller_client.embedded.places import free_port

HERE = Path(__file__).parent
NAME = "svc"

Event = dict[str, Any]
Counts = dict[str, Any]


class Process:
    """A helper process and the events that it says. It ends when ``stop`` lets go of its stdin."""

    def __init__(self, command: list[str], environ: dict[str, str], log: Path) -> None:
        self.log = log
        self.events: list[Event] = []
        self._changed = threading.Condition()
        self._log: IO[str] = log.open("w")
        self.process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.events.append(json.loads(line))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def named(self, event: str, since: float = 0.0) -> list[Event]:
        with self._changed:
            return [e for e in self.events if e.get("event") == event and e.get("t", 0) >= since]

    def wait_for(self, happened: Callable[[], Any], what: str, timeout: float = 60.0) -> Any:
        """Wait until ``happened()`` is true; looked at after each event and twice a second."""
        deadline = time.monotonic() + timeout
        while True:
            with self._changed:
                result = happened()
                if result:
                    return result
                left = deadline - time.monotonic()
                if left <= 0 or self.process.poll() is not None:
                    tail = "".join(self.log.open().readlines()[-40:])
                    state = self.process.poll()
                    raise AssertionError(f"no {what} in {timeout} s (exit {state})\n{tail}")
                self._changed.wait(min(left, 0.5))

    def wait_event(self, event: str, since: float = 0.0, timeout: float = 60.0) -> Event:
        found = self.wait_for(lambda: self.named(event, since), event, timeout)
        first: Event = found[0]
        return first

    def wait_until(self, moment: float) -> None:
        """Wait for a time of day (unix seconds) while the process lives."""
        while (left := moment - time.time()) > 0 and self.process.poll() is None:
            with self._changed:
                self._changed.wait(left)

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()


class Service:
    """SkyPilot's real controller with ``replicas`` local replicas, in a HOME of its own.

    ``scale`` divides SkyPilot's intervals and the replicas' ``health_seconds``.
    """

    def __init__(
        self,
        python: Path,
        home: Path,
        *,
        scale: float = 4.0,
        health_seconds: float = 8.0,
        hook: str = "off",
        replica_policy: dict[str, Any] | None = None,
    ) -> None:
        self.python = python
        self.home = home
        self.scale = scale
        self.sync_interval = 20.0 / scale
        self.version = 1
        self.updated_at = 0.0
        self._policy = replica_policy or {}
        self._health_seconds = health_seconds / scale
        self._hook = hook
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    @contextlib.contextmanager
    def run(self, replicas: int = 2) -> Iterator[Service]:
        self.home.mkdir(parents=True, exist_ok=True)
        task = self.home / "task.yaml"
        task.write_text(self._yaml(replicas))
        self.controller = self._start(
            "controller_process.py",
            *("--service-name", NAME, "--task-yaml", str(task), "--port", str(self.port)),
            *("--health-seconds", str(self._health_seconds), "--scale", str(self.scale)),
        )
        try:
            self._folder = Path(self.controller.wait_event("configured")["folder"])
            self.wait_listed(replicas)
            yield self
        finally:
            self.controller.stop()

    def wait_listed(self, count: int, timeout: float = 90.0) -> list[str]:
        """Wait until the controller lists ``count`` replicas; asks after each prober pass."""
        asked_after = -1
        urls: list[str] = []

        def listed() -> bool:
            nonlocal asked_after, urls
            passes = len(self.controller.named("recomputed"))
            if passes == asked_after:
                return False
            with contextlib.suppress(OSError):  # not listening yet
                urls = self.sync()
                asked_after = passes
            return len(urls) == count

        self.controller.wait_for(listed, f"list of {count} replicas", timeout)
        return urls

    def update_in_the_gap(
        self, last_sync: Callable[[], float], replicas: int, mode: str = "rolling"
    ) -> float:
        """Make the update where the stock controller's gap will meet a sync.

        That is shortly before a sync which comes before the end of the running prober pass.
        ``last_sync`` tells when the balancer synced last. The seconds until it was answered.
        """
        lead, pass_seconds = 4.0 / self.scale, 10.0 / self.scale + self._health_seconds

        def moment() -> float:
            """When to update; 0 if the next sync would miss the gap."""
            next_sync = last_sync() + self.sync_interval
            pass_ends = self.controller.named("recomputed")[-1]["t"] + pass_seconds
            in_time = time.time() < next_sync - lead / 2
            return next_sync - lead if in_time and next_sync < pass_ends - 0.5 else 0.0

        self.controller.wait_until(self.controller.wait_for(moment, "sync in the gap"))
        return self.update(replicas, mode)

    def sync(self) -> list[str]:
        """The list that a balancer would get now."""
        body = {"request_aggregator": {"timestamps": []}}
        answer = self._post("/controller/load_balancer_sync", body)
        return list(answer["replica_info"])

    def update(self, replicas: int, mode: str = "rolling") -> float:
        """A count-only update as ``sky serve update`` makes it; the seconds until it answered."""
        self.version += 1
        (self._folder / f"task_v{self.version}.yaml").write_text(self._yaml(replicas))
        self.updated_at, started = time.time(), time.monotonic()
        self._post("/controller/update_service", {"version": self.version, "mode": mode})
        return time.monotonic() - started

    def replica_counts(self) -> dict[str, Counts]:
        """What each replica counted, by URL, ended ones included."""
        urls = [event["url"] for event in self.controller.named("launched")]
        return {url: self._counts_of(url) for url in urls}

    def _counts_of(self, url: str) -> Counts:
        try:
            return dict(get_json(f"{url}/stats"))
        except OSError:  # it has ended, or is about to
            return dict(self.controller.wait_for(lambda: self._last_counts(url), f"end of {url}"))

    def _last_counts(self, url: str) -> Counts | None:
        ended = self.controller.named("terminated")
        return next((event["counts"] for event in ended if event["url"] == url), None)

    def last_listed(self, url: str) -> float:
        """When the controller last named the replica in an answer (unix seconds)."""
        return max(e["t"] for e in self.controller.named("sync") if url in e["urls"])

    @contextlib.contextmanager
    def stock_balancer(self) -> Iterator[Balancer]:
        port = free_port()
        process = self._start(
            "stock_balancer.py",
            *("--controller-url", self.url, "--port", str(port), "--scale", str(self.scale)),
        )
        try:
            process.wait_for(
                lambda: any(e["urls"] for e in process.named("synced")), "first list of stock"
            )
            yield Balancer(process, f"http://127.0.0.1:{port}")
        finally:
            process.stop()

    @contextlib.contextmanager
    def our_balancer(self, *options: str) -> Iterator[Balancer]:
        command = [
            *(sys.executable, str(HERE / "our_balancer.py")),
            *("--controller-url", self.url, "--port", "0", "--admin-port", "0"),
            *("--sync-interval", f"{self.sync_interval}s", "--log-format", "json"),
            *options,
        ]
        process = Process(command, dict(os.environ), self.home / "our_balancer.log")
        try:
            started = process.wait_event("server.started")
            admin = f"http://{started['admin']}"
            process.wait_for(lambda: _answers(f"{admin}/readyz"), "readiness of ours")
            yield Balancer(process, f"http://{started['address']}", admin)
        finally:
            process.stop()

    @contextlib.contextmanager
    def sampler(self) -> Iterator[Process]:
        process = self._start("sampler.py", "--interval", str(0.5 / self.scale))
        try:
            process.wait_event("sampled")
            yield process
        finally:
            process.stop()

    def _start(self, script: str, *arguments: str) -> Process:
        environ = {
            **os.environ,
            "HOME": str(self.home),
            "SKYSERVE_LB_HOOK": self._hook,
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
        }
        command = [str(self.python), str(HERE / script), *arguments]
        return Process(command, environ, self.home / f"{script}.log")

    def _yaml(self, replicas: int) -> str:
        policy = self._policy or {"min_replicas": replicas}
        service = {
            "readiness_probe": {"path": "/health", "initial_delay_seconds": 60},
            "replica_policy": policy,
            "ports": 8080,
        }
        # An update reuses replicas only if the task says "no file mounts", as SkyPilot dumps it.
        return json.dumps({"service": service, "resources": {"ports": 8080}, "file_mounts": {}})

    def _post(self, path: str, body: object) -> Any:
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)


class Balancer:
    """A running balancer: its process, data URL and (ours) admin URL."""

    def __init__(self, process: Process, url: str, admin: str = "") -> None:
        self.process = process
        self.url = url
        self.admin = admin


def get_text(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def get_json(url: str) -> Any:
    return json.loads(get_text(url))


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
