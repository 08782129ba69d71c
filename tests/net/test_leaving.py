"""Clients that leave: noticed at every point, told to the replica, and nobody's fault.

A client that half-closes its connection (FIN, and reads on) counts as one that left: of a client
that is gone the balancer sees no more than that FIN.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import gc
import logging
import socket
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from controller_client.testing import (
    Behaviour,
    Exchange,
    ReplicaFactory,
    ScriptedReplica,
    answer,
    stall,
    stream,
)
from lb.errors import ConnectFailed
from lb.upstream import Pool, UpstreamConnection
from tests.net.conftest import StartBalancer
from tests.net.harness import Closed, RawClient, RunningBalancer, request

SECONDS_TO_NOTICE = 1.0
LONG_POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n"


# --- how a client leaves ------------------------------------------------------------------------


def closes(client: RawClient) -> None:
    client.sock.close()


def resets(client: RawClient) -> None:
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.sock.close()


def half_closes(client: RawClient) -> None:
    client.sock.shutdown(socket.SHUT_WR)


Leave = Callable[[RawClient], None]
every_way = pytest.mark.parametrize(
    "leave", [closes, resets, half_closes], ids=lambda f: f.__name__
)


# --- the point at which it leaves ---------------------------------------------------------------


async def does_not_read(exchange: Exchange) -> None:
    """Take in the head and no more, and see the peer leave all the same."""
    sock = exchange._connection._sock
    while sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) == b"\x01":  # TCP_ESTABLISHED
        await asyncio.sleep(0.005)
    exchange._connection._saw_the_peer_close()


def before_the_head(client: RawClient, a: ScriptedReplica, _: RunningBalancer) -> None:
    client.send(request())
    a.wait_for(lambda: a.requests)


def between_chunks(client: RawClient, a: ScriptedReplica, _: RunningBalancer) -> None:
    client.send(request())
    client.read_until(b"\r\n\r\n")
    assert client.chunk() == b"data: 1\n\n"


def while_chunks_come(client: RawClient, a: ScriptedReplica, _: RunningBalancer) -> None:
    client.send(request())
    client.read_until(b"\r\n\r\n")
    for _ in range(5):
        client.chunk()


def during_upload(client: RawClient, a: ScriptedReplica, _: RunningBalancer) -> None:
    client.send(LONG_POST + b"x" * 50_000)
    a.wait_for(lambda: a.requests and a.requests[0].body_length == 50_000)


def during_an_upload_that_nobody_takes(
    client: RawClient, a: ScriptedReplica, balancer: RunningBalancer
) -> None:
    """Until the balancer reads no more: of a FIN behind what it has not read only the kernel knows.

    One behind bytes that the balancer's kernel has not taken cannot be seen by anybody.
    """

    def held() -> bool:
        return all(
            connection._reading_held for connection in balancer.balancer.plane.server._connections
        )

    client.send(LONG_POST)
    a.wait_for(lambda: a.requests)
    while not balancer.call(held):
        client.send(b"x" * 100_000)
        deadline = time.monotonic() + 0.1  # it may hold on for a moment only
        while time.monotonic() < deadline and (unsent(client) or balancer.call(held)):
            time.sleep(0.01)


def unsent(client: RawClient) -> int:
    """Bytes that the kernel of the client still holds for the balancer."""
    found = array.array("i", [0])
    fcntl.ioctl(client.sock, termios.TIOCOUTQ, found)
    return found[0]


ComeTo = Callable[[RawClient, ScriptedReplica, RunningBalancer], None]
POINTS: list[tuple[ComeTo, Behaviour, str, int]] = [
    (before_the_head, stall(), "before_head", 499),
    (between_chunks, stream([b"data: 1\n\n", threading.Event()]), "streaming", 200),
    (while_chunks_come, stream([b"x" * 1000] * 10_000, every=0.001), "streaming", 200),
    (during_upload, answer(), "request_body", 499),
    (during_an_upload_that_nobody_takes, does_not_read, "request_body", 499),
]


@every_way
@pytest.mark.parametrize(
    ("come_to", "behaviour", "phase", "status"), POINTS, ids=[point[0].__name__ for point in POINTS]
)
def test_a_client_that_leaves_is_noticed_and_held_against_nobody(
    come_to: ComeTo,
    behaviour: Behaviour,
    phase: str,
    status: int,
    leave: Leave,
    replica_factory: ReplicaFactory,
    start_balancer: StartBalancer,
) -> None:
    """production-stack issue 634, litellm pull request 31499 and issue 42222, oxy issue 112."""
    a, b = replica_factory(), replica_factory()
    a.behave_always(behaviour)
    balancer = start_balancer(a, b, policy="round_robin")
    with balancer.client() as client:
        come_to(client, a, balancer)
        left = time.monotonic()
        leave(client)
        seen = a.wait_for(lambda: a.requests[0].peer_closed_at)
        assert seen - left < SECONDS_TO_NOTICE
        finished = balancer.log.wait_for("request.finished")
    assert [(line["status"], line["outcome"]) for line in finished] == [(status, "client_closed")]
    assert finished[0]["attempts"] == 1
    assert balancer.metric("client_disconnects_total", phase=phase) == 1
    assert balancer.metric("client_disconnects_total") == 1
    assert balancer.metric("requests_total", outcome="client_closed") == 1
    assert balancer.metric("responses_total", code=str(status)) == 1
    assert balancer.metric("upstream_errors_total") == 0
    assert balancer.metric("retries_total") == 0
    assert balancer.metric("replica_set_changes_total", change="ejected") == 0
    assert balancer.in_flight() == 0
    assert not b.requests, "it was sent again"


@every_way
def test_a_client_that_leaves_while_there_is_no_replica(
    leave: Leave, start_balancer: StartBalancer
) -> None:
    balancer = start_balancer(no_replica_wait="20s")
    with balancer.client() as client:
        client.send(request(body=b"whole"))
        balancer.wait_for(lambda: balancer.balancer.plane.proxy.running)
        leave(client)
        balancer.wait_for(lambda: not balancer.balancer.plane.proxy.running, SECONDS_TO_NOTICE)
    assert balancer.metric("client_disconnects_total", phase="before_head") == 1
    assert balancer.log.wait_for("request.finished")[0]["status"] == 499


@every_way
def test_a_client_that_leaves_while_a_connect_hangs(
    leave: Leave, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    balancer = start_balancer(a)
    a.stall_connects()
    with balancer.client() as client:
        client.send(request())
        balancer.wait_for(lambda: balancer.balancer.plane.proxy.running)
        leave(client)
        balancer.wait_for(lambda: not balancer.balancer.plane.proxy.running, SECONDS_TO_NOTICE)
    assert balancer.metric("client_disconnects_total", phase="before_head") == 1
    assert balancer.metric("upstream_errors_total") == 0


def test_a_client_that_leaves_just_as_a_connect_runs_out_of_time(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.10 tells the one for the other then, and no replica may be asked any more."""
    begun = threading.Event()

    async def connect(pool: Pool) -> UpstreamConnection:
        begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            raise ConnectFailed("connect_timeout", "in the same turn") from None
        raise AssertionError

    a = replica_factory()
    balancer = start_balancer(a)
    with monkeypatch.context() as patched:
        patched.setattr(Pool, "connect", connect)
        with balancer.client() as client:
            client.send(request())
            assert begun.wait(10)
        balancer.log.wait_for("request.finished")
    assert balancer.in_flight() == 0
    assert balancer.metric("retries_total") == 0


