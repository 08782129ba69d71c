"""The end of the process: what was begun is finished, and what comes late is told so.

New connections are still taken for a second: whoever sends them has not yet been told, by /readyz or
by the service in between, that we leave. After that they are refused.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from controller_client.testing import (
    Answer,
    FakeController,
    ReplicaFactory,
    ScriptedReplica,
    answer,
    hold,
    stream,
)
from tests.net.harness import Closed, RawClient, RunningBalancer, chunked, request
from tests.net.test_upgrades import echo, switch, upgraded
from tests.system.process import Serve


@pytest.fixture
def a(replica_factory: ReplicaFactory, fake_controller: FakeController) -> ScriptedReplica:
    """The one replica of the ready list."""
    replica = replica_factory()
    fake_controller.set_ready([replica.url])
    return replica


def started(serve: Serve) -> Serve:
    serve.wait_for_replicas(1)
    return serve


def test_100_idle_and_20_busy_clients(a: ScriptedReplica, fake_controller: FakeController) -> None:
    """ray serve issue 41726, haproxy issue 1506."""
    go = threading.Event()
    with Serve(fake_controller.url) as serve, contextlib.ExitStack() as stack:
        started(serve)
        idle = [stack.enter_context(serve.client()) for _ in range(100)]
        for client in idle:
            assert client.ask(request()).status == 200
        a.behave_always(stream([b"first", go, b"last"]))
        busy = [stack.enter_context(serve.client()) for _ in range(20)]
        for client in busy:
            assert client.ask(request(), head_only=True).status == 200
            assert client.chunk() == b"first"

        serve.signal()
        (line,) = serve.log.wait_for("drain.started")
        assert line["in_flight"] == 20
        assert serve.ask_admin("/readyz").body == b"draining\n"
        for client in idle:
            assert client.ended(), "an idle connection was reset"
        assert serve.process.poll() is None

        go.set()
        for client in busy:
            assert (client.chunk(), client.chunk()) == (b"last", b"")
            assert client.ended()
        done = time.monotonic()
        assert serve.exit_code() == 0
        assert time.monotonic() - done < 5
        serve.log.wait_for("server.stopped")
        assert [line["event"] for line in serve.log.events[-2:]] == [
            "drain.finished",
            "server.stopped",
        ]


def test_a_request_on_an_idle_connection_right_after_the_signal(
    a: ScriptedReplica, fake_controller: FakeController
) -> None:
    with Serve(fake_controller.url) as serve, contextlib.ExitStack() as stack:
        started(serve)
        clients = [stack.enter_context(serve.client()) for _ in range(10)]
        for client in clients:
            assert client.ask(request()).values(b"connection") == []
        serve.signal()
        serve.log.wait_for("drain.started")
        for client in clients:
            answered = client.ask(request("POST", body=b"x"))
            assert (answered.status, answered.values(b"connection")) == (200, [b"close"])
            assert client.ended()
        assert serve.exit_code() == 0


def test_new_connections_are_taken_for_a_moment_and_then_refused(
    a: ScriptedReplica, fake_controller: FakeController
) -> None:
    go = threading.Event()
    a.behave(hold(go))
    with Serve(fake_controller.url) as serve, serve.client() as busy:
        started(serve)
        busy.send(request())
        a.wait_for(lambda: a.requests)
        serve.signal()
        serve.log.wait_for("drain.started")
        begun = time.monotonic()
        late = serve.ask(request())
        assert (late.status, late.values(b"connection")) == (200, [b"close"])
        while accepts(serve) and time.monotonic() < begun + 5:
            time.sleep(0.02)
        assert 0.5 < time.monotonic() - begun < 2
        go.set()
        assert busy.answer().status == 200
        assert serve.exit_code() == 0


def accepts(serve: Serve) -> bool:
    try:
        serve.client().sock.close()
    except ConnectionRefusedError:
        return False
    return True


def test_an_upload_in_progress_is_finished(
    a: ScriptedReplica, fake_controller: FakeController
) -> None:
    with Serve(fake_controller.url) as serve, serve.client() as client:
        started(serve)
        client.send(
            b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n"
        )
        a.wait_for(lambda: a.requests and a.requests[0].body_length == 5)
        serve.signal()
        serve.log.wait_for("drain.started")
        time.sleep(1.2)  # past the last call
        client.send(chunked(b"last"))
        assert client.answer().status == 200
        assert a.requests[0].body == b"firstlast"
        assert serve.exit_code() == 0


def test_an_answer_that_a_slow_client_has_not_read_yet_is_sent_whole(
    a: ScriptedReplica, fake_controller: FakeController
) -> None:
    body = os.urandom(12_000_000)
    a.behave(answer(body))
    with Serve(fake_controller.url) as serve:
        started(serve)
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(20)
        client.connect(serve.address)
        with client:
            client.sendall(request())
            a.wait_for(lambda: a.requests)
            serve.signal()
            serve.log.wait_for("drain.started")
            time.sleep(1.5)
            received = bytearray()
            while data := client.recv(1 << 20):
                received += data
        assert received.endswith(body)
        assert serve.exit_code() == 0


def test_an_answer_of_which_a_part_is_still_in_our_buffer_is_sent_whole(
    a: ScriptedReplica, fake_controller: FakeController
) -> None:
    """The replica is done with it, and so is the request's path: only the client is slow."""
    sent = 0
    with RunningBalancer(fake_controller.url) as balancer:

        def unsent() -> int:
            clients = balancer.balancer.plane.server._connections
            return sum(client.transport.get_write_buffer_size() for client in set(clients))

        def until_it_is_full() -> Iterator[bytes]:
            nonlocal sent
            while not unsent():
                sent += 4096
                yield bytes(4096)
                time.sleep(0.001)  # or far more would be on its way when we look

        a.behave(stream(until_it_is_full()))
        balancer.wait_for_replicas(1)
        with balancer.client() as client:
            client.send(request())
            balancer.log.wait_for("request.finished")
            assert unsent()
            balancer.call(balancer.balancer.drain)
            balancer.log.wait_for("drain.started")
            time.sleep(1.2)  # past the last call
            assert len(client.answer().body) == sent
        balancer.log.wait_for("drain.finished")


