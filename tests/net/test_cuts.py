"""However the network cuts what it brings, the same bytes come out: every cut, with no sockets between."""

from __future__ import annotations

import asyncio
import gc
import os
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from controller_client.protocol import ReadyReplica
from lb.app import Balancer
from lb.logs import Log
from lb.server import ClientConnection
from lb.settings import load
from lb.upstream import UpstreamConnection

REQUESTS = [
    b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /b HTTP/1.1\r\nHost: x\r\nContent-Length: 6\r\n\r\n\r\n\r\nhi",
    b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n\r\n\r\n0\r\nT: 1\r\n\r\n",
    b"POST /d HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
]
ANSWERS = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n\r\n\r\nhi",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n\r\n\r\n\r\n3\r\nabc\r\n0\r\nT: 1\r\n\r\n",
    b"HTTP/1.1 103 Early\r\nLink: a\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nz",
    b"HTTP/1.1 204 None\r\nA: b\r\n\r\n",
    # Lines that end without a CR, which replicas are allowed.
    b"HTTP/1.1 200 OK\nContent-Length: 6\n\n\r\n\r\nhi",
]


class Wire(asyncio.Transport):
    """A transport that keeps what is written, on a descriptor on which nothing ever comes."""

    def __init__(self, descriptor: int) -> None:
        super().__init__({"peername": ("10.0.0.9", 1), "socket": self})
        self._descriptor = descriptor
        self.family = None
        self.written = b""

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: Any) -> None:
        self.written += data

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def setsockopt(self, *option: Any) -> None:
        pass

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


@pytest.fixture
def quiet_descriptor() -> Iterator[int]:
    reading, writing = os.pipe()
    yield reading
    os.close(reading)
    os.close(writing)


class Bench:
    """One client connection and one replica connection of a balancer that is not started."""

    def __init__(self, descriptor: int) -> None:
        settings = load({"controller_url": "http://x", "port": "0", "access_log": "off"}, {})
        self.balancer = Balancer(settings, Log(log_format="json", level="error"))
        change = self.balancer.plane.table.apply([ReadyReplica("http://10.0.0.1", None)], 0.0)
        pool = self.balancer.plane.pools.open(change.added[0])
        self.pool, self.to_replica = pool, Wire(descriptor)
        self.upstream = UpstreamConnection(pool)
        self.upstream.connection_made(self.to_replica)
        pool._open.add(self.upstream)
        pool.keep(self.upstream)
        self.client = ClientConnection(self.balancer.plane.server)
        self.to_client = Wire(descriptor)
        self.client.connection_made(self.to_client)

    def exchange(self, request: list[bytes], answer: list[bytes]) -> tuple[bytes, bytes]:
        """What the replica and the client are sent, without the request id, which is made anew."""
        for piece in request:
            self.client.data_received(piece)
        for piece in answer:
            self.upstream.data_received(piece)
        assert not self.balancer.plane.proxy.running
        assert self.pool.idle == 1, "no cut costs the replica's connection"
        sent = without_id(self.to_replica.written), without_id(self.to_client.written)
        self.to_replica.written = self.to_client.written = b""
        return sent


def without_id(data: bytes) -> bytes:
    return b"\r\n".join(x for x in data.split(b"\r\n") if not x.startswith(b"X-Request-Id"))


def framed(data: bytes) -> bytes:
    """A message with its chunks put together: where they are cut is not told on."""
    head, _, body = data.partition(b"\r\n\r\n")
    if b"Transfer-Encoding: chunked" not in head:
        return data
    content = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        content += rest[: int(size, 16)]
        body = rest[int(size, 16) + 2 :]
    return head + b"|" + content


@pytest.mark.anyio
@pytest.mark.parametrize("request_", REQUESTS, ids=["get", "length", "chunks", "empty"])
async def test_a_request_cut_anywhere(request_: bytes, quiet_descriptor: int) -> None:
    bench = Bench(quiet_descriptor)
    whole, _ = bench.exchange([request_], [ANSWERS[0]])
    for cut in range(1, len(request_)):
        pieces = [request_[:cut], request_[cut:]]
        sent, _ = bench.exchange(pieces, [ANSWERS[0]])
        assert framed(sent) == framed(whole), f"cut at {cut}: {pieces}"


@pytest.mark.anyio
async def test_requests_sent_ahead_cut_anywhere(quiet_descriptor: int) -> None:
    bench = Bench(quiet_descriptor)
    ahead = REQUESTS[1] + REQUESTS[0]
    for cut in range(1, len(ahead)):
        bench.client.data_received(ahead[:cut])
        bench.client.data_received(ahead[cut:])
        for _ in range(2):
            bench.upstream.data_received(ANSWERS[0])
        assert bench.to_client.written.count(b"HTTP/1.1 200 OK") == 2, f"cut at {cut}"
        bench.to_client.written = b""


@pytest.mark.anyio
async def test_an_upgrade_cut_anywhere(quiet_descriptor: int) -> None:
    """What comes right behind its head is the other protocol's, a line end too."""
    head = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: other\r\n\r\n"
    early = b"\r\n\r\nearly"
    for cut in range(1, len(head + early)):
        bench = Bench(quiet_descriptor)
        bench.client.data_received((head + early)[:cut])
        bench.client.data_received((head + early)[cut:])
        bench.upstream.data_received(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: other\r\n\r\n")
        assert bench.to_replica.written.endswith(b"\r\n\r\n" + early), f"cut at {cut}"


@pytest.mark.anyio
@pytest.mark.parametrize("request_", REQUESTS, ids=["get", "length", "chunks", "empty"])
@pytest.mark.parametrize("answer", [b"", ANSWERS[1][:-20], *ANSWERS[:2]])
async def test_a_lost_connection_is_freed_at_once(
    request_: bytes, answer: bytes, quiet_descriptor: int
) -> None:
    """Not at the next collection of garbage, which may be long after many clients have come."""
    bench = Bench(quiet_descriptor)
    bench.client.data_received(request_)
    bench.upstream.data_received(answer)
    bench.client.connection_lost(None)
    bench.upstream.connection_lost(None)
    left = weakref.ref(bench.client), weakref.ref(bench.upstream)
    gc.disable()
    try:
        del bench.client, bench.upstream
        assert [each() for each in left] == [None, None]
    finally:
        gc.enable()


@pytest.mark.anyio
@pytest.mark.parametrize("answer", ANSWERS, ids=["length", "chunks", "interim", "none", "no CR"])
async def test_an_answer_cut_anywhere(answer: bytes, quiet_descriptor: int) -> None:
    bench = Bench(quiet_descriptor)
    _, whole = bench.exchange([REQUESTS[0]], [answer])
    for cut in range(1, len(answer)):
        pieces = [answer[:cut], answer[cut:]]
        _, sent = bench.exchange([REQUESTS[0]], pieces)
        assert framed(sent) == framed(whole), f"cut at {cut}: {pieces}"
        assert bench.balancer.metrics.numbers.connections["created"] == 0
