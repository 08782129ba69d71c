"""A balancer in a thread of its own, on real sockets, and a client that hides nothing."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, TypeVar

import uvloop

from lb.app import Balancer
from lb.logs import Log
from lb.settings import load

Found = TypeVar("Found")
PATIENCE_SECONDS = 20.0


class LogLines(io.TextIOBase):
    """The log as a list of events; waiting for one is waiting on a condition."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._written = threading.Condition()

    def write(self, text: str) -> int:
        with self._written:
            self.events += [json.loads(line) for line in text.splitlines() if line]
            self._written.notify_all()
        return len(text)

    def named(self, event: str) -> list[dict[str, Any]]:
        return [line for line in list(self.events) if line["event"] == event]

    def wait_for(self, event: str, count: int = 1) -> list[dict[str, Any]]:
        with self._written:
            assert self._written.wait_for(
                lambda: len(self.named(event)) >= count, PATIENCE_SECONDS
            ), f"no {count} x {event} in {self.events}"
        return self.named(event)


class ListOrder(random.Random):
    """Jitter that leaves new replicas in the order of their list, so that a test knows who is first."""

    def random(self) -> float:
        return 0.0

    def uniform(self, a: float, b: float) -> float:
        return a + (b - a) * super().random()


class RunningBalancer:
    """`with RunningBalancer(controller_url, grace_period="0") as balancer: ...`"""

    def __init__(self, controller_url: str, **settings: str) -> None:
        values = {
            "controller_url": controller_url,
            "host": "127.0.0.1",
            "port": "0",
            "sync_interval": "200ms",
            "access_log": "all",
            **settings,
        }
        self.settings = load(values, {})
        self.log = LogLines()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            uvloop.run(self._main())
        except BaseException as error:
            self.error = error
            self.log.write(json.dumps({"event": "died", "error": repr(error)}) + "\n")

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        log = Log(log_format="json", level="debug", stream=self.log)  # type: ignore[arg-type]
        self.balancer = Balancer(self.settings, log)
        self.balancer.plane.table._jitter = ListOrder()
        await self.balancer.run()

    def __enter__(self) -> RunningBalancer:
        self._thread.start()
        with self.log._written:
            self.log._written.wait_for(lambda: self.log.events, PATIENCE_SECONDS)
        if self.error is not None:
            raise self.error
        started = self.log.wait_for("server.started")[0]
        self.address = _address(started["address"])
        self.admin = _address(started["admin"])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: it has drained by itself
            self.loop.call_soon_threadsafe(self.balancer.drain)
            self.loop.call_soon_threadsafe(self.balancer.drain)
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive(), "the balancer did not end"
        if error is None:
            assert self.error is None, self.error
            assert not self.log.named("request.failed"), self.log.named("request.failed")

    # --- looking inside -------------------------------------------------------------------------

    def wait_for(self, look: Callable[[], Found], seconds: float = PATIENCE_SECONDS) -> Found:
        """Look, in the balancer's own loop, until what is seen is true."""
        deadline = time.monotonic() + seconds
        while True:
            found = self.call(look)
            if found or time.monotonic() > deadline:
                assert found, "waited in vain"
                return found
            time.sleep(0.01)

    def call(self, function: Callable[[], Found]) -> Found:
        """Call a function in the balancer's loop."""

        async def run() -> Found:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(PATIENCE_SECONDS)

    def wait_for_replicas(self, count: int) -> None:
        self.wait_for(lambda: len(self.balancer.plane.table.routable()) == count)

    def metric(self, name: str, **labels: str) -> float:
        """One sample; the sum over the labels that are not named."""

        def read() -> float:
            return sum(
                sample.value
                for family in self.balancer.metrics.registry.collect()
                for sample in family.samples
                if sample.name == f"skyserve_lb_{name}"
                and labels.items() <= dict(sample.labels).items()
            )

        return self.call(read)

    def in_flight(self) -> int:
        """Requests in flight, as the balancer and as its replicas count them."""
        return self.call(
            lambda: (
                len(self.balancer.plane.proxy.running)
                + sum(abs(replica.inflight) for replica in self.balancer.plane.table)
            )
        )

    def client(self, **options: Any) -> RawClient:
        return RawClient(self.address, **options)

    def get(self, target: str = "/", **options: Any) -> Answer:
        with self.client(**options) as client:
            return client.ask(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())

    def post(self, body: bytes, target: str = "/", **options: Any) -> Answer:
        head = f"POST {target} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        with self.client(**options) as client:
            return client.ask(head.encode() + body)

    def admin_get(self, path: str) -> Answer:
        with RawClient(self.admin) as client:
            return client.ask(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


class Answer:
    """One answer: the head as it was, the body unframed."""

    def __init__(self, head: bytes, body: bytes, raw_body: bytes) -> None:
        self.head = head
        self.body = body
        self.raw_body = raw_body
        lines = head.split(b"\r\n")
        self.status = int(lines[0].split(b" ")[1])
        self.headers = [tuple(line.split(b": ", 1)) for line in lines[1:] if line]

    def values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key.lower() == name.lower()]

    @property
    def detail(self) -> str:
        detail = json.loads(self.body)["detail"]
        assert isinstance(detail, str)
        return detail

    def __repr__(self) -> str:
        return f"<{self.head!r} {self.body[:200]!r}>"


