"""The fakes, each scripted behaviour as a raw socket sees it, and the plugin as a user runs it."""

import gc
import hashlib
import itertools
import json
import math
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import anyio
import anyio.to_thread
import pytest

from controller_client.protocol import SYNC_PATH, encode_sync
from controller_client.testing import (
    Answer,
    Behaviour,
    Exchange,
    FakeController,
    ReplicaFactory,
    ScriptedReplica,
    answer,
    cut,
    early,
    hang_up,
    hold,
    raw,
    reset,
    stale,
    stall,
    stream,
)

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 1\r\n\r\n"


class Peer:
    """A raw socket that is connected to a fake."""

    def __init__(self, port: int, *, timeout: float = 5.0) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=timeout)

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def read(self, count: int) -> bytes:
        data = b""
        while len(data) < count and (piece := self.sock.recv(count - len(data))):
            data += piece
        return data

    def read_to_end(self) -> bytes:
        return b"".join(iter(lambda: self.sock.recv(65536), b""))

    def close(self) -> None:
        self.sock.close()


Connect = Callable[..., Peer]


@pytest.fixture
def connect() -> Iterator[Connect]:
    with ExitStack() as stack:

        def start(server: FakeController | ScriptedReplica, *, timeout: float = 5.0) -> Peer:
            peer = Peer(server.port, timeout=timeout)
            stack.callback(peer.close)
            return peer

        yield start


@pytest.fixture
def a(replica_factory: ReplicaFactory) -> ScriptedReplica:
    return replica_factory("a")


# A replica that answers


def test_a_replica_answers_with_its_name_on_a_connection_that_stays(
    a: ScriptedReplica, connect: Connect
) -> None:
    assert a.url == f"http://127.0.0.1:{a.port}"
    peer = connect(a)
    for _ in range(3):
        peer.send(GET)
        assert peer.read(len(OK) + 1) == OK + b"a"
    assert (a.connections, a.open_connections, len(a.requests)) == (1, 1, 3)
    assert [request.connection for request in a.requests] == [1, 1, 1]
    assert [request.number_on_connection for request in a.requests] == [1, 2, 3]
    connect(a).send(GET)
    a.wait_for(lambda: len(a.requests) == 4)
    assert (a.connections, a.requests[3].connection) == (2, 2)