def test_a_client_that_half_closes_and_reads_on_is_not_told_that_half_is_all(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    """To HTTP/1.0 the end of the connection is the end of the answer."""
    a = replica_factory()
    a.behave(stream([b"half", threading.Event()]))
    balancer = start_balancer(a)
    with balancer.client() as client:
        client.send(b"GET / HTTP/1.0\r\n\r\n")
        client.read_until(b"half")
        half_closes(client)
        with pytest.raises(Closed) as caught:
            client.read(1)
        assert caught.value.reset


@every_way
def test_a_client_that_does_not_read_and_leaves(
    leave: Leave, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    """What holds the relay is that the client takes no more; its leaving must end that wait."""
    a = replica_factory()
    a.behave(stream(iter(lambda: b"x" * 100_000, b"")))
    balancer = start_balancer(a)
    with balancer.client() as client:
        client.send(request())
        sent = -1
        a.wait_for(lambda: a.requests and a.requests[0].bytes_sent)
        while sent != a.requests[0].bytes_sent:
            sent = a.requests[0].bytes_sent
            time.sleep(0.3)
        left = time.monotonic()
        leave(client)
        seen = a.wait_for(lambda: a.requests[0].peer_closed_at)
        assert seen - left < SECONDS_TO_NOTICE
    assert balancer.metric("client_disconnects_total", phase="streaming") == 1


def test_a_client_that_never_takes_the_end_of_an_answer_is_cut_in_the_end(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    """The request is over, and what is left of its answer waits in our memory."""
    a = replica_factory()
    a.behave_always(answer(b"x" * 100_000))
    balancer = start_balancer(a, keepalive_timeout="1s")

    def shrink_send_buffer() -> None:
        for connection in balancer.balancer.plane.server._connections:
            sock = connection.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

    def unsent_answer() -> int:
        (connection,) = balancer.balancer.plane.server._connections
        assert connection.transport is not None
        return connection.transport.get_write_buffer_size()

    with balancer.client() as client:
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        balancer.wait_for(lambda: len(balancer.balancer.plane.server) == 1)
        balancer.call(shrink_send_buffer)
        client.send(request(headers={"Connection": "close"}))
        balancer.log.wait_for("request.finished")
        assert 0 < balancer.call(unsent_answer) <= 64 * 1024
        balancer.wait_for(lambda: len(balancer.balancer.plane.server) == 0, 5)


def test_fifty_clients_that_give_up_do_not_eject_a_slow_replica(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    """litellm issue 42222."""
    a = replica_factory()
    a.behave_always(answer(delay=30))
    balancer = start_balancer(a)
    clients = [balancer.client() for _ in range(50)]
    for client in clients:
        client.send(request())
    a.wait_for(lambda: len(a.requests) == 50)
    for client in clients:
        client.sock.close()
    a.wait_for(lambda: all(record.peer_closed_at for record in a.requests))
    balancer.wait_for(lambda: not balancer.balancer.plane.proxy.running)
    assert balancer.metric("responses_total", code="499") == 50
    assert balancer.metric("responses_total") == 50
    assert balancer.metric("replicas", state="ejected") == 0
    a.behave_always()
    assert balancer.get().status == 200


# --- nothing is left behind ---------------------------------------------------------------------


@pytest.fixture
def complaints(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What goes to the last resorts of asyncio and of the interpreter."""
    heard: list[Any] = []
    handler = logging.Handler()
    handler.emit = heard.append  # type: ignore[method-assign,assignment]
    monkeypatch.setattr(sys, "unraisablehook", heard.append)
    logger = logging.getLogger("asyncio")
    logger.addHandler(handler)
    yield heard
    logger.removeHandler(handler)


def test_a_hundred_aborted_streams_leave_no_traceback(
    complaints: list[Any], replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    """aiohttp issue 7590."""
    a = replica_factory()
    a.behave_always(stream([b"x" * 10_000] * 100_000), stream([b"x" * 100] * 10_000, every=0.002))
    balancer = start_balancer(a)
    for number in range(100):
        with balancer.client() as client:
            client.send(request() if number % 2 else request("POST", body=b"abcde"))
            client.read_until(b"\r\n\r\n")
            client.read(number * 10)
            (closes, resets)[number % 2](client)
    balancer.wait_for(lambda: not balancer.balancer.plane.proxy.running)
    balancer.call(gc.collect)
    assert complaints == []
    assert balancer.metric("client_disconnects_total", phase="streaming") == 100
    assert balancer.metric("requests_total", outcome="client_closed") == 100
    assert balancer.metric("requests_total") == 100
    assert not balancer.log.named("request.failed")
    assert all("Traceback" not in str(line) for line in balancer.log.events)
    a.wait_for(lambda: a.open_connections == 0)


def test_clients_that_leave_at_every_step_of_a_request_leave_nothing(
    complaints: list[Any], replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    """In the very turn of the loop in which a connection opens, an attempt fails, an answer ends."""
    a, b = replica_factory(), replica_factory()
    balancer = start_balancer(a, b, policy="round_robin", upstream_keepalive="200ms")
    a.behave_always(answer(b"x" * 200_000), stall(), stream([b"1"] * 3))
    for turns in range(60):
        client = balancer.client()
        client.send(request() if turns % 2 else request("POST", body=b"y" * 100_000))
        balancer.wait_for(lambda: len(balancer.balancer.plane.server))
        leave_after(balancer, turns)
        client.sock.close()
    balancer.wait_for(lambda: not balancer.balancer.plane.proxy.running)
    balancer.wait_for(lambda: balancer.balancer._pool_connections() == {"idle": 0, "active": 0})
    for replica in (a, b):
        replica.wait_for(lambda r=replica: r.open_connections == 0)  # type: ignore[misc]
    balancer.call(gc.collect)
    assert complaints == []
    assert balancer.in_flight() == 0


@pytest.mark.parametrize("turns", range(8))
def test_a_client_that_leaves_just_as_an_attempt_fails_gets_no_other(
    turns: int,
    complaints: list[Any],
    replica_factory: ReplicaFactory,
    start_balancer: StartBalancer,
) -> None:
    """The client is lost so many turns of the loop after the replica's connection."""
    a, b = replica_factory(), replica_factory()
    for replica in (a, b):
        replica.behave_always(stall())
    balancer = start_balancer(a, b, policy="round_robin")
    with balancer.client() as client:
        client.send(LONG_POST + b"begun")
        a.wait_for(lambda: a.requests and a.requests[0].body_length == 5)

        def lose_the_replica() -> None:
            for pool in balancer.balancer.plane.pools._pools.values():
                for connection in pool._open:
                    connection.abort()

        leave_after(balancer, turns, first=lose_the_replica)
        balancer.wait_for(lambda: not balancer.balancer.plane.proxy.running, SECONDS_TO_NOTICE)
        assert balancer.metric("client_disconnects_total") == 1
        assert balancer.metric("requests_total", outcome="client_closed") == 1
    a.wait_for(lambda: a.open_connections == 0)
    b.wait_for(lambda: b.open_connections == 0)
    assert balancer.in_flight() == 0
    assert complaints == []


def test_a_client_that_leaves_just_as_its_time_is_up_leaves_no_task(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    a.behave_always(stall())
    balancer = start_balancer(a, total_timeout="500ms", sync_interval="20s")
    tasks = balancer.call(lambda: len(asyncio.all_tasks()))
    with balancer.client() as client:
        client.send(request())
        a.wait_for(lambda: a.requests)

        def both_in_one_turn() -> None:
            for connection in balancer.balancer.plane.server._connections:
                connection.abort()  # its loss is told in the next turn, after what is due by then
            time.sleep(0.6)

        balancer.call(both_in_one_turn)
    balancer.wait_for(lambda: not balancer.balancer.plane.proxy.running)
    balancer.wait_for(lambda: len(asyncio.all_tasks()) == tasks, 3)


def leave_after(
    balancer: RunningBalancer, turns: int, first: Callable[[], None] = lambda: None
) -> None:
    """Abort the client's connection, as its loss does, after so many turns of the balancer's loop."""
    left = threading.Event()

    def turn(more: int) -> None:
        if more:
            balancer.loop.call_soon(turn, more - 1)
        else:
            for connection in balancer.balancer.plane.server._connections:
                connection.abort()
            left.set()

    balancer.loop.call_soon_threadsafe(lambda: (first(), turn(turns)))
    assert left.wait(10)
