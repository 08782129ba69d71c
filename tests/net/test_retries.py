"""Attempts that fail before the commit point: what is sent again, where to, and for how long."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from controller_client.testing import (
    ReplicaFactory,
    ScriptedReplica,
    answer,
    cut,
    hang_up,
    reset,
    stale,
    stall,
)
from tests.net.conftest import StartBalancer
from tests.net.harness import Closed, RunningBalancer, chunked, request


def refusing(replica: ScriptedReplica) -> None:
    replica.refuse()


def resetting(replica: ScriptedReplica) -> None:
    replica.behave_always(reset())


def hanging_up(replica: ScriptedReplica) -> None:
    replica.behave_always(hang_up())


def stalling_connects(replica: ScriptedReplica) -> None:
    replica.stall_connects()


WAYS_TO_BE_DEAD = [refusing, resetting, hanging_up, stalling_connects]
MakeDead = Callable[[ScriptedReplica], None]


@pytest.mark.parametrize("make_dead", WAYS_TO_BE_DEAD, ids=lambda way: way.__name__)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_dead_replica_that_is_still_listed_costs_no_answer(
    make_dead: MakeDead,
    method: str,
    replica_factory: ReplicaFactory,
    start_balancer: StartBalancer,
) -> None:
    """litellm issue 27362: a dead replica always looks least loaded; SkyPilot pull request 3916."""
    a, b = replica_factory(), replica_factory()
    balancer = start_balancer(a, b, connect_timeout="300ms")
    make_dead(a)
    for _ in range(100):
        with balancer.client() as client:
            assert client.ask(request(method, body=b"x" * 10)).status == 200
    assert len(b.requests) == 100
    tries = balancer.metric("upstream_errors_total")
    assert 1 <= tries <= 5, f"{tries} of 100 requests tried the dead replica"
    assert balancer.metric("retries_total") == tries
    assert balancer.in_flight() == 0


@pytest.mark.parametrize("make_dead", [refusing, stalling_connects], ids=lambda way: way.__name__)
def test_a_dead_replica_alone_is_still_tried_and_used_again_when_it_is_back(
    make_dead: MakeDead, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    balancer = start_balancer(a, connect_timeout="200ms", no_replica_wait="500ms")
    make_dead(a)
    for _ in range(3):
        refused = balancer.get()
        assert refused.status == 503
        assert refused.detail.startswith("No ready replicas.")
        assert refused.values(b"retry-after")
    assert balancer.metric("rejected_requests_total", reason="all_ejected") == 3
    assert balancer.metric("upstream_errors_total") > 3
    a.accept()
    assert balancer.get().status == 200


def test_a_replica_that_is_back_is_used_again_after_its_probe(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a, b = replica_factory(), replica_factory()
    balancer = start_balancer(a, b)
    a.refuse()
    for _ in range(4):
        assert balancer.get().status == 200
    balancer.log.wait_for("replica.ejected")
    a.accept()
    started = time.monotonic()
    while not balancer.log.named("replica.restored"):
        assert balancer.get().status == 200
        assert time.monotonic() - started < 3.0, "1 s of ejection, and 2 s after it"
    before = len(a.requests)
    for _ in range(10):
        assert balancer.get().status == 200
    assert len(a.requests) == before + 5


def test_a_request_waiting_for_refusing_replicas_is_answered_when_one_is_back(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    balancer = start_balancer(a)
    a.refuse()
    with balancer.client() as client:
        client.send(request("POST", body=b"body"))
        balancer.log.wait_for("request.retried", 2)
        a.accept()
        assert client.answer().status == 200
    assert [record.body for record in a.requests] == [b"body"]


@pytest.mark.parametrize(
    "body",
    [request("POST", body=b"x" * 5_000_000), request("POST", headers={"Transfer-Encoding": "chunked"})
     + chunked(*[b"y" * 50_000] * 100)],
    ids=["length", "chunked"],
)  # fmt: skip
@pytest.mark.parametrize("make_dead", [refusing, resetting], ids=lambda way: way.__name__)
def test_the_body_goes_to_the_next_replica_unharmed(
    make_dead: MakeDead,
    body: bytes,
    replica_factory: ReplicaFactory,
    start_balancer: StartBalancer,
) -> None:
    """caddy issue 5454."""
    a, b = replica_factory(), replica_factory()
    balancer = start_balancer(a, b)
    make_dead(a)
    with balancer.client() as client:
        assert client.ask(body).status == 200
    kind = b"x" if b"Content-Length" in body[:200] else b"y"
    assert b.requests[0].body_length == 5_000_000
    assert set(b.requests[0].body) == set(kind)
    assert balancer.metric("received_bytes_total") == 5_000_000


def test_a_body_beyond_the_replay_limit_is_single_attempt_once_it_is_lost(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a, b = replica_factory(), replica_factory()
    balancer = start_balancer(a, b, replay_limit="1KiB", policy="round_robin")
    a.behave_always(reset())
    assert balancer.post(b"x" * 2000).status == 502
    assert len(b.requests) == 0
    assert balancer.call(lambda: balancer.balancer.plane.proxy.replay.used) == 0


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("GET", {}, 200),
        ("DELETE", {}, 200),
        ("POST", {}, 502),
        ("POST", {"Idempotency-Key": "k"}, 200),
        ("PATCH", {}, 502),
    ],
)
def test_with_retry_safe_a_lost_request_is_sent_again_only_where_that_does_no_harm(
    method: str,
    headers: dict[str, str],
    status: int,
    replica_factory: ReplicaFactory,
    start_balancer: StartBalancer,
) -> None:
    a, b = replica_factory(), replica_factory()
    balancer = start_balancer(a, b, retry="safe", policy="round_robin")
    a.behave_always(reset())
    with balancer.client() as client:
        assert client.ask(request(method, headers=headers)).status == status
    assert len(b.requests) == (1 if status == 200 else 0)


def test_a_request_that_breaks_replicas_is_sent_three_times_at_the_most(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    replicas = [replica_factory() for _ in range(5)]
    for replica in replicas:
        replica.behave_always(reset())
    balancer = start_balancer(*replicas)
    answered = balancer.get()
    assert answered.status == 502
    assert "3 attempts" in answered.detail
    assert sum(len(replica.requests) for replica in replicas) == 3
    assert balancer.metric("retries_exhausted_total") == 1


@pytest.mark.parametrize("status", [400, 429, 500, 502, 503])
def test_an_answer_is_never_retried_and_never_held_against_the_replica(
    status: int, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    """vllm router pull request 148, envoy issue 3263."""
    a = replica_factory()
    a.behave_always(answer(b"no", status=status))
    balancer = start_balancer(a)
    for _ in range(20):
        answered = balancer.get()
        assert (answered.status, answered.body) == (status, b"no")
    assert len(a.requests) == 20
    assert balancer.metric("replicas", state="ejected") == 0
    outcome = "upstream_error" if status >= 500 else "client_error"
    assert balancer.metric("requests_total", outcome=outcome) == 20


@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_stale_connection_never_surfaces(
    how: str, method: str, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    """envoy issue 1979, aiohttp issue 6138: each request after the first meets a stale connection."""
    a = replica_factory()
    a.behave_always(stale(how))  # type: ignore[arg-type]
    balancer = start_balancer(a, retry="safe")
    with balancer.client() as client:
        for number in range(10):
            body = b"%d" % number if method == "POST" else b""
            assert client.ask(request(method, body=body)).status == 200
    answered = [record for record in a.requests if record.number_on_connection == 1]
    assert len(answered) == 10
    assert balancer.metric("retries_total", reason="stale_connection") == 9
    assert balancer.metric("replica_set_changes_total", change="ejected") == 0


def test_each_attempt_reaches_a_replica_exactly_once(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    """aiohttp's own client sends a GET again by itself after a disconnect."""
    a = replica_factory()
    a.behave(reset(), reset(), answer())
    balancer = start_balancer(a)
    assert balancer.get().status == 200
    assert len(a.requests) == 3
    assert balancer.log.wait_for("request.finished")[0]["attempts"] == 3


