"""Bodies up and down: whole, with bounded memory, early answers, duplex.

`SKYSERVE_SOAK=1` makes the large bodies 200 MiB rather than 64.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from controller_client.testing import (
    Exchange,
    FakeController,
    ReplicaFactory,
    ScriptedReplica,
    answer,
    early,
    reset,
    stall,
)
from tests.net.conftest import StartBalancer
from tests.net.harness import Closed, RawClient, RunningBalancer, request

MIB = 1024 * 1024
LARGE_MIB = 200 if os.environ.get("SKYSERVE_SOAK") else 64
BLOCK = random.Random(7).randbytes(MIB)
ROOT = Path(__file__).parents[2]

CHUNKED_HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


def pieces(mib: int) -> Iterator[bytes]:
    """A body of so many MiB, no two of which are alike."""
    for number in range(mib):
        yield BLOCK[number:] + BLOCK[:number]


def digest(mib: int) -> str:
    whole = hashlib.sha256()
    for piece in pieces(mib):
        whole.update(piece)
    return whole.hexdigest()


def framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def send_large(client: RawClient, mib: int, framing: str) -> None:
    if framing == "length":
        client.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (mib * MIB))
        for piece in pieces(mib):
            client.send(piece)
    else:
        client.send(CHUNKED_HEAD)
        for piece in pieces(mib):
            client.send(framed(piece))
        client.send(b"0\r\n\r\n")


class Process:
    """A balancer as its own process, so that its memory can be told from the test's."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        self.pid = child.pid
        for line in child.stdout:
            event = json.loads(line)
            if event["event"] == "server.started":
                host, _, port = event["address"].rpartition(":")
                self.address = host, int(port)
            elif event["event"] == "replica.added":
                break

    def client(self, *, receive_buffer: int | None = None) -> RawClient:
        if receive_buffer is None:
            return RawClient(self.address)
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.connect(self.address)
        client = RawClient.__new__(RawClient)
        client.sock, client._buffer = sock, b""
        return client

    def memory(self, what: str) -> int:
        """`VmRSS` now or `VmHWM`, its highest so far; in bytes."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(what):
                return int(line.split()[1]) * 1024
        raise AssertionError(what)

    def growth(self, run: Callable[[], None]) -> int:
        """By how many bytes its memory grows at the most while this runs."""
        before = self.memory("VmRSS")
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")  # the highest so far is now
        run()
        return self.memory("VmHWM") - before


@contextmanager
def balancer_process(
    controller: FakeController, *replicas: ScriptedReplica, **settings: str
) -> Iterator[Process]:
    controller.set_ready([replica.url for replica in replicas])
    values = {"controller-url": controller.url, "host": "127.0.0.1", "port": "0", **settings}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    with subprocess.Popen(
        [sys.executable, "-m", "lb", "serve", "--log-format=json", *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    ) as child:
        try:
            process = Process(child)
            # What is made once is made before anything is measured.
            with process.client() as client:
                assert client.ask(request(body=b"warm")).status == 200
            yield process
        finally:
            for _ in range(2):
                child.send_signal(signal.SIGTERM)
                time.sleep(0.05)
            child.communicate(timeout=20)


# --- large bodies, and memory -------------------------------------------------------------------


@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_a_large_upload_arrives_whole_and_is_not_held(
    framing: str, fake_controller: FakeController, replica_factory: ReplicaFactory
) -> None:
    """claude-tap pull request 2, commandcode-proxy issue 20."""
    a = replica_factory()
    with balancer_process(fake_controller, a, replay_limit="1MiB") as balancer:

        def upload() -> None:
            with balancer.client() as client:
                send_large(client, LARGE_MIB, framing)
                assert client.answer().status == 200

        growth = balancer.growth(upload)
    got = a.requests[-1]
    assert got.body_length == LARGE_MIB * MIB
    assert got.body_sha256 == digest(LARGE_MIB)
    assert growth < 12 * MIB, f"{growth / MIB:.1f} MiB"


@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_a_large_upload_that_is_kept_and_sent_again_costs_less_than_twice_its_size(
    framing: str, fake_controller: FakeController, replica_factory: ReplicaFactory
) -> None:
    """commandcode-proxy issue 20: bodies cost several times their size."""
    a = replica_factory()
    limits = {"replay_limit": "512MiB", "replay_budget": "512MiB", "policy": "round_robin"}
    with balancer_process(fake_controller, a, **limits) as balancer:
        a.behave(reset())

        def upload() -> None:
            with balancer.client() as client:
                send_large(client, LARGE_MIB, framing)
                assert client.answer().status == 200

        growth = balancer.growth(upload)
    lost, again = a.requests[-2:]
    assert lost.body_sha256 == again.body_sha256 == digest(LARGE_MIB)
    assert growth < 2 * LARGE_MIB * MIB, f"{growth / MIB:.1f} MiB"


def sends_large(mib: int, framing: str) -> Callable[[Exchange], object]:
    async def behave(exchange: Exchange) -> None:
        await exchange.read_body()
        if framing == "chunked":
            await exchange.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for piece in pieces(mib):
                await exchange.send(framed(piece))
            await exchange.send(b"0\r\n\r\n")
        else:
            await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (mib * MIB))
            for piece in pieces(mib):
                await exchange.send(piece)

    return behave


@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_a_large_download_arrives_whole_and_is_not_held(
    framing: str, fake_controller: FakeController, replica_factory: ReplicaFactory
) -> None:
    a = replica_factory()
    got = hashlib.sha256()
    with balancer_process(fake_controller, a) as balancer:
        a.behave_always(sends_large(LARGE_MIB, framing))  # type: ignore[arg-type]

        def download() -> None:
            with balancer.client() as client:
                client.send(request())
                client.read_until(b"\r\n\r\n")
                if framing == "chunked":
                    while data := client.chunk():
                        got.update(data)
                else:
                    for _ in range(LARGE_MIB):
                        got.update(client.read(MIB))

        growth = balancer.growth(download)
    assert got.hexdigest() == digest(LARGE_MIB)
    assert growth < 12 * MIB, f"{growth / MIB:.1f} MiB"


def test_a_client_that_does_not_read_stalls_the_replica_and_not_our_memory(
    fake_controller: FakeController, replica_factory: ReplicaFactory
) -> None:
    """commandcode-proxy issue 20."""
    a = replica_factory()
    with balancer_process(fake_controller, a) as balancer:
        a.behave_always(sends_large(200, "chunked"))  # type: ignore[arg-type]
        with balancer.client(receive_buffer=4096) as client:

            def never_read() -> None:
                client.send(request())
                a.wait_for(lambda: len(a.requests) == 2 and a.requests[1].bytes_sent)
                sent = -1
                while sent != a.requests[1].bytes_sent:  # until it has not moved for a second
                    sent = a.requests[1].bytes_sent
                    time.sleep(1)

            growth = balancer.growth(never_read)
            assert a.requests[1].bytes_sent < 40 * MIB, "what the kernel's buffers hold"
            assert growth < 20 * MIB, f"{growth / MIB:.1f} MiB"
            left = time.monotonic()
        seen = a.wait_for(lambda: a.requests[1].peer_closed_at)
        assert seen - left < 1


# --- replay -------------------------------------------------------------------------------------


def test_the_replay_budget_is_shared_and_given_back(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    balancer = start_balancer(a, replay_limit="80KiB", replay_budget="100KiB")
    used = lambda: balancer.balancer.plane.proxy.replay.used  # noqa: E731
    half = 60 * 1024
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (half + 1)
    with balancer.client() as first, balancer.client() as second, balancer.client() as third:
        first.send(head + b"1" * half)
        a.wait_for(lambda: [r.body_length for r in a.requests] == [half])
        assert balancer.call(used) == half
        second.send(head + b"2" * half)  # fits no more
        a.wait_for(lambda: [r.body_length for r in a.requests] == [half, half])
        assert balancer.call(used) == half
        third.send(head + b"3" * 1024)  # a small one still does
        a.wait_for(lambda: len(a.requests) == 3 and a.requests[2].body_length == 1024)
        assert balancer.call(used) == half + 1024
        a.reset_all()
        assert second.answer().status == 502
        a.wait_for(lambda: len(a.requests) == 5)
        for client, rest in ((first, b"1"), (third, b"3" * (half + 1 - 1024))):
            client.send(rest)
            assert client.answer().status == 200
    assert balancer.call(used) == 0
    whole = sorted(bytes(r.body) for r in a.requests if r.body_complete)
    assert whole == [b"1" * (half + 1), b"3" * (half + 1)]


@pytest.mark.parametrize(
    "ending", ["answer", "client leaves", "bad chunk", "time is up", "too long"]
)
def test_the_replay_budget_is_given_back_however_the_request_ends(
    ending: str, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    balancer = start_balancer(
        a, replay_limit="200KiB", total_timeout="1s" if ending == "time is up" else "30s"
    )
    used = lambda: balancer.balancer.plane.proxy.replay.used  # noqa: E731
    with balancer.client() as client:
        client.send(CHUNKED_HEAD + framed(b"x" * 100_000))
        balancer.wait_for(lambda: used() == 100_000)
        if ending == "answer":
            client.send(b"0\r\n\r\n")
            assert client.answer().status == 200
        elif ending == "bad chunk":
            client.send(b"zz\r\n")
            assert client.answer().status == 400
        elif ending == "time is up":
            assert client.answer().status == 504
        elif ending == "too long":
            client.send(framed(b"x" * 150_000))
        else:
            client.sock.close()
        balancer.wait_for(lambda: used() == 0)


def test_a_body_that_cannot_be_kept_is_not_risked_on_a_connection_that_may_be_stale(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    """It could not be sent again when the connection turns out to be closed (envoy issue 1979)."""
    a = replica_factory()
    balancer = start_balancer(a, replay_limit="1KiB")
    for _ in range(3):
        assert balancer.get().status == 200
        assert balancer.post(b"x" * 2000).status == 200
    large = [record for record in a.requests if record.method == "POST"]
    assert [record.number_on_connection for record in large] == [1, 1, 1]


# --- early answers ------------------------------------------------------------------------------

EARLY_BYTES = 50 * 1000 * 1000
EARLY_HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % EARLY_BYTES


@pytest.mark.parametrize("how", ["drain", "close"])
@pytest.mark.parametrize("status", [413, 401])
def test_an_early_answer_reaches_a_client_that_is_still_sending(
    status: int, how: str, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    """envoy issue 2929. With `close` the replica's RST follows its answer at once."""
    a = replica_factory()
    balancer = start_balancer(a)
    a.behave_always(early(status, how=how))  # type: ignore[arg-type]
    for _ in range(50):
        with balancer.client() as client:
            client.send(EARLY_HEAD)
            client.sock.setblocking(False)
            block, sent = BLOCK[:65536], 0
            while sent < EARLY_BYTES:  # as curl does: write, and look whether something can be read
                try:
                    sent += client.sock.send(block)
                except BlockingIOError:
                    pass
                try:
                    client._more()
                    break
                except BlockingIOError:
                    pass
            client.sock.settimeout(20)
            assert client.answer().status == status
    assert len(a.requests) == 50, "it was sent again"
    assert balancer.metric("requests_total", outcome="client_error") == 50
    assert balancer.metric("upstream_errors_total") == 0
    assert balancer.metric("replica_set_changes_total", change="ejected") == 0


