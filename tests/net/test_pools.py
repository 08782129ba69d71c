"""Connections to replicas: no ceiling, no stale one that shows, none left over.

`SKYSERVE_SOAK=1` makes it 10,000 requests rather than 2,000 where leaks are looked for.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import resource
import select
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from controller_client.testing import (
    Exchange,
    ReplicaFactory,
    ScriptedReplica,
    answer,
    hold,
    reset,
    stall,
)
from lb.errors import ConnectFailed
from lb.metrics import Metrics
from lb.upstream import Pool, UpstreamConnection
from tests.net.conftest import StartBalancer
from tests.net.harness import RunningBalancer, request

REQUESTS = 10_000 if os.environ.get("SKYSERVE_SOAK") else 2_000


def connections(balancer: RunningBalancer) -> dict[str, int]:
    return balancer.call(balancer.balancer._pool_connections)


# --- no ceiling ---------------------------------------------------------------------------------


@pytest.fixture
def many_files() -> Iterator[None]:
    """Four descriptors a stream, all of them in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard >= 10_000, f"the hard limit on open files is {hard}: raise it to 10,000"
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 10_000), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_two_thousand_quiet_streams_do_not_delay_the_next_request(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    """backend.ai issue 13408: a limit of 100 connections makes load look like time-outs."""

    async def quiet(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n.\r\n")
        await exchange.wait(None)

    a = replica_factory()
    a.behave_always(quiet)
    balancer = start_balancer(a)
    clients = []
    for _ in range(2_000):
        client = balancer.client()
        client.send(request())
        clients.append(client)
    for client in clients:
        client.read_until(b"\r\n.\r\n")
    assert connections(balancer) == {"idle": 0, "active": 2_000}
    a.behave_always()
    began = time.monotonic()
    assert balancer.get().status == 200
    assert time.monotonic() - began < 1
    for client in clients:
        client.sock.close()
    balancer.wait_for(lambda: not balancer.balancer.plane.proxy.running)
    a.wait_for(lambda: a.open_connections <= 1)
    assert connections(balancer) == {"idle": 1, "active": 0}


# --- stale connections --------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_requests_that_race_with_the_replica_closing_its_idle_connections(
    method: str, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    """envoy issue 1979. `--retry safe`, so that a POST is sent again only if that does no harm."""
    a = replica_factory(idle_timeout=0.1)
    balancer = start_balancer(a, upstream_keepalive="10s", retry="safe")
    jitter = random.Random(1)
    with balancer.client() as client:
        for _ in range(30):
            body = b"x" if method == "POST" else b""
            assert client.ask(request(method, body=body)).status == 200
            time.sleep(0.1 + jitter.uniform(-0.003, 0.003))
    assert len([record for record in a.requests if record.answered_at]) == 30, "one was sent twice"
    assert balancer.metric("replica_set_changes_total", change="ejected") == 0


@pytest.mark.parametrize("body", [b"", b"x"], ids=["GET", "POST"])
def test_all_idle_connections_are_reset_at_once(
    body: bytes, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    gate = threading.Event()
    a.behave(*[hold(gate)] * 20)
    balancer = start_balancer(a, upstream_keepalive="30s", retry="safe")
    clients = [balancer.client() for _ in range(20)]
    for client in clients:
        client.send(request())
    a.wait_for(lambda: len(a.requests) == 20)
    gate.set()
    for client in clients:
        assert client.answer().status == 200
    assert connections(balancer) == {"idle": 20, "active": 0}
    # In one turn of the loop: the balancer learns of resets and requests together.
    blocked = threading.Event()
    over = threading.Event()
    balancer.loop.call_soon_threadsafe(lambda: (blocked.set(), over.wait(10)))
    assert blocked.wait(10)
    a.reset_all()
    for client in clients:
        client.send(request("POST" if body else "GET", body=body))
    over.set()
    for client in clients:
        assert client.answer().status == 200
        client.sock.close()
    assert len(a.requests) == 40
    assert balancer.metric("replica_set_changes_total", change="ejected") == 0


def test_an_idle_connection_is_closed_before_the_replica_would(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory(idle_timeout=5)
    balancer = start_balancer(a, upstream_keepalive="300ms")
    assert balancer.get().status == 200
    assert connections(balancer) == {"idle": 1, "active": 0}
    closed = a.wait_for(lambda: a.open_connections == 0 and time.monotonic(), timeout=4)
    answered = a.requests[0].answered_at
    assert answered is not None
    assert closed - answered > 0.25
    assert connections(balancer) == {"idle": 0, "active": 0}


def test_idle_connections_are_used_again_newest_first_so_that_others_can_go(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    gate = threading.Event()
    a.behave(*[hold(gate)] * 5)
    balancer = start_balancer(a, upstream_keepalive="500ms")
    clients = [balancer.client() for _ in range(5)]
    for client in clients:
        client.send(request())
    a.wait_for(lambda: len(a.requests) == 5)
    gate.set()
    for client in clients:
        assert client.answer().status == 200
        client.sock.close()
    for _ in range(20):
        assert balancer.get().status == 200
        time.sleep(0.05)
    assert a.connections == 5, "a request opened a connection though there were idle ones"
    assert len({record.connection for record in a.requests[5:]}) == 1
    assert a.open_connections == 1


# --- bytes that nobody asked for ----------------------------------------------------------------

FORGED = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged"


@pytest.mark.parametrize("length", [1, 4, 17, len(FORGED) - 1, len(FORGED), 2 * len(FORGED)])
@pytest.mark.parametrize("when", ["with the answer", "right after it", "later"])
def test_unsolicited_bytes_never_become_the_next_answer(
    when: str, length: int, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    unsolicited = (FORGED * 2)[:length]
    good = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ngood"
    sent = threading.Event()

    async def says_too_much(exchange: Exchange) -> None:
        await exchange.read_body()
        if when == "with the answer":
            await exchange.send(good + unsolicited)
        else:
            await exchange.send(good)
            await exchange.wait(0.1 if when == "later" else 0)
            await exchange.send(unsolicited)
        sent.set()

    a = replica_factory()
    a.behave(says_too_much, answer(b"1"), answer(b"2"))
    balancer = start_balancer(a)
    with balancer.client() as client:
        assert client.ask(request()).body == b"good"
        assert sent.wait(10)
        assert client.ask(request()).body == b"1"
        assert client.ask(request()).body == b"2"
    assert a.requests[1].number_on_connection == 1, "the connection was used again"


def test_a_chunked_answer_with_more_behind_it(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    async def says_too_much(exchange: Exchange) -> None:
        await exchange.read_body()
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        await exchange.send(head + b"4\r\ngood\r\n0\r\n\r\n" + FORGED[:20])

    a = replica_factory()
    a.behave(says_too_much)
    balancer = start_balancer(a)
    assert balancer.get().body == b"good"
    assert connections(balancer) == {"idle": 0, "active": 0}


# --- a pool by itself ---------------------------------------------------------------------------


class Listener:
    """A server whose every step the test makes."""

    def __init__(self) -> None:
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._sock.getsockname()[1]}"
        self.accepted: list[socket.socket] = []

    def accept(self, timeout: float = 10) -> socket.socket:
        self._sock.settimeout(timeout)
        self.accepted.append(self._sock.accept()[0])
        self.accepted[-1].settimeout(10)
        return self.accepted[-1]

    def close(self) -> None:
        for sock in (self._sock, *self.accepted):
            sock.close()


@pytest.fixture
def listener() -> Iterator[Listener]:
    listening = Listener()
    yield listening
    listening.close()


def with_pool(listener: Listener, steps: Callable[[Pool], Coroutine[Any, Any, None]]) -> None:
    """Run these steps with a pool in a loop of its own."""

    async def run() -> None:
        metrics = Metrics(service="s", policy="p")
        pool = Pool(listener.url, connect_timeout=5, keepalive=30, tls=None, metrics=metrics)
        try:
            await steps(pool)
        finally:
            for connection in tuple(pool._open):
                connection.abort()
            await asyncio.sleep(0)
            pool.close()

    uvloop.run(run())


@pytest.mark.parametrize("what", ["fin", "rst", "bytes"])
def test_what_came_in_since_the_loop_last_looked_keeps_a_connection_from_being_used(
    what: str, listener: Listener
) -> None:
    """A pipelined request reuses a connection in the turn of the loop in which it became idle."""

    async def steps(pool: Pool) -> None:
        kept = await pool.connect()
        peer = listener.accept()
        pool.keep(kept)
        assert pool.reuse() is kept
        pool.keep(kept)
        assert kept.transport is not None
        descriptor = kept.transport.get_extra_info("socket").fileno()
        if what == "bytes":
            peer.send(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
        elif what == "fin":
            peer.shutdown(socket.SHUT_WR)
        else:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            peer.close()
        assert select.select([descriptor], [], [], 10)[0]
        assert pool.reuse() is None
        await asyncio.sleep(0.01)
        assert (pool.idle, pool.active) == (0, 0)

    with_pool(listener, steps)


def test_a_connect_that_is_cancelled_at_any_step_leaves_no_connection(listener: Listener) -> None:
    """The client may leave at the very moment at which the connection is made."""
    finished = []

    async def steps(pool: Pool) -> None:
        for turns in range(12):
            task = asyncio.create_task(pool.connect())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            done, _ = await asyncio.wait([task])
            finished.append(not task.cancelled())
            if finished[-1]:
                done.pop().result().abort()
            await asyncio.sleep(0.01)
            assert (pool.idle, pool.active) == (0, 0)
        before = descriptors()
        for _ in range(50):
            task = asyncio.create_task(pool.connect())
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            await asyncio.sleep(0)
        gc.collect()
        assert descriptors() <= before

    with_pool(listener, steps)
    assert finished[0] is False
    assert finished[-1] is True, "it was never cancelled late enough to be of interest"


def test_a_connection_made_for_a_replica_that_was_retired_meanwhile_is_not_used(
    listener: Listener,
) -> None:
    async def steps(pool: Pool) -> None:
        task = asyncio.create_task(pool.connect())
        await asyncio.sleep(0)
        pool.close()
        with pytest.raises(ConnectFailed):
            await task
        assert pool.active == 0

    with_pool(listener, steps)


def test_a_pool_forgets_ten_thousand_idle_connections_in_no_time() -> None:
    """It looks for none of them one by one: each loss would cost as much as there are idle ones."""

    async def steps() -> None:
        metrics = Metrics(service="s", policy="p")
        pool = Pool("http://x", connect_timeout=5, keepalive=30, tls=None, metrics=metrics)
        idle = [UpstreamConnection(pool) for _ in range(10_000)]
        for connection in idle:
            pool._open.add(connection)
            pool.keep(connection)
        began = time.perf_counter()
        for connection in reversed(idle):
            connection.connection_lost(None)
        assert time.perf_counter() - began < 1
        assert (pool.idle, pool.active) == (0, 0)

    uvloop.run(steps())


# --- no growth ----------------------------------------------------------------------------------


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_no_socket_and_no_task_is_left_over(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    """production-stack issue 706: 20 % of the clients leave, 5 % of the answers are reset."""
    a, b = replica_factory(), replica_factory()
    balancer = start_balancer(  # no sync while descriptors are counted
        a, b, upstream_keepalive="300ms", keepalive_timeout="300ms", sync_interval="60s"
    )

    def tasks() -> int:
        gc.collect()
        return len(asyncio.all_tasks())

    def quiet() -> bool:
        return not (
            balancer.balancer.plane.proxy.running
            or len(balancer.balancer.plane.server)
            or any(balancer.balancer._pool_connections().values())
        )

    assert balancer.get().status == 200
    balancer.wait_for(quiet)
    settled(a, b)
    files, running = descriptors(), balancer.call(tasks)

    usual, lost, slow = answer(b"x" * 100), reset(), stall()
    for replica in (a, b):
        replica.behave_always(*[usual] * 9, lost, *[usual] * 9, usual)
    per_thread = REQUESTS // 8
    threads = [threading.Thread(target=use, args=(balancer, seed, per_thread)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for replica in (a, b):  # and some leave while they wait
        replica.behave_always(slow)
    for _ in range(20):
        with balancer.client() as client:
            client.send(request())
    balancer.wait_for(quiet)
    for replica in (a, b):
        replica.behave_always()
    left = balancer.metric("requests_total", outcome="client_closed")
    assert left > REQUESTS * 0.05
    assert balancer.metric("retries_total") > REQUESTS * 0.02
    with balancer.client() as client:
        for _ in range(100):
            assert client.ask(request()).status == 200
    balancer.wait_for(quiet)
    settled(a, b)
    assert balancer.in_flight() == 0
    assert balancer.call(tasks) == running
    assert descriptors() <= files


def settled(*replicas: ScriptedReplica) -> None:
    for replica in replicas:
        replica.wait_for(lambda r=replica: r.open_connections == 0)  # type: ignore[misc]


def use(balancer: RunningBalancer, seed: int, requests: int) -> None:
    """Send so many requests; of five clients one leaves at some point of its request."""
    chance = random.Random(seed)
    client = balancer.client()
    for _ in range(requests):
        body = b"x" * chance.choice([0, 10, 100_000])
        whole = request("POST" if body else "GET", body=body)
        if chance.random() < 0.2:
            client.send(whole[: chance.randrange(whole.index(b"\r\n\r\n"), len(whole)) + 4])
            time.sleep(chance.choice([0, 0, 0.001]))
            client.sock.close()
            client = balancer.client()
        else:
            assert client.ask(whole).status in (200, 502)  # 502: it met three resets
    client.sock.close()