def test_pipelined_requests_are_answered_in_order(a: ScriptedReplica, connect: Connect) -> None:
    peer = connect(a)
    a.behave(answer(b"1", headers=()), answer(b"2", headers=(), delay=0.05))
    peer.send(GET + GET + b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n"
    assert peer.read_to_end() == head + b"1" + head + b"2" + OK + b"a"


@pytest.mark.parametrize(
    "head", [b"GET / HTTP/1.1\r\nConnection: x, Close\r\n\r\n", b"GET / HTTP/1.0\r\n\r\n"]
)
def test_a_request_can_ask_for_the_close(a: ScriptedReplica, connect: Connect, head: bytes) -> None:
    peer = connect(a)
    peer.send(head)
    assert peer.read_to_end() == OK + b"a"


def test_a_request_is_kept_byte_for_byte(a: ScriptedReplica, connect: Connect) -> None:
    head = (
        b"PROPFIND //x/../%2f?&&a=%3A HTTP/1.1\r\nhOST: a\r\nX-Two: 1\r\nContent-Length: 7\r\n"
        b"X-Two:\t 2 \r\nx-two: \xe4\r\nEmpty:\r\n\r\n"
    )
    peer = connect(a)
    peer.send(head + b"payload")
    peer.read(len(OK) + 1)
    (request,) = a.requests
    assert request.raw_head == head
    assert (request.method, request.target) == ("PROPFIND", b"//x/../%2f?&&a=%3A")
    assert request.headers == [
        (b"hOST", b"a"),
        (b"X-Two", b"1"),
        (b"Content-Length", b"7"),
        (b"X-Two", b"2"),
        (b"x-two", b"\xe4"),
        (b"Empty", b""),
    ]
    assert request.values(b"X-TWO") == [b"1", b"2", b"\xe4"]
    assert (bytes(request.body), request.body_complete) == (b"payload", True)
    assert request.body_sha256 == hashlib.sha256(b"payload").hexdigest()
    assert a.wait_for(lambda: request.answered_at or 0) >= request.received_at
    assert request.bytes_sent == len(OK) + 1
    assert request.peer_closed_at is None


def test_a_chunked_body_is_taken_out_of_its_chunks(a: ScriptedReplica, connect: Connect) -> None:
    peer = connect(a)
    peer.send(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc")
    a.wait_for(lambda: a.requests and a.requests[0].body == b"abc")
    peer.send(b"\r\n")
    peer.send(b"A;x=y\r\n0123456789\r\n0\r\nTrailer: 1\r\n\r\n" + GET)
    assert peer.read(2 * len(OK) + 2) == (OK + b"a") * 2
    assert bytes(a.requests[0].body) == b"abc0123456789"
    assert a.requests[0].body_length == 13
    assert repr(a.requests[0]) == "<POST b'/' on connection 1>"


def test_of_a_large_body_the_start_is_kept(
    replica_factory: ReplicaFactory, connect: Connect
) -> None:
    a = replica_factory("a", keep_body=10)
    body = bytes(range(256)) * 40_000
    peer = connect(a)
    peer.send(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    assert peer.read(len(OK) + 1) == OK + b"a"
    (request,) = a.requests
    assert bytes(request.body) == body[:10]
    assert request.body_length == len(body)
    assert request.body_sha256 == hashlib.sha256(body).hexdigest()


def test_a_body_that_is_cut_short_is_not_complete(a: ScriptedReplica, connect: Connect) -> None:
    peer = connect(a)
    peer.send(b"POST / HTTP/1.1\r\nContent-Length: 10\r\n\r\nhalf")
    a.wait_for(lambda: a.requests and a.requests[0].body_length == 4)
    peer.close()
    a.wait_for(lambda: a.requests[0].peer_closed_at is not None)
    assert not a.requests[0].body_complete
    assert a.requests[0].answered_at is None


@pytest.mark.parametrize(
    ("data", "requests"),
    [
        (b"junk\r\n\r\n", 0),
        (b"GET / HTTP/2.0\r\n\r\n", 0),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 0),
        (b"GET / HTTP/1.1\r\nSpace : 1\r\n\r\n", 0),
        (b"GET / HTTP/1.1\r\nBare: 1\r2\r\n\r\n", 0),
        (b"GET / HTTP/1.1\r\nBare: 1\n2\r\n\r\n", 0),
        (b"x" * (1024 * 1024 + 1), 0),
        (b"GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\nx", 1),
        (b"GET / HTTP/1.1\r\nContent-Length: +1\r\n\r\nx", 1),
        (b"GET / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 1),
        (b"GET / HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n", 1),
        (b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5 5\r\n", 1),
        (b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nxy\r\n0\r\n\r\n", 1),
    ],
    ids=lambda value: ascii(value[:70]) if isinstance(value, bytes) else "",
)
def test_what_is_no_http_is_a_fault(
    a: ScriptedReplica, connect: Connect, data: bytes, requests: int
) -> None:
    peer = connect(a)
    peer.send(data)
    assert peer.read(17) == b"HTTP/1.1 400 Bad "
    a.wait_for(lambda: a.faults)
    assert (len(a.faults), len(a.requests)) == (1, requests)
    a.faults.clear()


def test_an_idle_connection_is_closed(replica_factory: ReplicaFactory, connect: Connect) -> None:
    a = replica_factory("a", idle_timeout=0.05)
    peer = connect(a)
    peer.send(GET + GET)
    assert peer.read_to_end() == (OK + b"a") * 2
    a.wait_for(lambda: a.open_connections == 0)


# Behaviours


def test_behaviours_are_used_in_order_then_in_turn(a: ScriptedReplica, connect: Connect) -> None:
    a.behave_always(answer(b"3"), answer(b"4"))
    a.behave(answer(b"1"), answer(b"2"))
    peer = connect(a)
    bodies = b""
    for _ in range(6):
        peer.send(GET)
        bodies += peer.read(len(OK) + 1)[-1:]
    assert bodies == b"123434"
    a.behave_always()
    peer.send(GET)
    assert peer.read(len(OK) + 1) == OK + b"a"


def test_answer_takes_status_headers_and_delay(a: ScriptedReplica, connect: Connect) -> None:
    a.behave(answer(b"no", status=503, headers=[(b"Retry-After", b"1")], delay=0.1))
    peer = connect(a)
    started = time.monotonic()
    peer.send(GET)
    expected = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 2\r\n\r\nno"
    assert peer.read(len(expected)) == expected
    assert time.monotonic() - started >= 0.1


def test_an_unknown_status_has_no_reason(a: ScriptedReplica, connect: Connect) -> None:
    a.behave(answer(b"", status=599, headers=()))
    peer = connect(a)
    peer.send(GET)
    assert peer.read(16) == b"HTTP/1.1 599 \r\nC"


def test_answer_to_head_has_no_body(a: ScriptedReplica, connect: Connect) -> None:
    peer = connect(a)
    peer.send(b"HEAD / HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert peer.read_to_end() == OK


def test_raw_sends_exactly_these_bytes(a: ScriptedReplica, connect: Connect) -> None:
    a.behave(raw(b"\0\xff"), raw(b"any", close=True))
    peer = connect(a)
    peer.send(GET)
    assert peer.read(2) == b"\0\xff"
    peer.send(GET)
    assert peer.read_to_end() == b"any"


def test_stall_never_answers_and_sees_the_peer_leave(a: ScriptedReplica, connect: Connect) -> None:
    a.behave(stall())
    peer = connect(a, timeout=0.2)
    peer.send(GET)
    with pytest.raises(TimeoutError):
        peer.read(1)
    left = time.monotonic()
    peer.close()
    a.wait_for(lambda: a.requests[0].peer_closed_at)
    assert left <= (a.requests[0].peer_closed_at or 0) < left + 1
    a.wait_for(lambda: a.open_connections == 0)


@pytest.mark.parametrize(
    "behaviour",
    [
        stall(),
        answer(delay=60),
        hold(threading.Event()),
        stream([], every=60),
        stream([threading.Event()]),
        stream(itertools.repeat(b"x" * 1000)),
        stream(itertools.repeat(b"x"), every=0.01),
    ],
)
def test_a_peer_that_resets_is_seen_whatever_the_replica_does(
    a: ScriptedReplica, connect: Connect, behaviour: Behaviour
) -> None:
    a.behave(behaviour)
    peer = connect(a)
    peer.send(GET)
    a.wait_for(lambda: a.requests)
    peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    peer.close()
    a.wait_for(lambda: a.requests[0].peer_closed_at is not None)


def test_a_peer_that_leaves_after_the_answer_is_seen(a: ScriptedReplica, connect: Connect) -> None:
    peer = connect(a)
    peer.send(GET)
    peer.read(len(OK) + 1)
    assert a.requests[0].peer_closed_at is None
    peer.close()
    a.wait_for(lambda: a.requests[0].peer_closed_at is not None)
    assert a.requests[0].answered_at is not None


def test_reset_sends_rst_and_nothing_else(a: ScriptedReplica, connect: Connect) -> None:
    a.behave(reset())
    peer = connect(a)
    peer.send(GET)
    with pytest.raises(ConnectionResetError):
        peer.read(1)
    assert len(a.requests) == 1


def test_hang_up_sends_fin_and_nothing_else(a: ScriptedReplica, connect: Connect) -> None:
    a.behave(hang_up())
    peer = connect(a)
    peer.send(b"POST / HTTP/1.1\r\nContent-Length: 4\r\n\r\nbody")
    assert peer.read_to_end() == b""
    assert bytes(a.requests[0].body) == b"body"


@pytest.mark.parametrize("how", ["fin", "rst"])
def test_stale_ends_reused_connections_alone(
    a: ScriptedReplica, connect: Connect, how: str
) -> None:
    a.behave_always(stale(how))  # type: ignore[arg-type]
    for _ in range(2):
        peer = connect(a)
        peer.send(GET)
        assert peer.read(len(OK) + 1) == OK + b"a"
        peer.send(GET)
        if how == "fin":
            assert peer.read_to_end() == b""
        else:
            with pytest.raises(ConnectionResetError):
                peer.read(1)
    assert [request.number_on_connection for request in a.requests] == [1, 2, 1, 2]


@pytest.mark.parametrize("how", ["fin", "rst"])
def test_cut_ends_in_the_middle_of_the_body(a: ScriptedReplica, connect: Connect, how: str) -> None:
    a.behave(cut(b"12345", declared=100, how=how))  # type: ignore[arg-type]
    expected = OK.replace(b": 1\r", b": 100\r") + b"12345"
    peer = connect(a)
    peer.send(GET)
    assert peer.read(len(expected)) == expected
    if how == "fin":
        assert peer.read_to_end() == b""
    else:
        with pytest.raises(ConnectionResetError):
            peer.read(1)


def test_stream_sends_each_chunk_at_its_time(a: ScriptedReplica, connect: Connect) -> None:
    a.behave(stream([b"one", b"two"], every=0.1))
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
    peer = connect(a)
    peer.send(GET)
    started = time.monotonic()
    assert peer.read(len(head) + 2) == head + b"\r\n"
    assert peer.read(8) == b"3\r\none\r\n"
    assert peer.read(13) == b"3\r\ntwo\r\n0\r\n\r\n"
    assert time.monotonic() - started >= 0.2
    peer.send(GET)
    assert peer.read(len(OK) + 1) == OK + b"a"


def test_stream_waits_where_an_event_stands(a: ScriptedReplica, connect: Connect) -> None:
    event = threading.Event()
    a.behave(stream([b"one", event, b"two"], headers=()))
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    peer = connect(a, timeout=0.2)
    peer.send(GET)
    assert peer.read(len(head) + 8) == head + b"3\r\none\r\n"
    with pytest.raises(TimeoutError):
        peer.read(1)
    event.set()
    assert peer.read(13) == b"3\r\ntwo\r\n0\r\n\r\n"


def test_a_peer_that_does_not_read_stalls_the_replica(a: ScriptedReplica, connect: Connect) -> None:
    a.behave(answer(b"x" * 100_000_000))
    peer = connect(a)
    peer.send(GET)
    a.wait_for(lambda: a.requests and a.requests[0].bytes_sent > 0)
    sent = -1
    while sent != (sent := a.requests[0].bytes_sent):
        time.sleep(0.1)  # that nothing more happens can only be seen by waiting
    assert sent < 50_000_000
    assert a.requests[0].answered_at is None


def test_hold_waits_for_the_event(a: ScriptedReplica, connect: Connect) -> None:
    event = threading.Event()
    a.behave(hold(event), hold(event, then=answer(b"z")))
    peer = connect(a, timeout=0.2)
    peer.send(GET)
    with pytest.raises(TimeoutError):
        peer.read(1)
    event.set()
    assert peer.read(len(OK) + 1) == OK + b"a"
    peer.send(GET)
    assert peer.read(len(OK) + 1) == OK + b"z"


def test_early_answers_before_the_body(a: ScriptedReplica, connect: Connect) -> None:
    a.behave(early(413))
    expected = b"HTTP/1.1 413 "
    peer = connect(a)
    peer.send(b"POST / HTTP/1.1\r\nContent-Length: 100000000\r\n\r\n")
    assert peer.read_to_end().startswith(expected)
    peer.send(b"x" * 10_000_000)
    assert (a.requests[0].body_length, a.requests[0].body_complete) == (0, False)
    assert a.open_connections == 1
    peer.close()
    a.wait_for(lambda: a.open_connections == 0)


def test_early_can_close_on_a_peer_that_still_sends(a: ScriptedReplica, connect: Connect) -> None:
    a.behave(early(401, how="close"))
    peer = connect(a)
    peer.send(b"POST / HTTP/1.1\r\nContent-Length: 100000000\r\n\r\n")
    assert peer.read(12) == b"HTTP/1.1 401"
    a.wait_for(lambda: a.open_connections == 0)
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        peer.send(b"x" * 10_000_000)


def test_a_test_can_write_its_own_behaviour(a: ScriptedReplica, connect: Connect) -> None:
    async def upgrade(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")
        while (data := await exchange.receive()) != b"end":
            await exchange.send(data.upper())
        exchange.reset()

    a.behave(upgrade)
    peer = connect(a)
    peer.send(GET)
    assert peer.read(36) == b"HTTP/1.1 101 Switching Protocols\r\n\r\n"
    peer.send(b"echo")
    assert peer.read(4) == b"ECHO"
    peer.send(b"end")
    with pytest.raises(ConnectionResetError):
        peer.read(1)


def test_a_behaviour_that_does_not_read_the_body_leaves_no_trace_of_it(
    a: ScriptedReplica, connect: Connect
) -> None:
    async def duplex(exchange: Exchange) -> None:
        await exchange.send(b"now")

    a.behave(duplex)
    peer = connect(a)
    peer.send(b"POST / HTTP/1.1\r\nContent-Length: 4\r\n\r\n")
    assert peer.read(3) == b"now"
    peer.send(b"body" + GET)
    assert peer.read(len(OK) + 1) == OK + b"a"
    assert bytes(a.requests[0].body) == b"body"


def test_a_behaviour_that_fails_fails_the_test(connect: Connect) -> None:
    async def broken(exchange: Exchange) -> None:
        raise ZeroDivisionError

    replica = ScriptedReplica("a")
    replica.start()
    replica.behave(broken)
    peer = connect(replica)
    peer.send(GET)
    assert peer.read_to_end() == b""
    with pytest.raises(RuntimeError, match=r"ScriptedReplica a on port .* ZeroDivisionError"):
        replica.close()


# Modes of a whole server


def test_refuse_and_accept_keep_the_port_and_open_connections(
    a: ScriptedReplica, connect: Connect
) -> None:
    peer = connect(a)
    port = a.port
    for _ in range(3):
        a.refuse()
        with pytest.raises(ConnectionRefusedError):
            connect(a)
        peer.send(GET)
        assert peer.read(len(OK) + 1) == OK + b"a"
        a.accept()
        connect(a)
    assert a.port == port
    a.wait_for(lambda: a.connections == 4)


def test_what_the_system_has_connected_is_served_even_if_refusing_follows(
    a: ScriptedReplica, connect: Connect
) -> None:
    for _ in range(20):
        peer = connect(a)
        a.refuse()
        peer.send(GET)
        assert peer.read(len(OK) + 1) == OK + b"a"
        a.accept()


def test_stalled_connects_hang_and_get_through_afterwards(
    a: ScriptedReplica, connect: Connect
) -> None:
    for _ in range(5):
        a.stall_connects()
        for _ in range(3):
            with pytest.raises(TimeoutError):
                connect(a, timeout=0.05)
        a.accept()
    assert a.connections == 0
    a.stall_connects()
    late = socket.socket()
    late.setblocking(False)
    assert late.connect_ex(("127.0.0.1", a.port)) != 0
    a.accept()
    a.wait_for(lambda: a.connections == 1)  # its SYN is sent again after a second
    late.close()


def test_stalled_connects_can_turn_into_refused_ones(a: ScriptedReplica, connect: Connect) -> None:
    a.stall_connects()
    a.refuse()
    with pytest.raises(ConnectionRefusedError):
        connect(a)


def test_reset_all_resets_what_is_open_and_nothing_later(
    a: ScriptedReplica, connect: Connect
) -> None:
    a.behave(stall())
    peers = [connect(a) for _ in range(3)]
    peers[0].send(GET)
    a.wait_for(lambda: a.requests and a.connections == 3)
    a.reset_all()
    assert a.open_connections == 0
    for peer in peers:
        with pytest.raises(ConnectionResetError):
            peer.read(1)
    peer = connect(a)
    peer.send(GET)
    assert peer.read(len(OK) + 1) == OK + b"a"
    assert a.requests[0].peer_closed_at is None


def test_a_replica_can_end_and_start_again_on_its_port(
    a: ScriptedReplica, connect: Connect
) -> None:
    for _ in range(3):
        peer = connect(a)
        peer.send(GET)
        assert peer.read(len(OK) + 1) == OK + b"a"
        a.close()
        a.close()  # once more does no harm
        with pytest.raises(ConnectionRefusedError):
            connect(a)
        a.start()
    assert len(a.requests) == 3


def test_a_replica_that_starts_again_waits_for_events_as_before(
    a: ScriptedReplica, connect: Connect
) -> None:
    event = threading.Event()
    a.behave(hold(event), hold(event))
    connect(a).send(GET)
    a.wait_for(lambda: a.requests)
    a.close()
    a.start()
    peer = connect(a)
    peer.send(GET)
    event.set()
    assert peer.read(len(OK) + 1) == OK + b"a"


def test_a_port_that_is_held_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        replica = ScriptedReplica(port=other.getsockname()[1])
        with pytest.raises(OSError, match="in use"):
            replica.start()


def test_waiting_in_vain_says_for_whom(a: ScriptedReplica) -> None:
    with pytest.raises(AssertionError, match=r"<ScriptedReplica a on port \d+: 0 connections"):
        a.wait_for(lambda: a.requests, timeout=0.01)


def test_a_behaviour_cannot_control_its_own_replica(connect: Connect) -> None:
    replica = ScriptedReplica("a")

    async def wrong(exchange: Exchange) -> None:
        replica.refuse()

    replica.start()
    replica.behave(wrong)
    peer = connect(replica)
    peer.send(GET)
    assert peer.read_to_end() == b""
    with pytest.raises(RuntimeError, match="from its own loop"):
        replica.close()


def test_an_event_releases_all_who_wait_for_it_at_any_replica(
    replica_factory: ReplicaFactory, connect: Connect
) -> None:
    first, second = threading.Event(), threading.Event()
    a, b = replica_factory("a"), replica_factory("a")
    for replica in (a, b):
        replica.behave_always(stream([first, b"1", second, b"2"], headers=()))
    peers = [connect(replica, timeout=0.5) for replica in (a, b) for _ in range(50)]
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    for peer in peers:
        peer.send(GET)
        assert peer.read(len(head)) == head
    first.set()
    for peer in peers:
        assert peer.read(6) == b"1\r\n1\r\n"
    with pytest.raises(TimeoutError):
        peers[0].read(1)
    second.set()
    for peer in peers:
        assert peer.read(11) == b"1\r\n2\r\n0\r\n\r\n"


def test_many_connections_are_held_at_once(a: ScriptedReplica, connect: Connect) -> None:
    peers = [connect(a) for _ in range(300)]
    for peer in peers:
        peer.send(GET)
    for peer in peers:
        assert peer.read(len(OK) + 1) == OK + b"a"
    assert a.open_connections == 300


# The controller


def call(timestamps: list[float], path: str = SYNC_PATH, method: str = "POST") -> bytes:
    return post(encode_sync(timestamps), path, method)


def post(body: bytes, path: str = SYNC_PATH, method: str = "POST") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def read_answer(peer: Peer) -> tuple[int, bytes]:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += peer.read(1)
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return int(head.split()[1]), peer.read(length)


def test_a_controller_stores_arrivals_and_lists_what_is_ready(
    fake_controller: FakeController, connect: Connect
) -> None:
    peer = connect(fake_controller)
    peer.send(call([]))
    assert read_answer(peer) == (200, b'{"replica_info": {}}')
    fake_controller.set_ready(["http://a:1"])
    peer.send(call([1.5, 2]))
    assert json.loads(read_answer(peer)[1]) == {
        "replica_info": {"http://a:1": {"gpu_type": "unknown"}}
    }
    fake_controller.set_ready({"http://a:1": "A100", "http://b:2": None})
    peer.send(call([3.5]))
    assert json.loads(read_answer(peer)[1]) == {
        "replica_info": {"http://a:1": {"gpu_type": "A100"}, "http://b:2": {"gpu_type": "unknown"}}
    }
    assert fake_controller.arrivals == [1.5, 2, 3.5]
    assert [record.timestamps for record in fake_controller.syncs] == [(), (1.5, 2), (3.5,)]
    assert fake_controller.connections == 1


def test_one_answer_can_have_a_list_of_its_own(
    fake_controller: FakeController, connect: Connect
) -> None:
    fake_controller.set_ready(["http://a:1"])
    fake_controller.answer_next(Answer(ready=()), Answer(ready={"http://b:2": "L4"}))
    peer = connect(fake_controller)
    answers = []
    for _ in range(3):
        peer.send(call([]))
        answers.append(json.loads(read_answer(peer)[1])["replica_info"])
    assert answers == [
        {},
        {"http://b:2": {"gpu_type": "L4"}},
        {"http://a:1": {"gpu_type": "unknown"}},
    ]


def test_answers_are_used_in_order_then_in_turn(
    fake_controller: FakeController, connect: Connect
) -> None:
    fake_controller.answer_next(Answer(status=503), Answer(body=b"junk"))
    fake_controller.answer_always(Answer(old_shape=True), Answer(status=500))
    peer = connect(fake_controller)
    answers = []
    for _ in range(5):
        peer.send(call([]))
        answers.append(read_answer(peer))
    empty = (200, b'{"ready_replica_urls": []}')
    failed = (500, b'{"detail": "scripted"}')
    assert answers == [(503, failed[1]), (200, b"junk"), empty, failed, empty]
    fake_controller.answer_always()
    peer.send(call([]))
    assert read_answer(peer) == (200, b'{"replica_info": {}}')
    assert fake_controller.syncs[0].answer == Answer(status=503)


def test_a_failure_comes_after_arrivals_were_stored_or_before(
    fake_controller: FakeController, connect: Connect
) -> None:
    fake_controller.answer_next(Answer(status=500), Answer(status=500, stored=False))
    peer = connect(fake_controller)
    for timestamp in (1.0, 2.0):
        peer.send(call([timestamp]))
        assert read_answer(peer)[0] == 500
    assert fake_controller.arrivals == [1.0]
    assert [record.timestamps for record in fake_controller.syncs] == [(1.0,), (2.0,)]


def test_a_delayed_answer_and_one_that_never_comes(
    fake_controller: FakeController, connect: Connect
) -> None:
    fake_controller.answer_next(Answer(delay=0.1), Answer(delay=math.inf))
    peer = connect(fake_controller)
    peer.send(call([]))
    fake_controller.wait_for(lambda: fake_controller.syncs)
    assert fake_controller.syncs[0].finished_at is None
    record = fake_controller.wait_for_sync(1)
    assert record.finished_at is not None
    assert record.finished_at - record.received_at >= 0.1
    read_answer(peer)
    peer.send(call([]))
    fake_controller.wait_for(lambda: len(fake_controller.syncs) == 2)
    with pytest.raises(AssertionError, match=r"<FakeController on port \d+: 2 syncs>"):
        fake_controller.wait_for_sync(2, timeout=0.1)
    peer.close()
    assert fake_controller.wait_for_sync(2).answer.delay == math.inf


def test_a_cut_answer(fake_controller: FakeController, connect: Connect) -> None:
    fake_controller.answer_next(Answer(cut=True))
    peer = connect(fake_controller)
    peer.send(call([]))
    head, _, body = peer.read_to_end().partition(b"\r\n\r\n")
    assert b"Content-Length: 20" in head
    assert body == b'{"replica_info"'


def test_a_call_that_is_not_read(fake_controller: FakeController, connect: Connect) -> None:
    fake_controller.answer_next(Answer(unread=True))
    peer = connect(fake_controller)
    peer.send(call([1.0]))
    with pytest.raises(ConnectionResetError):
        peer.read(1)
    assert fake_controller.wait_for_sync(1).timestamps == ()
    assert fake_controller.arrivals == []


def test_a_controller_that_refuses_for_a_time_after_an_answer(
    fake_controller: FakeController, connect: Connect
) -> None:
    fake_controller.answer_next(Answer(then_refuse=0.3))
    peer = connect(fake_controller)
    peer.send(call([]))
    assert peer.read_to_end().endswith(b'{"replica_info": {}}')
    with pytest.raises(ConnectionRefusedError):
        connect(fake_controller)
    assert not fake_controller.accepting
    fake_controller.wait_for(lambda: fake_controller.accepting)
    peer = connect(fake_controller)
    peer.send(call([2.0]))
    assert read_answer(peer)[0] == 200
    assert fake_controller.arrivals == [2.0]


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (call([], path="/other"), "not the sync call: POST b'/other'"),
        (call([], method="GET"), f"not the sync call: GET {SYNC_PATH.encode()!r}"),
        (post(b"junk"), "the body of a sync call is no report of timestamps"),
        (post(b"[]"), "the body of a sync call is no report of timestamps"),
        (post(b"{}"), "the body of a sync call is no report of timestamps"),
        (
            post(b'{"request_aggregator": {"timestamps": ["1"]}}'),
            "the body of a sync call is no report of timestamps",
        ),
        (
            post(b'{"request_aggregator": {"timestamps": [NaN]}}'),
            "the body of a sync call is no report of timestamps",
        ),
        (
            post(b'{"request_aggregator": {"timestamps": [1, 3, 2]}}'),
            "the timestamps of a sync call are not sorted",
        ),
    ],
)
def test_a_wrong_call_is_a_fault_and_stores_nothing(
    fake_controller: FakeController, connect: Connect, data: bytes, fault: str
) -> None:
    peer = connect(fake_controller)
    peer.send(data)
    assert peer.read(12) == b"HTTP/1.1 400"
    fake_controller.wait_for(lambda: fake_controller.faults)
    assert fake_controller.faults == [fault]
    assert (fake_controller.arrivals, fake_controller.syncs) == ([], [])
    fake_controller.faults.clear()


def test_waiting_without_a_count_is_for_the_next_sync(
    fake_controller: FakeController, connect: Connect
) -> None:
    peer = connect(fake_controller)
    peer.send(call([1.0]))
    read_answer(peer)
    later = threading.Timer(0.1, peer.send, [call([2.0])])
    later.start()
    assert fake_controller.wait_for_sync().timestamps == (2.0,)
    later.join()


@pytest.mark.anyio
async def test_async_tests_wait_in_a_thread(
    fake_controller: FakeController, connect: Connect
) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(anyio.to_thread.run_sync, fake_controller.wait_for_sync, 1))
        connect(fake_controller).send(call([1.0]))
    assert fake_controller.arrivals == [1.0]


# What is left behind


def test_nothing_is_left_behind() -> None:
    threads = threading.active_count()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            with ScriptedReplica() as replica, FakeController() as controller:
                replica.behave(stall(), stream(itertools.repeat(b"x" * 100_000)))
                peers = [Peer(replica.port) for _ in range(3)] + [Peer(controller.port)]
                for peer in peers[:2]:
                    peer.send(GET)
                replica.wait_for(lambda: len(replica.requests) == 2)
                replica.stall_connects()
            for peer in peers:
                peer.close()
        gc.collect()
    assert threading.active_count() == threads
    assert [str(warning.message) for warning in caught] == []


# The plugin as a user runs it


def test_a_user_has_the_fixtures_without_doing_anything(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import json
        import urllib.request

        import anyio
        import pytest
        from controller_client.client import ControllerClient
        from controller_client.testing import Answer, answer

        @pytest.fixture
        def anyio_backend():
            return "asyncio"

        def test_without_a_loop(fake_controller, replica_factory):
            a, b = replica_factory("a"), replica_factory("b")
            b.behave(answer(b"other"))
            bodies = [urllib.request.urlopen(r.url, timeout=5).read() for r in (a, b)]
            assert bodies == [b"a", b"other"]

        @pytest.mark.anyio
        async def test_with_a_loop(fake_controller, replica_factory):
            a = replica_factory("a")
            fake_controller.set_ready([a.url])
            client = ControllerClient(fake_controller.url)
            ready = await client.sync([1.0])
            await client.aclose()
            assert [replica.url for replica in ready.replicas] == [a.url]
            await anyio.to_thread.run_sync(fake_controller.wait_for_sync, 1)
        """
    )
    result = pytester.runpytest_subprocess("-W", "error", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=2)


def test_a_user_learns_of_faults_at_the_fakes(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import socket

        def send_junk(url):
            host, _, port = url.removeprefix("http://").partition(":")
            with socket.create_connection((host, int(port)), timeout=5) as sock:
                sock.sendall(b"junk\\r\\n\\r\\n")
                assert sock.recv(12) == b"HTTP/1.1 400"

        def test_controller(fake_controller):
            send_junk(fake_controller.url)

        def test_replica(replica_factory):
            send_junk(replica_factory().url)
        """
    )
    result = pytester.runpytest_subprocess("-W", "error", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, errors=2)


def test_the_plugin_does_nothing_to_a_suite_that_does_not_use_it(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # others import what they like
    pytester.makepyfile(
        """
        import sys
        import threading

        def test_nothing_costly_was_imported_or_started():
            assert threading.active_count() == 1
            assert not {"aiohttp", "httpx", "uvloop"} & set(sys.modules)
        """
    )
    result = pytester.runpytest_subprocess("-W", "error", "-p", "controller_client.testing")
    result.assert_outcomes(passed=1)


def test_the_plugin_does_not_mind_that_the_import_hook_came_first(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile("def test_it(fake_controller): assert fake_controller.connections == 0")
    program = (
        "import sys, controller_client.skypilot.hook, pytest\n"
        "sys.exit(pytest.main(['-W', 'error', '-p', 'no:cacheprovider']))\n"
    )
    result = pytester.run(sys.executable, "-W", "error", "-c", program)
    assert result.ret == 0
    result.assert_outcomes(passed=1)


def test_the_fakes_do_not_need_pytest() -> None:
    program = (
        "import sys; sys.modules['pytest'] = None\n"
        "from controller_client.fakes.controller import FakeController\n"
        "from controller_client.fakes.replica import ScriptedReplica\n"
        "with FakeController() as controller, ScriptedReplica() as replica:\n"
        "    print(controller.url != replica.url)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("True\n", "")
