"""Streams: every chunk at once, silence is no fault, and the death of a replica is no clean end.

`SKYSERVE_SOAK=1` adds a stream that is silent for six minutes, with default settings.
"""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from controller_client.testing import (
    Behaviour,
    Exchange,
    ReplicaFactory,
    ScriptedReplica,
    stream,
)
from tests.net.conftest import StartBalancer
from tests.net.harness import Closed, RunningBalancer, request

SOAK = bool(os.environ.get("SKYSERVE_SOAK"))
HTTP10 = b"GET / HTTP/1.0\r\n\r\n"


# --- at once ------------------------------------------------------------------------------------


def test_head_and_first_chunk_are_passed_on_at_once(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    """Each is waited for before the next is sent, so that one that is held back is never followed."""
    a = replica_factory()
    gates = [threading.Event() for _ in range(5)]
    a.behave(stream([piece for gate in gates for piece in (gate, b"data: x\n\n")]))
    balancer = start_balancer(a)
    with balancer.client() as client:
        client.send(request())
        assert b" 200 " in client.read_until(b"\r\n\r\n")
        for gate in gates:
            gate.set()
            assert client.chunk() == b"data: x\n\n"
        assert client.chunk() == b""


def test_nagle_is_off_and_keepalive_on_at_both_sides(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    gate = threading.Event()
    a = replica_factory()
    a.behave(stream([gate]))
    balancer = start_balancer(a)

    def options() -> list[tuple[int, int]]:
        pools = balancer.balancer.plane.pools._pools.values()
        upstream = [connection for pool in pools for connection in pool._open]
        sockets = [
            connection.transport.get_extra_info("socket")
            for connection in (*balancer.balancer.plane.server._connections, *upstream)
        ]
        return [
            (
                sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY),
                sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
            )
            for sock in sockets
        ]

    with balancer.client() as client:
        client.send(request())
        client.read_until(b"\r\n\r\n")
        assert balancer.call(options) == [(1, 1), (1, 1)]
        gate.set()


class Hiccups:
    """How much longer a thread sleeps than it asked for: what a busy machine does to any gap."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.is_set():
            due = time.monotonic() + 0.005
            time.sleep(0.005)
            self.longest = max(self.longest, time.monotonic() - due)

    def __enter__(self) -> Hiccups:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._thread.join()


def test_an_even_stream_stays_even(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    """c8s issue 140: events that come out in clumps, and late."""
    sent: list[float] = []

    async def cadence(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for number in range(60):
            await exchange.wait(0.05)
            sent.append(time.monotonic())
            await exchange.send(b"6\r\n%04d\n\n\r\n" % number)
        await exchange.send(b"0\r\n\r\n")

    a = replica_factory()
    a.behave(cadence)
    balancer = start_balancer(a)
    received: list[float] = []
    with balancer.client() as client, Hiccups() as hiccups:
        client.send(request())
        client.read_until(b"\r\n\r\n")
        events = []
        while data := client.chunk():
            events.append(data)
            received.append(time.monotonic())
    assert b"".join(events) == b"".join(b"%04d\n\n" % number for number in range(60))
    assert received[0] - sent[0] < 0.02 + hiccups.longest
    spoilt = longest_gap(sent) - 0.05 + hiccups.longest  # not our doing
    if len(events) == 60:
        assert longest_gap(received) < 0.15 + spoilt
    else:  # two that lay ready together may be passed on together, but only after a standstill
        assert spoilt > 0.04, "events were merged on a machine that had time"


def longest_gap(times: list[float]) -> float:
    return max(later - earlier for earlier, later in itertools.pairwise(times))


def test_a_line_of_2_mib_goes_through_byte_for_byte(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    """sglang pull request 7301: reading by lines fails on long ones."""
    line = b"data: " + os.urandom(1024 * 1024).hex().encode() + b"\n\n"
    a = replica_factory()
    a.behave(stream([line]))
    assert start_balancer(a).get().body == line


# --- silence ------------------------------------------------------------------------------------

SCALED_DOWN = {
    "total_timeout": "1s",
    "connect_timeout": "500ms",
    "no_replica_wait": "500ms",
    "header_timeout": "500ms",
    "keepalive_timeout": "500ms",
    "upstream_keepalive": "500ms",
    "grace_period": "500ms",
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("seconds", "settings"),
    [(3.0, SCALED_DOWN), *([(360.0, {"sync_interval": "20s"})] if SOAK else [])],
    ids=lambda value: f"{value:g}s" if isinstance(value, float) else "",
)
def test_no_limit_cuts_a_silent_stream(
    seconds: float,
    settings: dict[str, str],
    replica_factory: ReplicaFactory,
    start_balancer: StartBalancer,
) -> None:
    """aiohttp issue 4770, dstack issue 4239: no limit but that of the stream applies after the head.

    Scaled down every other limit is far shorter than the silence, as none of them is with the
    defaults: 285 s are shorter than 6 minutes.
    """
    a = replica_factory()
    a.behave(stream([b"late"], every=seconds))
    balancer = start_balancer(a, **settings)
    with balancer.client(timeout=seconds + 20) as client:
        client.send(request())
        client.read_until(b"\r\n\r\n")
        began = time.monotonic()
        assert client.chunk() == b"late"
        assert time.monotonic() - began > seconds - 0.5
        assert client.chunk() == b""
    assert balancer.metric("requests_total", outcome="ok") == 1


@pytest.mark.parametrize("version", [request(), HTTP10], ids=["1.1", "1.0"])
def test_stream_idle_timeout_cuts_a_silent_stream(
    version: bytes, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    a.behave(stream([b"1", b"2", threading.Event()], every=0.2))
    balancer = start_balancer(a, stream_idle_timeout="500ms")
    with balancer.client() as client:
        client.send(version)
        began = time.monotonic()
        with pytest.raises(Closed) as caught:
            client.answer()
        assert 0.85 < time.monotonic() - began < 5, "0.2 + 0.2 s of chunks, and 0.5 s of silence"
        assert caught.value.reset
    a.wait_for(lambda: a.requests[0].peer_closed_at)
    assert balancer.metric("upstream_errors_total", reason="timeout") == 1
    assert balancer.metric("requests_total", outcome="upstream_error") == 1
    assert balancer.metric("replica_set_changes_total", change="ejected") == 0


# --- the death of a replica ---------------------------------------------------------------------


def dies(framing: str, how: str, gate: threading.Event) -> Behaviour:
    """Send half an answer in this framing and, once the gate is open, die."""
    head = {
        "chunked": b"Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n",
        "length": b"Content-Length: 100\r\n\r\nhalf",
        "within a chunk": b"Transfer-Encoding: chunked\r\n\r\n64\r\nhalf",
        "until the end": b"\r\nhalf",
    }[framing]

    async def behave(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.send(b"HTTP/1.1 200 OK\r\n" + head)
        await exchange.wait_for(gate)
        if how == "fin":
            exchange.close()
        else:
            exchange.reset()

    return behave


# For an answer that goes on until the end a FIN is its proper end.
DEATHS = [
    (framing, how)
    for framing in ("chunked", "within a chunk", "length", "until the end")
    for how in ("fin", "rst")
    if (framing, how) != ("until the end", "fin")
]


@pytest.mark.parametrize(("framing", "how"), DEATHS)
@pytest.mark.parametrize("version", [request(), HTTP10], ids=["1.1", "1.0"])
@pytest.mark.parametrize("when", ["in mid-stream", "at once"])
def test_the_death_of_a_replica_never_looks_like_a_clean_end(
    framing: str,
    how: str,
    version: bytes,
    when: str,
    replica_factory: ReplicaFactory,
    start_balancer: StartBalancer,
) -> None:
    """gpustack issue 5939."""
    a, b = replica_factory(), replica_factory()
    gate = threading.Event()
    if when == "at once":
        gate.set()
    a.behave(dies(framing, how, gate))
    balancer = start_balancer(a, b, policy="round_robin")
    with balancer.client() as client:
        client.send(version)
        if when == "in mid-stream":
            client.read_until(b"half")
            gate.set()
        with pytest.raises(Closed) as caught:
            client.read(1000)
        assert caught.value.reset
        assert not caught.value.received.endswith(b"0\r\n\r\n")
    reason = "truncated" if how == "fin" else "reset"
    assert balancer.metric("upstream_errors_total", reason=reason) == 1
    assert balancer.metric("requests_total", outcome="upstream_error") == 1
    assert balancer.in_flight() == 0
    assert not b.requests, "it was sent again after the commit point"


def test_what_was_sent_ahead_of_a_cut_answer_is_not_begun(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a, gate = replica_factory(), threading.Event()
    a.behave(dies("length", "fin", gate))
    balancer = start_balancer(a)
    with balancer.client() as client:
        client.send(request() + request("POST", "/never", body=b"x"))
        client.read_until(b"half")
        gate.set()
        with pytest.raises(Closed):
            client.read(100)
    balancer.wait_for(lambda: not len(balancer.balancer.plane.server))
    assert [each.target for each in a.requests] == [b"/"]
    assert balancer.metric("requests_total") == 1


@pytest.mark.parametrize(("framing", "how"), DEATHS)
@pytest.mark.parametrize("version", ["--http1.1", "--http1.0"])
def test_curl_tells_that_the_answer_was_cut(
    framing: str,
    how: str,
    version: str,
    replica_factory: ReplicaFactory,
    start_balancer: StartBalancer,
) -> None:
    a = replica_factory()
    gate = threading.Event()
    a.behave_always(dies(framing, how, gate))
    balancer = start_balancer(a)
    host, port = balancer.address
    with subprocess.Popen(
        ["curl", "-sSN", "--max-time", "20", version, f"http://{host}:{port}/"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as curl:
        assert curl.stdout is not None
        assert curl.stdout.read(4) == b"half"
        gate.set()
        rest, why = curl.communicate(timeout=20)
    assert curl.returncode in (18, 56), why
    assert rest == b""
    assert balancer.metric("requests_total", outcome="upstream_error") == 1
    assert balancer.metric("retries_total") == 0


def test_an_answer_that_goes_on_until_the_end_ends_cleanly(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    """The counterpart: HTTP/1.1 clients get it in chunks, those of HTTP/1.0 with a FIN."""
    a = replica_factory()
    gate = threading.Event()
    gate.set()
    a.behave_always(dies("until the end", "fin", gate))
    balancer = start_balancer(a)
    with balancer.client() as client:
        assert client.ask(request()).raw_body == b"4\r\nhalf\r\n0\r\n\r\n"
    with balancer.client() as client:
        assert client.ask(HTTP10).body == b"half"
    assert balancer.metric("requests_total", outcome="ok") == 2


# --- changes of the ready list ------------------------------------------------------------------


@pytest.mark.parametrize("framing", ["chunked", "until the end"])
@pytest.mark.parametrize("version", [request(), HTTP10], ids=["1.1", "1.0"])
def test_the_stream_of_a_replica_that_left_is_cut_at_the_drain_timeout_and_not_before(
    framing: str,
    version: bytes,
    replica_factory: ReplicaFactory,
    start_balancer: StartBalancer,
    fake_controller: object,
) -> None:
    """ray pull request 65698, caddy issue 5471."""
    a, b = replica_factory(), replica_factory()
    head = b"Transfer-Encoding: chunked\r\n" if framing == "chunked" else b""

    async def endless(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.send(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n")
        while True:
            await exchange.send(b"4\r\ntick\r\n" if head else b"tick")
            await exchange.wait(0.05)

    a.behave(endless)
    balancer = start_balancer(a, grace_period="0", drain_timeout="800ms", sync_interval="100ms")
    with balancer.client() as client:
        client.send(version)
        client.read_until(b"tick")
        removed = time.monotonic()
        fake_controller.set_ready([b.url])  # type: ignore[attr-defined]
        with pytest.raises(Closed) as caught:
            client.read(1_000_000)
        assert 0.7 < time.monotonic() - removed < 6
        assert caught.value.reset, "it looks like a clean end"
        assert not caught.value.received.endswith(b"0\r\n\r\n")
    a.wait_for(lambda: a.requests[0].peer_closed_at)
    assert balancer.get().status == 200
    assert len(b.requests) == 1
    assert balancer.in_flight() == 0


def test_a_request_that_waits_on_a_replica_that_is_cut_off_goes_to_another(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer, fake_controller: object
) -> None:
    a, b = replica_factory("a"), replica_factory("b")
    gate = threading.Event()

    async def never(exchange: Exchange) -> None:
        await exchange.wait_for(gate)

    a.behave(never)
    balancer = start_balancer(a, grace_period="0", drain_timeout="300ms", sync_interval="100ms")
    with balancer.client() as client:
        client.send(request())
        a.wait_for(lambda: a.requests)
        fake_controller.set_ready([b.url])  # type: ignore[attr-defined]
        assert client.answer().body == b"b"


@pytest.fixture
def two_streams(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> Iterator[tuple[RunningBalancer, ScriptedReplica, threading.Event]]:
    gate = threading.Event()
    a = replica_factory()
    a.behave_always(stream([b"begun", gate, b"more"]))
    yield start_balancer(a, sync_interval="100ms", grace_period="100ms"), a, gate
    gate.set()


def test_a_change_of_the_list_never_touches_a_running_stream(
    two_streams: tuple[RunningBalancer, ScriptedReplica, threading.Event],
    replica_factory: ReplicaFactory,
    fake_controller: object,
) -> None:
    """caddy issue 5471: B is added and removed, the list goes empty, A is removed and comes back."""
    balancer, a, gate = two_streams
    b = replica_factory()
    with balancer.client() as client:
        client.send(request())
        client.read_until(b"\r\n\r\n")
        assert client.chunk() == b"begun"
        for urls in ([a.url, b.url], [a.url], [], [b.url], [a.url]):
            fake_controller.set_ready(urls)  # type: ignore[attr-defined]
            for _ in range(3):
                fake_controller.wait_for_sync()  # type: ignore[attr-defined]
        assert balancer.call(lambda: len(balancer.balancer.plane.proxy.running)) == 1
        gate.set()
        assert client.chunk() == b"more"
        assert client.chunk() == b""