class Closed(Exception):
    """The connection ended where more was due; `reset` tells whether by RST."""

    def __init__(self, received: bytes, *, reset: bool) -> None:
        super().__init__(received[-200:], reset)
        self.received = received
        self.reset = reset


class RawClient:
    """A TCP connection, and just enough HTTP to know where an answer ends."""

    def __init__(self, address: tuple[str, int], *, timeout: float = PATIENCE_SECONDS) -> None:
        self.sock = socket.create_connection(address, timeout=timeout)
        self._buffer = b""

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.sock.close()

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def ask(self, data: bytes, *, head_only: bool = False) -> Answer:
        self.send(data)
        return self.answer(head_only=head_only)

    def answer(self, *, head_only: bool = False) -> Answer:
        """The next answer, interim ones included. Raises `Closed` if the connection ends in it."""
        head = self.read_until(b"\r\n\r\n")
        answer = Answer(head, b"", b"")
        if head_only or answer.status in (204, 304) or answer.status < 200:
            return answer
        if answer.values(b"transfer-encoding"):
            body, raw = self._chunked()
        elif lengths := answer.values(b"content-length"):
            body = raw = self.read(int(lengths[0]))
        else:
            body = raw = self.rest()
        return Answer(head, body, raw)

    def chunk(self) -> bytes:
        """One chunk of a chunked body; empty for the last."""
        return self._chunk()[0]

    def _chunk(self) -> tuple[bytes, bytes]:
        line = self.read_until(b"\r\n")
        data = self.read(int(line, 16))
        end = self.read(2)
        assert end == b"\r\n", end
        return data, line + data + end

    def _chunked(self) -> tuple[bytes, bytes]:
        body = raw = b""
        while True:
            data, framed = self._chunk()
            body += data
            raw += framed
            if not data:
                return body, raw

    def read_until(self, end: bytes) -> bytes:
        while end not in self._buffer:
            self._more()
        found, _, self._buffer = self._buffer.partition(end)
        return found + end

    def read(self, count: int) -> bytes:
        parts, missing = [], count
        while missing:
            if not self._buffer:
                self._more()
            parts.append(self._buffer[:missing])
            self._buffer = self._buffer[missing:]
            missing = count - sum(map(len, parts))
        return b"".join(parts)

    def rest(self) -> bytes:
        """All that comes until the connection ends."""
        try:
            while True:
                self._more()
        except Closed as closed:
            if closed.reset:
                raise
            self._buffer = b""
            return closed.received

    def ended(self) -> bool:
        """Wait for the end of the connection, expecting no more bytes; true for FIN, false for RST."""
        try:
            data = self.sock.recv(1)
        except ConnectionResetError:
            return False
        assert not self._buffer + data, self._buffer + data
        return True

    def _more(self) -> None:
        try:
            data = self.sock.recv(1 << 20)
        except ConnectionResetError:
            raise Closed(self._buffer, reset=True) from None
        if not data:
            raise Closed(self._buffer, reset=False)
        self._buffer += data


def request(
    method: str = "GET",
    target: str = "/",
    headers: Iterable[tuple[str, str]] | Mapping[str, str] = (),
    body: bytes = b"",
    *,
    host: str = "x",
) -> bytes:
    """A request as bytes, with a Host and, if it has a body, its length."""
    pairs = list(headers.items()) if isinstance(headers, Mapping) else list(headers)
    if body:
        pairs.append(("Content-Length", str(len(body))))
    lines = [
        f"{method} {target} HTTP/1.1",
        f"Host: {host}",
        *(f"{k}: {v}" for k, v in pairs),
        "",
        "",
    ]
    return "\r\n".join(lines).encode("latin-1") + body


def chunked(*pieces: bytes) -> bytes:
    """A chunked body."""
    return b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n"
