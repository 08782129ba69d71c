"""Upgraded connections: a handshake like any request, then bytes both ways until one side ends."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import aiohttp
import anyio
import anyio.to_thread
import pytest
from aiohttp import web

import lb.dataplane
import lb.websocket
from controller_client.testing import (
    Behaviour,
    Exchange,
    FakeController,
    PeerClosedError,
    ReplicaFactory,
    ScriptedReplica,
    answer,
    hold,
    reset,
)
from lb.frames import close_frame
from lb.wire import READ_LIMIT
from tests.net.conftest import StartBalancer
from tests.net.harness import Answer, Closed, RawClient, RunningBalancer, chunked, request

KEY = "dGhlIHNhbXBsZSBub25jZQ=="
ACCEPT = base64.b64encode(
    hashlib.sha1(KEY.encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
)
AWAY = close_frame(1001)
MIB = 1024 * 1024

Talk = Callable[[Exchange], Awaitable[None]]


def handshake(protocol: str = "websocket", target: str = "/v1/realtime") -> bytes:
    return request(
        "GET",
        target,
        {
            "Connection": "keep-alive, Upgrade",
            "Upgrade": protocol,
            "Sec-WebSocket-Key": KEY,
            "Sec-WebSocket-Version": "13",
        },
    )


async def echo(exchange: Exchange) -> None:
    while True:
        await exchange.send(await exchange.receive())


async def silence(exchange: Exchange) -> None:
    await exchange.wait(None)


async def goodbye(exchange: Exchange) -> None:
    """Return, which closes the connection."""


def switch(talk: Talk = echo, *, protocol: bytes = b"websocket", early: bytes = b"") -> Behaviour:
    """Switch protocols, with the first bytes of the new one in the same segment."""
    head = [
        b"HTTP/1.1 101 Switching Protocols",
        b"Upgrade: " + protocol,
        b"Connection: Upgrade",
        b"Sec-WebSocket-Accept: " + ACCEPT,
        b"X-Own: yes",
    ]

    async def behave(exchange: Exchange) -> None:
        await exchange.read_body()
        exchange.close()
        await exchange.send(b"\r\n".join([*head, b"", b""]) + early)
        await talk(exchange)

    return behave


def frame(payload: bytes, *, masked: bool = False, opcode: int = 2) -> bytes:
    """A frame of at most 125 or at least 65,536 bytes; the mask is all zeros."""
    size = len(payload)
    length = bytes([size]) if size < 126 else bytes([127]) + size.to_bytes(8, "big")
    mask = b""
    if masked:
        length, mask = bytes([length[0] | 0x80]) + length[1:], bytes(4)
    return bytes([0x80 | opcode]) + length + mask + payload


def upgraded(client: RawClient, **options: str) -> Answer:
    answered = client.ask(handshake(**options))
    assert answered.status == 101
    return answered


@contextmanager
def sending(client: RawClient, data: bytes) -> Iterator[None]:
    """Send beside what the test does; a peer that ends the connection ends it too."""

    def send() -> None:
        try:
            client.send(data)
        except OSError:
            pass

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    yield
    thread.join(20)
    assert not thread.is_alive()


# --- the handshake, and the bytes behind it ---------------------------------------------------


def test_the_handshake_and_bytes_both_ways(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    """llm-d-router issue 1532."""
    a = replica_factory()
    a.behave(switch())
    balancer = start_balancer(a)
    with balancer.client() as client:
        switched = upgraded(client)
        assert switched.head.startswith(b"HTTP/1.1 101 Switching Protocols\r\n")
        assert switched.values(b"upgrade") == [b"websocket"]
        assert switched.values(b"connection") == [b"Upgrade"]
        assert switched.values(b"sec-websocket-accept") == [ACCEPT]
        assert switched.values(b"x-own") == [b"yes"]
        (seen,) = a.requests
        assert seen.target == b"/v1/realtime"
        assert seen.values(b"connection") == [b"Upgrade"]
        assert seen.values(b"upgrade") == [b"websocket"]
        assert seen.values(b"sec-websocket-key") == [KEY.encode()]
        for message in (frame(b"hello", masked=True), b"\x00", frame(b"", masked=True)):
            client.send(message)
            assert client.read(len(message)) == message

        assert balancer.metric("inflight_requests") == 1
        assert balancer.metric("replica_inflight_requests") == 1
        assert balancer.metric("requests_total") == 0
    (line,) = balancer.log.wait_for("request.finished")
    assert (line["status"], line["outcome"], line["bytes_in"]) == (101, "ok", 18)
    assert line["bytes_out"] == 18
    assert balancer.metric("requests_total", outcome="ok") == 1
    assert balancer.metric("responses_total", code="101", method="GET") == 1
    assert balancer.metric("client_disconnects_total") == 0
    assert balancer.in_flight() == 0


def test_a_frame_of_8_mib_each_way(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    a.behave(switch())
    balancer = start_balancer(a)
    message = frame(os.urandom(8 * MIB), masked=True)
    with balancer.client() as client:
        upgraded(client)
        with sending(client, message):
            assert client.read(len(message)) == message


def test_bytes_that_come_with_the_handshake(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    a.behave(switch(early=b"welcome"))
    balancer = start_balancer(a)
    with balancer.client() as client:
        client.send(handshake() + b"first words")
        assert client.answer().status == 101
        assert client.read(18) == b"welcomefirst words"


def test_bytes_that_come_before_the_answer(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    go = threading.Event()
    a.behave(hold(go, switch()))
    balancer = start_balancer(a)
    with balancer.client() as client:
        client.send(handshake())
        client.send(b"one ")
        a.wait_for(lambda: a.requests)
        client.send(b"two")
        go.set()
        assert client.answer().status == 101
        assert client.read(7) == b"one two"


def test_a_flood_before_the_answer_is_held_back(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    go = threading.Event()
    a.behave(hold(go, switch()))
    balancer = start_balancer(a)
    flood = os.urandom(32 * MIB)
    with balancer.client() as client:
        client.send(handshake())
        with sending(client, flood):
            (connection,) = balancer.call(
                lambda: tuple(balancer.balancer.plane.server._connections)
            )
            balancer.wait_for(lambda: len(connection.after_upgrade or b"") > READ_LIMIT)
            held = balancer.call(lambda: len(connection.after_upgrade or b""))
            time.sleep(0.3)  # in which all of it would be here
            assert balancer.call(lambda: len(connection.after_upgrade or b"")) == held < MIB
            go.set()
            assert client.answer().status == 101
            assert client.read(len(flood)) == flood


def test_a_client_that_leaves_before_the_answer_though_it_is_held_back(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    a.behave(hold(threading.Event()))
    balancer = start_balancer(a)
    with balancer.client() as client:
        client.send(handshake() + bytes(READ_LIMIT * 2))
        a.wait_for(lambda: a.requests)
    a.wait_for(lambda: a.requests[0].peer_closed_at, 2)
    balancer.log.wait_for("request.finished")
    assert balancer.metric("client_disconnects_total", phase="before_head") == 1
    assert balancer.in_flight() == 0


def test_a_handshake_that_is_sent_ahead_with_its_first_bytes(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    a.behave(answer(b"plain", delay=0.1), switch())
    balancer = start_balancer(a)
    with balancer.client() as client:
        client.send(request() + handshake() + b"\x81\x85early")
        assert client.answer().body == b"plain"
        assert client.answer().status == 101
        client.send(b" and late")
        assert client.read(16) == b"\x81\x85early and late"


@pytest.mark.parametrize("protocol", ["SPDY/3.1", "tcp", "WebSocket"])
@pytest.mark.parametrize("name", ["Upgrade", "upgrade", "UPGRADE"])
def test_any_protocol_may_be_switched_to(
    name: str, protocol: str, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    a.behave(switch(protocol=protocol.encode()))
    balancer = start_balancer(a)
    with balancer.client() as client:
        client.send(request(headers={"Connection": name, name: protocol}) + b"\x00\xff\r\n\r\n")
        assert client.answer().values(b"upgrade") == [protocol.encode()]
        client.send(b"GET / HTTP/1.1\r\n\r\n")
        assert client.read(24) == b"\x00\xff\r\n\r\nGET / HTTP/1.1\r\n\r\n"


@pytest.mark.parametrize("protocol", ["websocket", "tcp", "h2c"])
@pytest.mark.parametrize("coding", ["length", "chunked"])
@pytest.mark.parametrize("apart", [False, True])
def test_an_upgrade_with_a_body_is_a_plain_request(
    protocol: str,
    coding: str,
    apart: bool,
    replica_factory: ReplicaFactory,
    start_balancer: StartBalancer,
) -> None:
    """As Java's client sends it (h2c) with every first request; what follows it is HTTP again."""
    a = replica_factory()
    balancer = start_balancer(a)
    headers = {"Connection": "Upgrade", "Upgrade": protocol}
    if coding == "chunked":
        body = chunked(b"some\r\n\r\n", b"thing")
        headers["Transfer-Encoding"] = "chunked"
    else:
        body = b"some\r\n\r\nthing"
        headers["Content-Length"] = str(len(body))
    head = request("POST", "/", headers)
    with balancer.client() as client:
        if apart:
            client.send(head)
            a.wait_for(lambda: a.requests)
            client.send(body)
        else:
            client.send(head + body)
        assert client.answer().status == 200
        assert client.ask(request(target="/next")).status == 200
    assert a.requests[0].body == b"some\r\n\r\nthing"
    assert a.requests[0].body_complete
    assert a.requests[0].values(b"upgrade") == []