@pytest.mark.parametrize("how", ["drain", "close"])
def test_an_early_answer_reaches_a_client_that_sends_all_before_it_reads(
    how: str, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    balancer = start_balancer(a)
    a.behave_always(early(413, how=how))  # type: ignore[arg-type]
    for _ in range(5):
        with balancer.client() as client:
            client.send(EARLY_HEAD)
            for _ in range(EARLY_BYTES // 1_000_000):
                client.send(BLOCK[:1_000_000])
            assert client.answer().status == 413
            assert client.ended()


@pytest.mark.parametrize(
    ("rest", "ends"), [(b"\r\nno", True), (b"Content-Length: 9\r\n\r\nno", False)]
)
def test_a_replica_that_sends_no_more_need_not_read_the_rest(
    rest: bytes, ends: bool, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    """Its FIN ends the answer, or cuts it, though what we have for it is never read."""
    stalled, over = threading.Event(), threading.Event()

    async def until(event: threading.Event) -> None:
        while not event.is_set():
            await asyncio.sleep(0.005)  # Exchange.wait would read

    async def half_close(exchange: Exchange) -> None:
        await until(stalled)
        await exchange.send(b"HTTP/1.1 413 Too Large\r\n" + rest)
        exchange._connection._sock.shutdown(socket.SHUT_WR)
        await until(over)

    a = replica_factory()
    a.behave(half_close)
    balancer = start_balancer(a)

    def is_full() -> bool:
        pools = balancer.balancer.plane.pools._pools.values()
        return any(connection.full for pool in pools for connection in pool._open)

    with balancer.client() as client:
        client.send(EARLY_HEAD)
        client.sock.setblocking(False)
        while not balancer.call(is_full):
            with suppress(BlockingIOError):
                client.sock.send(BLOCK[:65536])
        client.sock.settimeout(20)
        stalled.set()
        if ends:
            assert client.answer().body == b"no"
        else:
            with pytest.raises(Closed) as caught:
                client.answer()
            assert caught.value.reset
        over.set()
    assert balancer.metric("upstream_errors_total", reason="truncated") == (0 if ends else 1)


def test_what_a_replica_answered_is_read_though_writing_to_it_fails(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    """The write that meets the RST must not throw away the answer that came before it."""
    a = replica_factory()
    balancer = start_balancer(a)
    gate = threading.Event()

    async def answer_and_close(exchange: Exchange) -> None:
        await exchange.wait_for(gate)
        await early(413, how="close")(exchange)

    a.behave(answer_and_close)
    with balancer.client() as client:
        client.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 200000\r\n\r\n")

        def between() -> None:  # one turn of the loop: answer, RST and the next bytes are all here
            gate.set()
            a.wait_for(lambda: not a.open_connections)

        a.wait_for(lambda: a.requests)
        blocked = threading.Thread(target=balancer.call, args=(between,))
        blocked.start()
        client.send(b"x" * 100_000)
        blocked.join()
        assert client.answer().status == 413
    assert balancer.metric("upstream_errors_total") == 0
    assert balancer.call(balancer.balancer._pool_connections) == {"idle": 0, "active": 0}


def test_an_answer_before_the_end_of_a_slow_upload_is_passed_on_at_once(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    async def answers_at_once(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    a = replica_factory()
    a.behave(answers_at_once)
    balancer = start_balancer(a)
    with balancer.client() as client:
        client.send(CHUNKED_HEAD + framed(b"begun"))
        assert client.answer().body == b"ok"
        for _ in range(10):  # it goes on, and must not be met by an RST
            client.send(framed(b"slow"))
            time.sleep(0.02)
        client.send(b"0\r\n\r\n")
        assert client.ended()
    a.wait_for(lambda: a.requests[0].peer_closed_at)
    assert balancer.call(lambda: balancer.balancer._pool_connections()) == {"idle": 0, "active": 0}
    assert balancer.get().status == 200


# --- duplex -------------------------------------------------------------------------------------


async def echo(exchange: Exchange) -> None:
    """Answer each piece of the request as it comes."""
    await exchange.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    async for piece in exchange.body():
        await exchange.send(framed(piece))
    await exchange.send(b"0\r\n\r\n")


@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_a_replica_may_answer_while_it_reads(
    framing: str, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    a.behave_always(echo)
    balancer = start_balancer(a)
    with balancer.client() as client:
        for _ in range(2):  # the second on the same connections
            if framing == "chunked":
                client.send(CHUNKED_HEAD)
            else:
                client.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 400\r\n\r\n")
            assert b" 200 " in client.read_until(b"\r\n\r\n")
            for number in range(100):
                word = b"%04d" % number
                client.send(framed(word) if framing == "chunked" else word)
                assert client.chunk() == word
            if framing == "chunked":
                client.send(b"0\r\n\r\n")
            assert client.chunk() == b""
    assert [record.number_on_connection for record in a.requests] == [1, 2]
    assert balancer.metric("requests_total", outcome="ok") == 2


def test_large_bodies_both_ways_at_a_time(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    a.behave_always(echo)
    balancer = start_balancer(a)
    with balancer.client() as client:
        sender = threading.Thread(target=send_large, args=(client, 16, "chunked"))
        sender.start()
        got = client.answer()
        sender.join()
    assert hashlib.sha256(got.body).hexdigest() == digest(16)


# --- bodies that break the rules ----------------------------------------------------------------


@pytest.mark.parametrize("rubbish", [b"zz\r\n", b"5 5\r\nhello\r\n", b"3\r\nabcdef\r\n", b"-1\r\n"])
def test_a_bad_chunk_in_mid_upload(
    rubbish: bytes, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a, b = replica_factory(), replica_factory()
    balancer = start_balancer(a, b, policy="round_robin")
    with balancer.client() as client:
        client.send(CHUNKED_HEAD + framed(b"good"))
        a.wait_for(lambda: a.requests and a.requests[0].body_length == 4)
        client.send(rubbish)
        refused = client.answer()
        assert refused.status == 400
        assert refused.values(b"connection") == [b"close"]
        assert client.ended()
    a.wait_for(lambda: a.requests[0].peer_closed_at)
    assert not a.requests[0].body_complete
    assert not b.requests, "it was sent again"
    assert balancer.metric("requests_total", outcome="client_error") == 1
    assert balancer.metric("replica_set_changes_total", change="ejected") == 0


def test_a_bad_chunk_after_the_answer_has_begun_is_no_clean_end(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    a.behave(echo)
    balancer = start_balancer(a)
    with balancer.client() as client:
        client.send(CHUNKED_HEAD + framed(b"good"))
        client.read_until(b"\r\n\r\n")
        assert client.chunk() == b"good"
        client.send(b"zz\r\n")
        with pytest.raises(Closed) as caught:
            client.chunk()
        assert not caught.value.received
    a.wait_for(lambda: a.requests[0].peer_closed_at)
    assert balancer.metric("requests_total", outcome="client_error") == 1


def test_a_connection_with_half_a_request_on_it_is_never_used_again(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    """The replica has answered; the upload fails while the client has not yet read the answer."""

    # In parts, for what comes when the client is full is left with the replica: the kernel takes the
    # first, the balancer has the second, and with the third the client is full.
    parts, turns = (60_000, 60_000, 30_000), [threading.Event() for _ in range(3)]

    async def answers_without_reading(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: 150000\r\n\r\n")
        for part, turn in zip(parts, turns, strict=True):
            await exchange.wait_for(turn)
            await exchange.send(b"y" * part)

    a = replica_factory()
    balancer = start_balancer(a)
    with balancer.client() as client:
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        balancer.wait_for(lambda: len(balancer.balancer.plane.server) == 1)
        balancer.call(lambda: shrink_send_buffers(balancer))
        a.behave(answers_without_reading)
        client.send(CHUNKED_HEAD + framed(b"begun"))

        def passed_on() -> int:
            return next(iter(balancer.balancer.plane.proxy.running)).bytes_out

        a.wait_for(lambda: a.requests)
        for sent, turn in zip((60_000, 120_000, 150_000), turns, strict=True):
            turn.set()
            balancer.wait_for(lambda sent=sent: passed_on() == sent)  # type: ignore[misc]
        client.send(b"zz\r\n")
        balancer.wait_for(lambda: connections_of(balancer)[0]._fault)
        assert client.answer().body == b"y" * 150_000
    balancer.wait_for(lambda: not balancer.balancer.plane.proxy.running)
    assert balancer.get().status == 200
    a.wait_for(lambda: a.requests[0].peer_closed_at)
    assert a.requests[1].number_on_connection == 1


def connections_of(balancer: RunningBalancer) -> list:  # type: ignore[type-arg]
    return list(balancer.balancer.plane.server._connections)


def shrink_send_buffers(balancer: RunningBalancer) -> None:
    for connection in connections_of(balancer):
        sock = connection.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


def test_a_client_that_leaves_in_a_pause_between_attempts_stays_gone(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    """The upload of the failed attempt is being ended at the moment at which the client leaves."""
    a, b = replica_factory(), replica_factory()
    balancer = start_balancer(a, b, policy="round_robin")
    a.behave_always(stall())
    with balancer.client() as client:
        client.send(CHUNKED_HEAD + framed(b"begun"))
        a.wait_for(lambda: a.requests and a.requests[0].body_length == 5)

        def both_at_once() -> None:
            a.reset_all()
            client.sock.close()
            time.sleep(0.05)

        balancer.call(both_at_once)
    balancer.wait_for(lambda: not balancer.balancer.plane.proxy.running, seconds=2)
    assert balancer.in_flight() == 0
    assert balancer.metric("client_disconnects_total", phase="request_body") == 1


def test_own_answers_leave_the_connection_usable_after_a_whole_body(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    a.behave(answer(b"1"), answer(b"2"))
    balancer = start_balancer(a)
    with balancer.client() as client:
        for number in (b"1", b"2"):
            assert client.ask(CHUNKED_HEAD + framed(b"x" * 300_000) + b"0\r\n\r\n").body == number