# --- the wall -----------------------------------------------------------------------------------


def refuses_for_ever(balancer: RunningBalancer, a: ScriptedReplica) -> None:
    a.refuse()


def stalls_connects(balancer: RunningBalancer, a: ScriptedReplica) -> None:
    a.stall_connects()


def never_answers(balancer: RunningBalancer, a: ScriptedReplica) -> None:
    a.behave_always(stall())


@pytest.mark.parametrize(
    ("break_it", "status"),
    [(refuses_for_ever, 503), (stalls_connects, None), (never_answers, 504)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_no_request_outlives_the_wall(
    break_it: Callable[[RunningBalancer, ScriptedReplica], None],
    status: int | None,
    replica_factory: ReplicaFactory,
    start_balancer: StartBalancer,
) -> None:
    a = replica_factory()
    balancer = start_balancer(a, total_timeout="1s", connect_timeout="400ms", no_replica_wait="1s")
    break_it(balancer, a)
    started = time.monotonic()
    answered = balancer.get()
    assert time.monotonic() - started < 1.5
    assert answered.status == status if status else answered.status in (503, 504)
    assert balancer.in_flight() == 0


def test_a_replica_that_drops_out_in_a_pause_does_not_stretch_the_wall(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    balancer = start_balancer(a, total_timeout="1s", no_replica_wait="1s")
    a.behave_always(reset())
    with balancer.client() as client:
        started = time.monotonic()
        client.send(request())
        a.wait_for(lambda: len(a.requests) >= 1)
        a.refuse()
        assert client.answer().status in (502, 503, 504)
        assert time.monotonic() - started < 1.5


def test_the_wall_does_not_cut_a_slow_replica_that_works(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    """freellmapi pull request 694: running out of time must not be mistaken for another failure."""
    a = replica_factory()
    a.behave_always(answer(b"slow", delay=1.5))
    balancer = start_balancer(a, total_timeout="3s", connect_timeout="1s", no_replica_wait="1s")
    assert balancer.get().body == b"slow"


def test_retries_are_quick(replica_factory: ReplicaFactory, start_balancer: StartBalancer) -> None:
    """production-stack issue 382: A refuses, B is fine; the first byte comes within 300 ms."""
    a, b = replica_factory(), replica_factory()
    a.refuse()
    balancer = start_balancer(a, b)
    started = time.monotonic()
    assert balancer.get().status == 200
    assert time.monotonic() - started < 0.3


@pytest.mark.parametrize("policy", ["least_load", "round_robin"])
def test_an_idle_pool_is_used_evenly(
    policy: str, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    """litellm pull request 40401."""
    replicas = [replica_factory() for _ in range(4)]
    balancer = start_balancer(*replicas, policy=policy)
    for _ in range(40):
        assert balancer.get().status == 200
    assert [len(replica.requests) for replica in replicas] == [10] * 4


def test_the_end_of_an_answer_that_is_cut_is_no_good_end(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    a.behave(cut(b"half", declared=100))
    balancer = start_balancer(a)
    with balancer.client() as client:
        client.send(request())
        with pytest.raises(Closed) as caught:
            client.answer()
        assert not caught.value.received.endswith(b"0\r\n\r\n")
    assert balancer.metric("upstream_errors_total", reason="truncated") == 1
    assert balancer.metric("requests_total", outcome="upstream_error") == 1
