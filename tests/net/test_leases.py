"""In-flight counts, however a request ends; and the arrivals that the controller is told of."""

from __future__ import annotations

import random
import threading
import time

import pytest

from controller_client.testing import (
    Answer,
    FakeController,
    ReplicaFactory,
    answer,
    cut,
    hang_up,
    raw,
    reset,
    stall,
    stream,
)
from tests.net.conftest import StartBalancer
from tests.net.harness import Closed, request

HALF_A_BODY = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n" + b"x" * 500


def test_counts_are_zero_after_requests_that_failed_in_every_way(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    """SkyPilot issue 10444: the stock balancer leaks a count with each error."""
    a = replica_factory()
    a.behave_always(
        answer(),
        reset(),
        hang_up(),
        cut(how="rst"),
        cut(how="fin"),
        raw(b"no http\r\n\r\n", close=True),
        answer(status=500),
        raw(b"HTTP/1.1 200 OK\r\nContent-Le", close=True),
        stall(),
    )
    balancer = start_balancer(
        a, total_timeout="200ms", no_replica_wait="100ms", connect_timeout="100ms"
    )
    statuses = set()
    for number in range(200):
        try:
            statuses.add(balancer.get("/", timeout=5).status)
        except Closed:
            statuses.add(0)
        if number == 100:
            a.refuse()
        elif number == 150:
            a.accept()
    assert statuses == {0, 200, 500, 502, 503, 504}, "0: cut off after its head"
    assert balancer.in_flight() == 0
    assert balancer.metric("inflight_requests") == 0
    assert len(balancer.log.wait_for("request.finished", 200)) == 200


@pytest.mark.parametrize("seed", [1])
def test_counts_are_zero_after_clients_left_at_every_await(
    seed: int, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    """vllm router pull request 215, oxy issue 112, litellm issue 42222."""
    chance = random.Random(seed)
    a, b = replica_factory(), replica_factory()
    gate = threading.Event()
    slow_stream = stream([b"x" * 1000] * 50, every=0.01)
    for replica in (a, b):
        replica.behave_always(stall(), slow_stream, answer(delay=0.05), stream([b"1", gate]))
    balancer = start_balancer(a, b)
    for number in range(200):
        with balancer.client() as client:
            client.send(HALF_A_BODY if number % 3 == 0 else request())
            time.sleep(chance.choice([0, 0, 0.001, 0.005, 0.02]))
    balancer.wait_for(lambda: not balancer.balancer.plane.proxy.running, seconds=3)
    assert balancer.in_flight() == 0
    gone = balancer.metric("client_disconnects_total")
    finished = balancer.metric("requests_total")
    assert gone > 150
    assert balancer.metric("requests_total", outcome="client_closed") == gone
    assert balancer.metric("requests_total", outcome="ok") == finished - gone
    assert balancer.metric("retries_total") == 0, "a leaving client was taken for a failure"
    assert balancer.metric("replica_set_changes_total", change="ejected") == 0
    for replica in (a, b):
        replica.wait_for(lambda r=replica: r.open_connections <= 40)


def test_counts_are_zero_after_clients_left_while_there_was_no_replica(
    start_balancer: StartBalancer,
) -> None:
    balancer = start_balancer(no_replica_wait="20s")
    clients = [balancer.client() for _ in range(20)]
    for client in clients:
        client.send(request())
    balancer.wait_for(lambda: len(balancer.balancer.plane.proxy.running) == 20)
    for client in clients:
        client.sock.close()
    balancer.wait_for(lambda: not balancer.balancer.plane.proxy.running, seconds=1)
    assert balancer.metric("client_disconnects_total", phase="before_head") == 20


def test_counts_are_zero_after_clients_left_while_a_connect_hangs(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    balancer = start_balancer(a)
    a.stall_connects()
    clients = [balancer.client() for _ in range(5)]
    for client in clients:
        client.send(request())
    balancer.wait_for(lambda: len(balancer.balancer.plane.proxy.running) == 5)
    for client in clients:
        client.sock.close()
    balancer.wait_for(lambda: not balancer.balancer.plane.proxy.running, seconds=1)
    assert balancer.in_flight() == 0


def test_every_arrival_is_reported_exactly_once_though_every_third_sync_fails(
    fake_controller: FakeController, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    """SkyPilot issue 4444."""
    fake_controller.answer_always(
        Answer(),
        Answer(),
        Answer(status=500, stored=False),
        Answer(),
        Answer(),
        Answer(unread=True),
    )
    balancer = start_balancer(replica_factory(), sync_interval="50ms")
    before = time.time()
    with balancer.client() as client:
        for _ in range(1000):
            assert client.ask(request()).status == 200
    fake_controller.wait_for(lambda: len(fake_controller.arrivals) >= 1000)
    fake_controller.answer_always()
    fake_controller.wait_for_sync()
    fake_controller.wait_for_sync()
    assert len(fake_controller.arrivals) == 1000
    assert all(before <= arrival <= time.time() for arrival in fake_controller.arrivals)
    failed = balancer.metric("sync_total", result="http_error")
    assert failed >= 1
    assert balancer.metric("arrivals_pending") == 0
    assert balancer.metric("arrivals_dropped_total") == 0


def test_arrivals_survive_a_controller_that_is_away(
    fake_controller: FakeController, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    balancer = start_balancer(replica_factory())
    fake_controller.refuse()
    balancer.log.wait_for("sync.failed")
    for _ in range(10):
        assert balancer.get().status == 200
    seen = len(fake_controller.arrivals)
    fake_controller.accept()
    fake_controller.wait_for(lambda: len(fake_controller.arrivals) == seen + 10)