@pytest.mark.parametrize("protocol", ["websocket", "tcp", "h2c"])
@pytest.mark.parametrize("coding", ["length", "chunked"])
def test_a_request_that_is_sent_ahead_behind_an_upgrade_with_a_body(
    protocol: str, coding: str, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    """The parser would drop its first line."""
    a = replica_factory()
    balancer = start_balancer(a)
    headers = {"Connection": "Upgrade", "Upgrade": protocol}
    if coding == "chunked":
        first = request("POST", "/", {**headers, "Transfer-Encoding": "chunked"}) + chunked(b"body")
    else:
        first = request("POST", "/", headers, b"body")
    with balancer.client() as client:
        client.send(first + request(target="/ahead"))
        assert client.answer().status == 200
        assert client.answer().status == 200
    assert [seen.target for seen in a.requests] == [b"/", b"/ahead"]


@pytest.mark.parametrize("size", [1, 7, 50])
def test_a_handshake_in_small_pieces(
    size: int, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    a.behave(switch(protocol=b"tcp"))
    balancer = start_balancer(a)
    sent = handshake("tcp") + b"early\r\n\r\nwords"
    with balancer.client() as client:
        client.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(sent), size):
            client.send(sent[start : start + size])
        assert client.answer().status == 101
        assert client.read(14) == b"early\r\n\r\nwords"


def test_h2c_is_no_upgrade_here(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    balancer = start_balancer(a)
    headers = {
        "Connection": "Upgrade, HTTP2-Settings",
        "Upgrade": "h2c",
        "HTTP2-Settings": "AAMAAABkAAQAAP__",
    }
    with balancer.client() as client:
        client.send(request(headers=headers) + request(target="/2"))
        assert (client.answer().status, client.answer().status) == (200, 200)
        assert client.ask(request(target="/3")).status == 200
    assert [seen.target for seen in a.requests] == [b"/", b"/2", b"/3"]
    for name in (b"upgrade", b"connection", b"http2-settings"):
        assert a.requests[0].values(name) == []


# --- a handshake that fails -------------------------------------------------------------------


@pytest.mark.parametrize("status", [200, 403, 426, 503])
def test_a_refused_upgrade_leaves_the_connection_usable(
    status: int, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    a.behave(
        answer(b"no", status=status, headers=[(b"Upgrade", b"websocket")]),
        answer(),
        answer(),
        switch(),
    )
    balancer = start_balancer(a)
    with balancer.client() as client:
        client.send(handshake() + request(target="/ahead"))
        refused = client.answer()
        assert (refused.status, refused.body) == (status, b"no")
        # RFC 9110, section 15.5.22: a 426 says what it wants, and only there it crosses.
        assert refused.values(b"upgrade") == ([b"websocket"] if status == 426 else [])
        assert client.answer().status == 200
        assert client.ask(request(target="/next")).status == 200
        upgraded(client)
        client.send(b"ping")
        assert client.read(4) == b"ping"
    assert [seen.target for seen in a.requests[1:3]] == [b"/ahead", b"/next"]


def test_an_upgrade_is_tried_on_another_replica_while_none_has_switched(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a, b = replica_factory(), replica_factory()
    a.behave_always(reset())
    b.behave_always(switch())
    balancer = start_balancer(a, b)
    for _ in range(4):
        with balancer.client() as client:
            client.send(handshake() + b"early")
            assert client.answer().status == 101
            assert client.read(5) == b"early"
    assert balancer.metric("retries_total") == len(a.requests) >= 1
    assert len(b.requests) == 4


def test_a_replica_that_switches_unasked(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    a.behave(switch(early=b"whatever"))
    balancer = start_balancer(a)
    with balancer.client() as client:
        refused = client.ask(request())
        assert refused.status == 502
        assert "switched protocols unasked" in refused.detail
        assert client.ask(request()).status == 200
    assert len(a.requests) == 2, "an answer was seen: it is not sent again"


# --- pressure, time, and ends -----------------------------------------------------------------


def settled(replica: ScriptedReplica, balancer: RunningBalancer) -> int:
    """How many bytes the replica could send, once it can send no more."""
    sent = -1
    while sent != replica.requests[0].bytes_sent:
        sent = replica.requests[0].bytes_sent
        time.sleep(0.2)  # a stall is that nothing happens
    return sent


def test_a_client_that_does_not_read_stalls_the_replica(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    total = 64 * MIB
    block = os.urandom(MIB)

    async def flood(exchange: Exchange) -> None:
        for _ in range(total // MIB):
            await exchange.send(block)

    a = replica_factory()
    a.behave(switch(flood))
    balancer = start_balancer(a)
    with balancer.client() as client:
        client.send(handshake())
        a.wait_for(lambda: a.requests and a.requests[0].bytes_sent > MIB)
        assert settled(a, balancer) < total * 2 // 3
        (connection,) = balancer.call(lambda: tuple(balancer.balancer.plane.server._connections))
        assert connection.transport is not None
        assert balancer.call(connection.transport.get_write_buffer_size) < MIB
        assert client.answer().status == 101
        assert hashlib.sha256(client.read(total)).digest() == (
            hashlib.sha256(block * (total // MIB)).digest()
        )
        assert client.ended()


@pytest.mark.parametrize("until", ["the balancer reads no more", "the client can send no more"])
def test_a_replica_that_does_not_read_stalls_the_client_and_still_gets_all(
    until: str, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    """What the client sent before it closed arrives, its close frame too, however late it is read."""
    read, done = threading.Event(), threading.Event()
    received = bytearray()

    async def slow(exchange: Exchange) -> None:
        while not read.is_set():
            await asyncio.sleep(0.005)  # Exchange.wait would read
        try:
            while True:
                received.extend(await exchange.receive())
        except PeerClosedError:
            done.set()

    a = replica_factory()
    a.behave(switch(slow))
    balancer = start_balancer(a)
    sent = 0
    block = os.urandom(MIB)
    with balancer.client() as client:
        upgraded(client)
        (connection,) = balancer.call(lambda: tuple(balancer.balancer.plane.server._connections))
        client.sock.settimeout(0.5)
        try:
            while sent < 256 * MIB:
                sent += client.sock.send(block[sent % MIB :][: 64 * 1024])
                if until == "the balancer reads no more" and connection._reading_held:
                    break  # its end comes right behind what it sent
        except TimeoutError:
            pass
        assert sent < 64 * MIB
    time.sleep(1.2)  # longer than two sweeps for clients that have left
    read.set()
    assert done.wait(10)
    assert len(received) == sent
    assert received == (block * (sent // MIB + 1))[:sent]
    balancer.log.wait_for("request.finished")
    assert balancer.in_flight() == 0


def test_no_limit_of_time_ends_a_silent_connection(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    a.behave(switch())
    balancer = start_balancer(
        a,
        total_timeout="1s",
        no_replica_wait="1s",
        header_timeout="1s",
        keepalive_timeout="1s",
        stream_idle_timeout="1s",
        upstream_keepalive="1s",
    )
    with balancer.client() as client:
        upgraded(client)
        time.sleep(3)
        client.send(b"still here")
        assert client.read(10) == b"still here"


def test_a_client_that_was_slow_for_a_while_may_be_silent_as_long_as_others(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    """That it has room again begins no limit of silence: a tunnel has none."""
    total = 32 * MIB

    async def flood(exchange: Exchange) -> None:
        await exchange.send(bytes(total))
        await echo(exchange)

    a = replica_factory()
    a.behave(switch(flood, protocol=b"other"))
    balancer = start_balancer(a, stream_idle_timeout="1s")
    with balancer.client() as client:
        client.send(handshake("other"))
        (connection,) = balancer.call(lambda: tuple(balancer.balancer.plane.server._connections))
        balancer.wait_for(lambda: connection.full)
        assert client.answer().status == 101
        assert len(client.read(total)) == total
        time.sleep(2)
        client.send(b"still here")
        assert client.read(10) == b"still here"


def test_the_client_ends_it(replica_factory: ReplicaFactory, start_balancer: StartBalancer) -> None:
    a = replica_factory()
    a.behave(switch(silence))
    balancer = start_balancer(a)
    with balancer.client() as client:
        upgraded(client)
    a.wait_for(lambda: a.requests[0].peer_closed_at, 1)
    balancer.log.wait_for("request.finished")
    assert balancer.in_flight() == 0
    assert balancer.metric("requests_total", outcome="ok") == 1


def test_the_replica_ends_it_and_its_close_code_arrives(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    bye = close_frame(4001)
    a.behave(switch(goodbye, early=frame(b"last words") + bye))
    balancer = start_balancer(a)
    with balancer.client() as client:
        assert client.ask(handshake()).status == 101
        assert client.read(16) == frame(b"last words") + bye
        assert client.ended()
    balancer.log.wait_for("request.finished")
    assert balancer.in_flight() == 0


def test_a_client_that_is_sending_gets_the_close_code_all_the_same(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    """Closing a socket on which bytes still come would reset it, and with that the goodbye."""
    a = replica_factory()
    bye = close_frame(1009)
    a.behave(switch(goodbye, early=bye))
    balancer = start_balancer(a)
    with balancer.client() as client:
        client.send(handshake())
        balancer.log.wait_for("request.finished")
        for _ in range(50):
            client.send(bytes(10_000))
            time.sleep(0.002)
        assert client.answer().status == 101
        assert client.read(4) == bye
        assert client.ended()
    assert balancer.in_flight() == 0


def test_a_replica_that_dies_ends_it(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    a.behave(switch(silence))
    balancer = start_balancer(a)
    with balancer.client() as client:
        upgraded(client)
        a.reset_all()
        assert client.ended()
    balancer.log.wait_for("request.finished")
    assert balancer.in_flight() == 0


def test_a_running_connection_outlives_its_replica_in_the_list(
    replica_factory: ReplicaFactory,
    start_balancer: StartBalancer,
    fake_controller: FakeController,
) -> None:
    a, b = replica_factory(), replica_factory()
    a.behave(switch())
    balancer = start_balancer(a, grace_period="0")
    with balancer.client() as client:
        upgraded(client)
        fake_controller.set_ready([b.url])
        balancer.log.wait_for("replica.removed")
        fake_controller.wait_for_sync()
        client.send(b"still here")
        assert client.read(10) == b"still here"
    balancer.log.wait_for("replica.retired")


# --- drain ------------------------------------------------------------------------------------


@pytest.fixture
def short_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drain without the second in which new requests are still taken."""
    monkeypatch.setattr(lb.dataplane, "LAST_CALL_SECONDS", 0.1)


@pytest.mark.usefixtures("short_last_call")
def test_a_drain_ends_websockets_with_1001(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    seen = bytearray()

    async def obey(exchange: Exchange) -> None:
        while len(seen) < 8:
            seen.extend(await exchange.receive())
        await exchange.send(close_frame(1001))

    a = replica_factory()
    a.behave(switch(obey))
    balancer = start_balancer(a)
    with balancer.client() as client:
        upgraded(client)
        balancer.call(balancer.balancer.drain)
        assert client.read(4) == AWAY
        client.send(close_frame(1001, mask=b"abcd"))
        assert client.ended()
    balancer.log.wait_for("drain.finished")
    mask = seen[2:6]
    assert seen[:2] == b"\x88\x82"
    assert bytes(byte ^ key for byte, key in zip(seen[6:], mask, strict=False)) == b"\x03\xe9"
    assert len(seen) == 8, "the client's own close frame came after ours"


@pytest.mark.usefixtures("short_last_call")
def test_a_drain_waits_for_the_end_of_a_frame(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    rest = threading.Event()
    whole = frame(b"x" * 70_000)

    async def in_two_parts(exchange: Exchange) -> None:
        await exchange.send(whole[:40_000])
        await exchange.wait_for(rest)
        await exchange.send(whole[40_000:] + frame(b"one too many"))
        await exchange.wait(None)

    a.behave(switch(in_two_parts))
    balancer = start_balancer(a)
    with balancer.client() as client:
        upgraded(client)
        assert client.read(40_000) == whole[:40_000]
        balancer.call(balancer.balancer.drain)
        balancer.log.wait_for("drain.started")
        rest.set()
        assert client.read(30_010) == whole[40_000:]
        assert client.read(4) == AWAY
    balancer.log.wait_for("drain.finished")


@pytest.mark.usefixtures("short_last_call")
def test_a_drain_leaves_a_close_of_their_own_alone(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    reply = threading.Event()

    async def slow_to_answer(exchange: Exchange) -> None:
        bye = await exchange.receive()
        await exchange.wait_for(reply)
        await exchange.send(bye)

    a = replica_factory()
    a.behave(switch(slow_to_answer))
    balancer = start_balancer(a)
    with balancer.client() as client:
        upgraded(client)
        client.send(close_frame(1000, mask=b"abcd"))
        a.wait_for(lambda: a.requests)
        client.sock.settimeout(20)
        balancer.wait_for(
            lambda: all(
                connection.frames is not None and connection.frames.over
                for connection in balancer.balancer.plane.server._connections
            )
        )
        balancer.call(balancer.balancer.drain)
        assert client.read(4) == AWAY, "the replica had said nothing yet"
        reply.set()
        assert client.ended()


@pytest.mark.usefixtures("short_last_call")
def test_a_drain_gives_both_sides_time_but_not_for_ever(
    replica_factory: ReplicaFactory,
    start_balancer: StartBalancer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lb.websocket, "GOODBYE_SECONDS", 0.3)
    a = replica_factory()
    a.behave(switch(silence))
    balancer = start_balancer(a)
    with balancer.client() as client:
        upgraded(client)
        balancer.call(balancer.balancer.drain)
        assert client.read(4) == AWAY
        assert client.ended()
    a.wait_for(lambda: a.requests[0].peer_closed_at, 2)
    balancer.log.wait_for("drain.finished")


def test_a_websocket_that_opens_while_we_drain(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    a.behave(switch(goodbye))
    balancer = start_balancer(a)
    with balancer.client() as client:
        balancer.call(balancer.balancer.drain)
        assert client.ask(handshake()).status == 101
        assert client.read(4) == AWAY


@pytest.mark.usefixtures("short_last_call")
def test_a_drain_lets_other_protocols_run_until_its_time_is_over(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    a.behave(switch(protocol=b"tcp"))
    balancer = start_balancer(a, drain_timeout="1s")
    with balancer.client() as client:
        upgraded(client, protocol="tcp")
        balancer.call(balancer.balancer.drain)
        balancer.wait_for(lambda: balancer.balancer.plane.server.draining)
        time.sleep(0.3)  # past the last call
        client.send(b"still here")
        assert client.read(10) == b"still here"
        with pytest.raises(Closed):
            client.read(1)
    balancer.log.wait_for("drain.forced")


# --- a real client and a real server ----------------------------------------------------------


async def _serve(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.AppRunner:
    app = web.Application()
    app.router.add_get("/ws", handler)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner


def _url(runner: web.AppRunner) -> str:
    return "http://{}:{}".format(*runner.addresses[0][:2])


@pytest.mark.anyio
@pytest.mark.parametrize("compress", [0, 15])
async def test_aiohttps_own_client_and_server(
    compress: int, fake_controller: FakeController
) -> None:
    codes: list[int | None] = []

    async def talk(message: web.Request) -> web.WebSocketResponse:
        ws = web.WebSocketResponse(max_msg_size=0, protocols=("realtime",))
        await ws.prepare(message)
        async for item in ws:
            if item.data == "leave":
                await ws.close(code=4004, message=b"as told")
            elif item.type == aiohttp.WSMsgType.TEXT:
                await ws.send_str(item.data[::-1])
            else:
                await ws.send_bytes(item.data)
        codes.append(ws.close_code)
        return ws

    runner = await _serve(talk)
    try:
        fake_controller.set_ready([_url(runner)])
        with RunningBalancer(fake_controller.url) as balancer:
            await anyio.to_thread.run_sync(balancer.wait_for_replicas, 1)
            url = "http://{}:{}/ws".format(*balancer.address)
            async with (
                aiohttp.ClientSession() as session,
                session.ws_connect(
                    url, compress=compress, max_msg_size=0, protocols=("realtime",)
                ) as ws,
            ):
                assert ws.protocol == "realtime"
                assert ws.compress == compress
                await ws.send_str("abc")
                assert await ws.receive_str() == "cba"
                big = os.urandom(8 * MIB)
                await ws.send_bytes(big)
                assert await ws.receive_bytes() == big
                await ws.ping()
                await ws.send_str("after the ping")
                assert await ws.receive_str() == "gnip eht retfa"
                await ws.close(code=4321, message=b"enough")
                async with session.ws_connect(url) as ws:
                    await ws.send_str("leave")
                    last = await ws.receive()
                    assert (last.type, last.data) == (aiohttp.WSMsgType.CLOSE, 4004)
                    assert last.extra == "as told"
            await anyio.to_thread.run_sync(balancer.log.wait_for, "request.finished", 2)
            assert balancer.in_flight() == 0
    finally:
        await runner.cleanup()
    assert codes[0] == 4321


@pytest.mark.anyio
@pytest.mark.usefixtures("short_last_call")
async def test_a_drain_as_aiohttps_own_client_and_server_see_it(
    fake_controller: FakeController,
) -> None:
    codes: list[int | None] = []

    async def chatter(message: web.Request) -> web.WebSocketResponse:
        ws = web.WebSocketResponse()
        await ws.prepare(message)

        async def talk() -> None:
            try:
                while True:
                    await ws.send_str("x" * 1000)
                    await anyio.sleep(0.001)
            except ConnectionError:
                pass

        talking = asyncio.ensure_future(talk())
        async for _ in ws:
            pass
        talking.cancel()
        codes.append(ws.close_code)
        return ws

    runner = await _serve(chatter)
    try:
        fake_controller.set_ready([_url(runner)])
        with RunningBalancer(fake_controller.url) as balancer:
            await anyio.to_thread.run_sync(balancer.wait_for_replicas, 1)
            url = "http://{}:{}/ws".format(*balancer.address)
            async with aiohttp.ClientSession() as session, session.ws_connect(url) as ws:
                for _ in range(20):
                    assert await ws.receive_str() == "x" * 1000
                balancer.loop.call_soon_threadsafe(balancer.balancer.drain)
                async for item in ws:
                    assert item.data == "x" * 1000
            assert ws.close_code == 1001
            await anyio.to_thread.run_sync(balancer.log.wait_for, "drain.finished")
    finally:
        await runner.cleanup()
    assert codes == [1001]


def test_a_hundred_tunnels_leave_nothing_behind(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    a.behave_always(switch())
    balancer = start_balancer(a)
    clients = [balancer.client() for _ in range(100)]
    for number, client in enumerate(clients):
        upgraded(client)
        client.send(b"%03d" % number)
    assert balancer.metric("inflight_requests") == 100
    for number, client in enumerate(clients):
        assert client.read(3) == b"%03d" % number
        if number % 2:
            client.sock.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
            )  # RST instead of FIN
        client.sock.close()
    balancer.log.wait_for("request.finished", 100)
    assert balancer.in_flight() == 0
    assert balancer.metric("requests_total", outcome="ok") == 100
    balancer.wait_for(lambda: balancer.balancer._pool_connections() == {"idle": 0, "active": 0})
    assert balancer.metric("upstream_errors_total") == 0
