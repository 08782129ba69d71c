"""An admin port without a balancer, which tells whatever a test gives it to tell."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from types import TracebackType

from lb.admin import Admin
from lb.history import STEP_SECONDS, WINDOW_SECONDS, Tick
from lb.metrics import DURATION, FIRST_BYTE
from lb.snapshot import ReplicaFacts, Snapshot

PATIENCE_SECONDS = 20.0


def address_of(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


class CannedAdmin:
    """`with CannedAdmin(snapshot) as url: ...`; `snapshot` may be changed while it runs.

    `most_buffered`: the most bytes that waited for one connection to take them.
    """

    def __init__(self, snapshot: Snapshot, port: int = 0) -> None:
        self.snapshot = snapshot
        self.port = port
        self.most_buffered = 0
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    async def _run(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        self._admin = admin = Admin(
            not_ready=lambda: None,
            refresh=_nothing,
            snapshot=self._tell,
            render_metrics=bytes,
            drain=lambda: None,
        )
        ((_, self.port),) = await admin.start("127.0.0.1", self.port)
        self._started.set()
        await self._end.wait()
        await admin.stop()

    def _tell(self) -> Snapshot:
        server = self._admin._runner.server
        assert server is not None
        for connection in server.connections:
            if connection.transport is not None:
                size = connection.transport.get_write_buffer_size()
                self.most_buffered = max(self.most_buffered, size)
        return self.snapshot

    def __enter__(self) -> str:
        self._thread.start()
        assert self._started.wait(PATIENCE_SECONDS)
        return f"http://127.0.0.1:{self.port}"

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(PATIENCE_SECONDS)


def replica(name: str, **facts: object) -> ReplicaFacts:
    """One that serves and has nothing to do, but for these facts."""
    plain: ReplicaFacts = {
        "name": name,
        "url": f"http://{name}",
        "state": "serving",
        "since": 0.0,
        "accelerator": None,
        "ejected": False,
        "ejected_until": None,
        "failures": 0,
        "in_flight": 0,
        "idle_connections": 0,
        "active_connections": 0,
        "finished": 0,
        "failed": 0,
    }
    return {**plain, **facts}  # type: ignore[typeddict-item]


def snapshot(*replicas: ReplicaFacts, **facts: object) -> Snapshot:
    """A balancer that is ready and has seen nothing, but for these facts."""
    now = time.time()
    plain: Snapshot = {
        "about": {
            "version": "0.1.0",
            "service": "chat",
            "policy": "least_load",
            "sticky": None,
            "mode": "standalone",
            "started": now - 3700,
        },
        "now": now,
        "processes": 1,
        "not_ready": None,
        "draining": False,
        "in_flight": 0,
        "oldest_seconds": 0.0,
        "sync": {
            "interval": 20.0,
            "grace_period": 30.0,
            "result": "ok",
            "cause": "",
            "last_answer": now - 4,
            "failing_since": None,
            "empty_since": None,
        },
        "replicas": list(replicas),
        "edges": {"first_byte": list(FIRST_BYTE), "duration": list(DURATION)},
        "ticks": [],
        "events": [],
    }
    return {**plain, **facts}  # type: ignore[typeddict-item]


def tick(at: int, **facts: object) -> Tick:
    """A step in which nothing happened, but for these facts."""
    plain: Tick = {
        "at": at,
        "seconds": float(STEP_SECONDS),
        "outcomes": {},
        "first_byte": [0] * (len(FIRST_BYTE) + 1),
        "duration": [0] * (len(DURATION) + 1),
        "in_flight": 0,
    }
    return {**plain, **facts}  # type: ignore[typeddict-item]


def busy_ticks(now: float) -> list[Tick]:
    """15 minutes of waves, with a burst of failures and a pause in them."""
    steps = WINDOW_SECONDS // STEP_SECONDS
    newest = int(now // STEP_SECONDS) * STEP_SECONDS
    ticks = []
    for index in range(steps):
        wave = 0.5 + 0.5 * math.sin(index / 14) + 0.2 * math.sin(index * 1.7)
        count = 0 if 60 <= index < 66 else round(40 + 120 * max(0.0, wave))
        failed = count // 6 if 100 <= index < 108 else 0
        spread = [0, 0, 1, 2, 9, 30, 34, 16, 6, 2, 0, 0, 0, 0, 0, 0]
        first_byte = [round(count * share / 100) for share in spread]
        ticks.append(
            tick(
                newest - (steps - 1 - index) * STEP_SECONDS,
                outcomes={
                    "ok": count - failed,
                    "client_error": count // 40,
                    "upstream_error": failed,
                    "lb_error": 0,
                    "client_closed": count // 50,
                },
                first_byte=first_byte,
                duration=[0, 0, 0, 0, *first_byte[2:12], 0, 0, 0, 0],
                in_flight=round(count / 5),
            )
        )
    return ticks


async def _nothing() -> None:
    """What is asked of it is canned."""
