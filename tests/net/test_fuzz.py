"""Random requests and answers, valid and broken, through the whole path on raw sockets.

SKYSERVE_FUZZ_CASES sets the number of cases (CI: 10000). Each case has a random generator of its
own, so that SKYSERVE_TEST_SEED=<seed> repeats it whatever the others do at that time.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from controller_client.testing import (
    Exchange,
    ReplicaFactory,
    RequestRecord,
    ScriptedReplica,
)
from tests.net.conftest import StartBalancer
from tests.net.harness import RunningBalancer, chunked

CASES = int(os.environ.get("SKYSERVE_FUZZ_CASES", "400"))
SEED = os.environ.get("SKYSERVE_TEST_SEED") or str(random.SystemRandom().getrandbits(32))
CLIENTS = 32
PATIENCE_SECONDS = 20.0

# What an intermediary may do to a message, it does here by the grammar: each generated header is
# either to arrive as it is, or (a hop-by-hop one) not at all.
METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "PROPFIND", "QUERY", "M-SEARCH"]
STATUSES = [200, 201, 206, 299, 301, 400, 404, 429, 500, 503, 599]
TOKEN = "!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
TEXT = bytes([9, *range(32, 127), *range(128, 256)])
VISIBLE = "".join(map(chr, range(33, 127)))
HOPS = [
    [b"TE: trailers"],
    [b"Keep-Alive: timeout=5, max=10"],
    [b"Proxy-Connection: keep-alive"],
    [b"Trailer: X-Sum"],
    [b"Upgrade: h2c"],
    [b"Connection: keep-alive"],
    [b"connection: X-Drop ,,keep-alive", b"x-drop: 1", b"X-Drop: 2"],
]

Lines = list[bytes]


# --- grammar ------------------------------------------------------------------------------------


def some(rng: random.Random, alphabet: Any, most: int, least: int = 0) -> Any:
    chosen = rng.choices(alphabet, k=rng.randint(least, most))
    return bytes(chosen) if isinstance(alphabet, bytes) else "".join(chosen)


def some_headers(rng: random.Random) -> tuple[Lines, Lines]:
    """Header lines as sent, with hop-by-hop ones among them, and those that are to arrive."""
    sent: Lines = []
    arrives: Lines = []
    for _ in range(rng.choice([0, 1, 3, 8])):
        name = b"X-" + some(rng, TOKEN, 20, 1).encode()
        if rng.random() < 0.3:
            name = rng.choice([b"Cookie", b"set-cookie", b"VIA", b"Authorization", b"Accept"])
        value = some(rng, TEXT, rng.choice([0, 10, 100, 5000])).strip(b" \t")
        before, after = rng.choice([b" ", b"", b"\t "]), rng.choice([b"", b"", b" \t"])
        sent.append(name + b":" + before + value + after)
        arrives.append(name + b": " + value)
        if rng.random() < 0.2:
            sent.extend(rng.choice(HOPS))
    return sent, arrives


def some_body(rng: random.Random) -> bytes:
    size = rng.choice([0, 1, 10, 1000, 70_000]) if rng.random() < 0.97 else 400_000
    return rng.randbytes(rng.randint(0, size))


def in_chunks(rng: random.Random, body: bytes) -> bytes:
    """The body in chunks of random sizes, with what a chunked body may hold besides."""
    if rng.random() < 0.3:
        return chunked(body) if body else chunked()
    coded, rest = b"", body
    while rest:
        piece, rest = cut_at(rest, rng.randint(1, max(1, len(body) // 3 + 1)))
        size = rng.choice([b"%x", b"%X", b"000%x"]) % len(piece)
        extension = rng.choice([b"", b"", b";a", b";a=b", b';a="b;c"'])
        coded += size + extension + b"\r\n" + piece + b"\r\n"
    trailers = rng.choice([b"", b"", b"X-Sum: 1\r\n", b"X-Sum: 1\r\nx-more:2\r\n"])
    return coded + rng.choice([b"0", b"000", b"0;last"]) + b"\r\n" + trailers + b"\r\n"


def cut_at(data: bytes, position: int) -> tuple[bytes, bytes]:
    return data[:position], data[position:]


@dataclass
class Reply:
    """What a replica sends, and what is to arrive of it."""

    data: bytes
    close: bool
    line: bytes
    lines: Lines
    body: bytes
    interims: int
    body_at: int  # where in `data` the body begins
    self_delimiting: bool


@dataclass
class Query:
    """What a client sends, what is to arrive of it, and what the replica answers."""

    key: bytes
    data: bytes
    method: str
    is_http10: bool
    last: bool  # the connection ends after it
    line: bytes
    lines: Lines
    body: bytes
    reply: Reply
    arrived: list[RequestRecord] = field(default_factory=list)
    arrived_bodies: list[bytes] = field(default_factory=list)


def some_reply(rng: random.Random, method: str) -> Reply:
    status, reason = rng.choice(STATUSES), some(rng, TEXT, 20).strip(b" \t")
    sent, arrives = some_headers(rng)
    body, close = some_body(rng), False
    framing = rng.choice(["length", "chunked", "chunked", "close", "none"])
    coded = body
    if method == "HEAD" or framing == "none":
        status = status if method == "HEAD" else rng.choice([204, 304])
        coded = body = b""
        if rng.random() < 0.3 and status != 204:
            sent.append(b"Content-Length: 1234")
            arrives.append(sent[-1])
    elif framing == "length":
        for lines in (sent, arrives):
            lines.insert(0, b"content-length: %d" % len(body))
    elif framing == "chunked":
        sent.append(b"Transfer-Encoding: chunked")
        coded = in_chunks(rng, body)
    else:
        close = True
    version = b"HTTP/1.1"
    line = version + b" %d " % status + reason
    interims = rng.choice([0, 0, 0, 1, 2])
    start = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" * interims
    if rng.random() < 0.1:
        start = b"HTTP/1.1 100 Continue\r\n\r\n" + start
    start += b"\r\n".join([line, *sent, b"", b""])
    bounded = framing in ("length", "chunked") and method != "HEAD"
    return Reply(start + coded, close, line, arrives, body, interims, len(start), bounded)


def some_query(rng: random.Random, key: str, *, last: bool, plain: bool = False) -> Query:
    """A valid request; a `plain` one is HTTP/1.1 and no HEAD, so that any answer can be read."""
    method = rng.choice(METHODS) if plain or rng.random() < 0.9 else "HEAD"
    is_http10 = last and not plain and rng.random() < 0.1
    target = "/" + some(rng, VISIBLE, rng.choice([0, 5, 50, 3000]))
    sent, arrives = some_headers(rng)
    case = [b"X-Case: " + key.encode()]
    host = [b"Host: example.com:80"]
    sent, arrives = [*sent, *host, *case], [*arrives, *host, *case]
    body, coded = b"", b""
    framing = rng.choice(["none", "length", "chunked"])
    if is_http10 and framing == "chunked":
        framing = "length"
    if framing != "none":
        body = coded = some_body(rng)
        if rng.random() < 0.15:
            sent.append(b"Expect: 100-continue")
    if framing == "length":
        arrives.append(b"Content-Length: %d" % len(body))
        sent.append(arrives[-1])
    elif framing == "chunked":
        sent.append(b"transfer-encoding: chunked")
        arrives.append(b"Transfer-Encoding: chunked")  # behind all that we add
        coded = in_chunks(rng, body)
    ends = is_http10 and not any(b"keep-alive" in text and b"nection" in text for text in sent)
    if last and not is_http10 and rng.random() < 0.3:
        sent.append(b"Connection: close")
        ends = True
    line = f"{method} {target}".encode()
    start = rng.choice([b"", b"", b"", b"\r\n"])
    head = b"\r\n".join([line + (b" HTTP/1.0" if is_http10 else b" HTTP/1.1"), *sent, b"", b""])
    return Query(
        key=key.encode(),
        data=start + head + coded,
        method=method,
        is_http10=is_http10,
        last=ends,
        line=line + b" HTTP/1.1",
        lines=arrives,
        body=body,
        reply=some_reply(rng, method),
    )


def broken(rng: random.Random, data: bytes) -> bytes:
    """The data after one to three accidents, which mostly happen to the head."""
    for _ in range(rng.choice([1, 1, 2, 3])):
        end = data.find(b"\r\n\r\n") + 4 if rng.random() < 0.8 else len(data)
        at = rng.randrange(max(1, end))
        size = rng.choice([1, 1, 2, 10, 100])
        before, after = cut_at(data, at)
        kind = rng.randrange(8)
        if kind == 0:
            data = before + bytes([after[0] ^ 1 << rng.randrange(8)]) + after[1:] if after else data
        elif kind == 1:
            data = before + after[size:]
        elif kind == 2:
            data = before + after[:size] * 2 + after[size:]
        elif kind == 3:
            data = before
        elif kind == 4:
            data = before + rng.randbytes(size) + after
        elif kind == 5:
            data = (
                before
                + rng.choice([b"\r", b"\n", b"\0", b" ", b"\t", b":", b"\r\n", b"\x0b"])
                + after
            )
        elif kind == 6:
            data = data.replace(
                *rng.choice([(b"\r\n", b"\n"), (b": ", b" : "), (b"\r\n", b"\r\n ")]), 1
            )
        else:
            line = rng.choice(
                [
                    b"Content-Length: 5",
                    b"Transfer-Encoding: chunked",
                    b"Transfer-Encoding: x",
                    b"Host: y",
                ]
            )
            first, _, rest = data.partition(b"\r\n")
            data = first + b"\r\n" + line + b"\r\n" + rest
    return data


def in_pieces(rng: random.Random, data: bytes) -> Iterator[tuple[bytes, float]]:
    """The data in random pieces, and how long to wait after each."""
    cuts = sorted(rng.randint(0, len(data)) for _ in range(rng.choice([0, 0, 1, 3, 8])))
    for start, end in itertools.pairwise([0, *cuts, len(data)]):
        if start < end:
            yield data[start:end], rng.choice([0.0, 0.0, 0.001, 0.005])


# --- both ends ----------------------------------------------------------------------------------

STATUS_LINE = re.compile(rb"HTTP/1\.1 [1-9][0-9]{2} [^\r\n\0]*")
HEADER_LINE = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+: ?[^\r\n\0]*")


@dataclass
class Received:
    """One answer as a client got it; `whole` is false where the connection ended within it."""

    line: bytes
    lines: Lines
    body: bytes = b""
    whole: bool = False
    interims: int = 0

    @property
    def status(self) -> int:
        return int(self.line.split()[1])

    def value(self, name: bytes) -> bytes | None:
        values = [
            line.partition(b":")[2].strip()
            for line in self.lines
            if line.lower().startswith(name + b":")
        ]
        assert len(values) < 2, f"{name!r} twice"
        return values[0] if values else None


async def read_answer(reader: asyncio.StreamReader, method: str) -> Received | None:
    """The next answer, read by the letter; None where the connection has ended ahead of it."""
    interims = 0
    while True:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except ConnectionError:
            return None
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise AssertionError(f"a head that ends early: {error.partial!r}") from None
            return None
        line, *lines = head[:-4].split(b"\r\n")
        assert STATUS_LINE.fullmatch(line), line
        assert all(map(HEADER_LINE.fullmatch, lines)), lines
        got = Received(line, lines, interims=interims)
        if got.status >= 200:
            break
        interims += got.status != 100
    try:
        await read_body(reader, got, method)
        got.whole = True
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    return got


async def read_body(reader: asyncio.StreamReader, got: Received, method: str) -> None:
    coding, length = got.value(b"transfer-encoding"), got.value(b"content-length")
    if method == "HEAD" or got.status in (204, 304):
        return
    if coding is not None:
        assert (coding, length) == (b"chunked", None)
        while size := int(await reader.readuntil(b"\r\n"), 16):
            got.body += await reader.readexactly(size)
            assert await reader.readexactly(2) == b"\r\n"
        assert await reader.readexactly(2) == b"\r\n"
    elif length is not None:
        got.body = await reader.readexactly(int(length))
    else:
        got.body = await reader.read()


class Fuzz:
    """One balancer before its replicas, and the cases that go through it."""

    def __init__(self, name: str, balancer: RunningBalancer, replicas: list[ScriptedReplica]):
        self.name = name
        self.balancer = balancer
        self.replicas = replicas
        self.queries: dict[bytes, Query] = {}
        self.crashes: list[dict[str, Any]] = []
        balancer.call(
            lambda: balancer.loop.set_exception_handler(lambda _, what: self.crashes.append(what))
        )
        for replica in replicas:
            replica.behave_always(self._reply)

    async def _reply(self, exchange: Exchange) -> None:
        body = b"".join([piece async for piece in exchange.body()])
        query = self.queries.get((exchange.record.values(b"x-case") or [b""])[0])
        if query is None:
            await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            return
        query.arrived.append(exchange.record)
        query.arrived_bodies.append(body)
        rng = random.Random(f"{SEED} reply {query.key!r}")
        for piece, pause in in_pieces(rng, query.reply.data):
            await exchange.send(piece)
            await exchange.wait(pause)
        if query.reply.close:
            exchange.close()

    def run(self, count: int, case: Callable[[random.Random, str], Awaitable[None]]) -> None:
        """Run so many cases, many at a time; the first that fails is named with its seed."""
        numbers = iter(range(count))

        async def client() -> None:
            for number in numbers:
                key = f"{self.name}-{number}"
                try:
                    rng = random.Random(f"{SEED} {key}")
                    await asyncio.wait_for(case(rng, key), PATIENCE_SECONDS)
                except Exception as error:
                    raise AssertionError(
                        f"SKYSERVE_TEST_SEED={SEED}, case {key}: {error!r}"
                    ) from error

        async def clients() -> None:
            await asyncio.gather(*(client() for _ in range(CLIENTS)))

        asyncio.run(clients())

    async def converse(
        self,
        rng: random.Random,
        data: bytes,
        read: Callable[[asyncio.StreamReader], Awaitable[None]],
    ) -> None:
        """Send the data in pieces and read at the same time, as a client must."""
        host, port = self.balancer.address
        reader, writer = await asyncio.open_connection(host, port, limit=2**20)

        async def send() -> None:
            for piece, pause in in_pieces(rng, data):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause)

        sending = asyncio.ensure_future(send())
        try:
            await read(reader)
        finally:
            sending.cancel()
            await asyncio.wait([sending])
            writer.transport.abort()
            if not sending.cancelled():
                # The balancer may end a broken connection while we still send.
                assert isinstance(sending.exception(), (ConnectionError, type(None)))

    def assert_quiet(self) -> None:
        """Nothing is left of all those cases, and nothing has crashed."""
        told = f"SKYSERVE_TEST_SEED={SEED}"
        assert not self.crashes, (told, self.crashes)
        assert not self.balancer.log.named("request.failed"), told
        balancer = self.balancer
        connections = balancer.balancer._pool_connections
        assert balancer.metric("responses_total", code="500") == 0 or self.name != "requests", told
        balancer.wait_for(lambda: not balancer.balancer.plane.proxy.running)
        assert balancer.in_flight() == 0, told
        balancer.wait_for(lambda: not len(balancer.balancer.plane.server))
        balancer.wait_for(lambda: connections()["active"] == 0)
        balancer.wait_for(
            lambda: sum(r.open_connections for r in self.replicas) == connections()["idle"]
        )
        for replica in self.replicas:
            assert not replica.faults, (told, replica.faults[:3])


@pytest.fixture
def start_fuzz(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> Callable[..., Any]:
    @contextmanager
    def start(name: str, **settings: str) -> Iterator[Fuzz]:
        replicas = [replica_factory(f"{name} {number}") for number in range(2)]
        fuzz = Fuzz(name, start_balancer(*replicas, access_log="off", **settings), replicas)
        yield fuzz
        fuzz.assert_quiet()

    return start


# --- what is held -------------------------------------------------------------------------------


@pytest.mark.timeout(900)
def test_valid_requests_and_answers_cross_unharmed(start_fuzz: Callable[..., Any]) -> None:
    with start_fuzz("valid") as fuzz:

        async def case(rng: random.Random, key: str) -> None:
            count = rng.choice([1, 1, 2, 4])
            queries = [
                some_query(rng, f"{key}-{number}", last=number == count - 1)
                for number in range(count)
            ]
            fuzz.queries.update({query.key: query for query in queries})

            async def read(reader: asyncio.StreamReader) -> None:
                for query in queries:
                    check(query, await read_answer(reader, query.method))
                if queries[-1].last:
                    assert await reader.read() == b""

            await fuzz.converse(rng, b"".join(query.data for query in queries), read)
            for query in queries:
                del fuzz.queries[query.key]

        fuzz.run(CASES // 2, case)


def check(query: Query, got: Received | None) -> None:
    """Compare both ends with what was sent."""
    (record,) = query.arrived
    line, *lines = record.raw_head[:-4].split(b"\r\n")
    kept = [text for text in lines if not text.startswith((b"X-Forwarded-", b"X-Request-Id: "))]
    assert line == query.line
    assert kept == query.lines
    assert len(lines) == len(kept) + 4
    assert query.arrived_bodies == [query.body]

    assert got is not None
    assert got.whole
    reply = query.reply
    ours = (b"X-Request-Id: ", b"Transfer-Encoding: chunked", b"Connection: ")
    assert got.line == reply.line
    assert [text for text in got.lines if not text.startswith(ours)] == reply.lines
    assert got.body == reply.body
    assert got.interims == (0 if query.is_http10 else reply.interims)


@pytest.mark.timeout(900)
def test_no_broken_request_does_harm(start_fuzz: Callable[..., Any]) -> None:
    """Whatever comes, what is answered is HTTP, the connection ends, and replicas see valid HTTP only."""
    limits = {"header_timeout": "300ms", "keepalive_timeout": "300ms", "total_timeout": "1s"}
    with start_fuzz("requests", connect_timeout="1s", no_replica_wait="1s", **limits) as fuzz:

        async def case(rng: random.Random, key: str) -> None:
            count = rng.choice([1, 1, 2])
            data = b"".join(
                some_query(rng, f"{key}-{number}", last=False, plain=True).data
                for number in range(count)
            )
            data = broken(rng, data)

            async def read(reader: asyncio.StreamReader) -> None:
                answers = 0
                while (got := await read_answer(reader, "GET")) is not None:
                    answers += 1
                    assert got.whole
                    assert got.status != 500
                    assert answers <= 10
                assert answers or count > 1 or not data.strip(b"\r\n"), "no answer"

            await fuzz.converse(rng, data, read)

        fuzz.run(CASES * 3 // 10, case)


@pytest.mark.timeout(900)
def test_no_broken_answer_does_harm(start_fuzz: Callable[..., Any]) -> None:
    """The client gets an answer that is HTTP, or sees that it was cut."""
    limits = {"total_timeout": "2s", "connect_timeout": "1s", "no_replica_wait": "1s"}
    with start_fuzz("answers", **limits) as fuzz:

        async def case(rng: random.Random, key: str) -> None:
            query = some_query(rng, key, last=False, plain=True)
            reply = query.reply
            truncated = reply.self_delimiting and rng.random() < 0.3
            if truncated:
                reply.data = reply.data[: rng.randint(0, len(reply.data) - 1)]
            else:
                reply.data = broken(rng, reply.data)
            reply.close = True
            fuzz.queries[query.key] = query

            async def read(reader: asyncio.StreamReader) -> None:
                got = await read_answer(reader, query.method)
                if got is None:
                    return
                assert b"load balancer failed" not in got.body
                if truncated and got.whole:
                    assert got.status == 502, "what was cut passes for whole"
                elif truncated:
                    assert reply.body.startswith(got.body)

            await fuzz.converse(rng, query.data, read)
            del fuzz.queries[query.key]

        fuzz.run(CASES * 2 // 10, case)