def test_what_is_left_when_the_time_is_over_is_cut(
    a: ScriptedReplica, fake_controller: FakeController
) -> None:
    """An HTTP/1.0 client would take a clean end for that of the answer."""
    a.behave_always(stream([b"first", threading.Event()]))
    with Serve(fake_controller.url, "--drain-timeout", "1500ms") as serve:
        started(serve)
        with serve.client() as new, serve.client() as old:
            assert new.ask(request(), head_only=True).status == 200
            assert new.chunk() == b"first"
            assert old.ask(b"GET / HTTP/1.0\r\n\r\n", head_only=True).status == 200
            assert old.read(5) == b"first"
            serve.signal()
            begun = time.monotonic()
            for client in (new, old):
                with pytest.raises(Closed) as caught:
                    client.read(1)
                assert caught.value.reset
            assert serve.exit_code() == 0
            assert 1.4 < time.monotonic() - begun < 3
        (line,) = serve.log.wait_for("drain.forced")
        assert line["in_flight"] == 2
        for line in serve.log.wait_for("request.finished", 2):
            assert (line["outcome"], line["reason"]) == ("lb_error", "shutting_down")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(
    number: int, a: ScriptedReplica, fake_controller: FakeController
) -> None:
    a.behave(stream([b"first", threading.Event()]))
    with Serve(fake_controller.url) as serve, serve.client() as client:
        started(serve)
        assert client.ask(request(), head_only=True).status == 200
        serve.signal(number)
        serve.log.wait_for("drain.started")
        assert serve.process.poll() is None
        serve.signal(number)
        begun = time.monotonic()
        assert serve.exit_code() == 0
        assert time.monotonic() - begun < 1
        serve.log.wait_for("drain.forced")


def test_a_drain_asked_for_on_the_admin_port(
    a: ScriptedReplica, fake_controller: FakeController
) -> None:
    with Serve(fake_controller.url) as serve:
        started(serve)
        assert serve.ask_admin("/drain", "POST").status == 202
        assert serve.exit_code() == 0


def test_websockets_are_ended_and_do_not_hold_the_end_up(
    a: ScriptedReplica, fake_controller: FakeController
) -> None:
    a.behave_always(switch(echo))
    with Serve(fake_controller.url) as serve, contextlib.ExitStack() as stack:
        started(serve)
        clients = [stack.enter_context(serve.client()) for _ in range(20)]
        for client in clients:
            upgraded(client)
        serve.signal()
        for client in clients:
            assert client.read(4) == b"\x88\x02\x03\xe9"
            client.sock.close()
        assert serve.exit_code(5) == 0


def test_half_a_request_head_does_not_hold_the_end_up(
    a: ScriptedReplica, fake_controller: FakeController
) -> None:
    with Serve(fake_controller.url) as serve, serve.client() as client:
        started(serve)
        client.send(b"GET / HTTP/1.1\r\nHo")
        serve.signal()
        assert serve.exit_code(8) == 0


def gone(controller: FakeController) -> None:
    controller.refuse()
    controller.reset_all()


def silent(controller: FakeController) -> None:
    controller.answer_always(Answer(delay=math.inf))
    controller.wait_for(lambda: controller.syncs[-1].answer.delay == math.inf)


def never_there(controller: FakeController) -> None:
    controller.stall_connects()


@pytest.mark.parametrize("state", [gone, silent])
def test_the_controller_has_no_say_in_the_end(
    state: Callable[[FakeController], None], a: ScriptedReplica, fake_controller: FakeController
) -> None:
    go = threading.Event()
    a.behave(hold(go))
    with Serve(fake_controller.url) as serve, serve.client() as client:
        started(serve)
        client.send(request())
        a.wait_for(lambda: a.requests)
        state(fake_controller)
        serve.signal()
        serve.log.wait_for("drain.started")
        go.set()
        assert client.answer().status == 200
        assert serve.exit_code(8) == 0


@pytest.mark.parametrize("state", [gone, never_there])
def test_the_end_before_the_first_sync(
    state: Callable[[FakeController], None], fake_controller: FakeController
) -> None:
    state(fake_controller)
    with Serve(fake_controller.url) as serve, serve.client() as waiting:
        waiting.send(request())
        time.sleep(0.2)
        serve.signal()
        serve.log.wait_for("drain.started")
        serve.signal()
        assert serve.exit_code(8) == 0


def test_a_request_that_waits_for_a_replica_is_answered_in_a_drain(
    fake_controller: FakeController,
) -> None:
    with Serve(fake_controller.url, "--no-replica-wait", "2s") as serve:
        with serve.client() as waiting:
            waiting.send(request())
            time.sleep(0.2)
            serve.signal()
            refused = waiting.answer()
            assert (refused.status, refused.values(b"connection")) == (503, [b"close"])
        assert serve.exit_code(8) == 0


def test_a_kill_leaves_nothing_behind(
    a: ScriptedReplica, fake_controller: FakeController, tmp_path: Path
) -> None:
    """SkyPilot knows no other way to end a load balancer."""
    with Serve(fake_controller.url, cwd=tmp_path) as serve:
        started(serve)
        with serve.client() as client:
            assert client.ask(request()).status == 200
            serve.signal(signal.SIGKILL)
            assert serve.exit_code() == -signal.SIGKILL
            with pytest.raises(Closed):
                client.answer()
    assert list(tmp_path.iterdir()) == []
    a.wait_for(lambda: a.open_connections == 0)
    ports = ("--port", str(serve.address[1]), "--admin-port", str(serve.admin[1]))
    with Serve(fake_controller.url, *ports) as again:
        started(again)
        assert again.ask(request()).status == 200


def test_the_ports_are_free_at_once(a: ScriptedReplica, fake_controller: FakeController) -> None:
    """A balancer that is replaced in place: the next one binds while the last connections die down."""
    with Serve(fake_controller.url) as serve:
        started(serve)
        with serve.client() as client:
            assert client.ask(request()).status == 200
            serve.signal()
            assert serve.exit_code() == 0
    ports = ("--port", str(serve.address[1]), "--admin-port", str(serve.admin[1]))
    with Serve(fake_controller.url, *ports) as again:
        started(again)
        with RawClient(again.address) as client:
            assert client.ask(request()).status == 200


def test_arrivals_since_the_last_sync_are_reported_at_exit(
    a: ScriptedReplica, fake_controller: FakeController
) -> None:
    with Serve(fake_controller.url, "--sync-interval", "60s") as serve:
        started(serve)
        for _ in range(5):
            with serve.client() as client:
                assert client.ask(request()).status == 200
        serve.signal()
        assert serve.exit_code() == 0
    assert len(fake_controller.arrivals) == 5
