"""What the balancer makes of the controller's answers."""

from __future__ import annotations

import json
import threading
import time

import pytest

from controller_client.testing import Answer, FakeController, ReplicaFactory, stream
from tests.net.conftest import StartBalancer
from tests.net.harness import RunningBalancer, request


def test_an_empty_list_within_the_grace_period_changes_nothing_for_clients(
    fake_controller: FakeController, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    """SkyPilot issue 4907."""
    replicas = [replica_factory(), replica_factory()]
    balancer = start_balancer(*replicas, grace_period="60s")
    with balancer.client() as client:
        for _ in range(4):
            assert client.ask(request()).status == 200
        opened = [replica.connections for replica in replicas]
        fake_controller.set_ready([])
        balancer.log.wait_for("list.held")
        for _ in range(20):
            assert client.ask(request()).status == 200
        assert balancer.metric("replicas", state="held") == 2
        fake_controller.set_ready([replica.url for replica in replicas])
        balancer.log.wait_for("list.restored")
        for _ in range(4):
            assert client.ask(request()).status == 200
    assert [replica.connections for replica in replicas] == opened, "a pooled connection was lost"
    assert balancer.metric("rejected_requests_total") == 0


def test_a_list_that_stays_empty_beyond_the_grace_period_is_a_503(
    fake_controller: FakeController, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    balancer = start_balancer(replica_factory(), grace_period="300ms", no_replica_wait="100ms")
    fake_controller.set_ready([])
    balancer.log.wait_for("list.released")
    answer = balancer.get()
    assert answer.status == 503
    assert answer.detail.startswith("No ready replicas.")
    assert int(answer.values(b"retry-after")[0]) > 0
    assert answer.values(b"content-type") == [b"application/json"]
    assert balancer.metric("rejected_requests_total", reason="no_replicas") == 1


def test_a_waiting_request_is_answered_when_a_replica_appears(
    fake_controller: FakeController, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    balancer = start_balancer(no_replica_wait="20s")
    late = replica_factory()
    with balancer.client() as client:
        client.send(request())
        balancer.wait_for(lambda: len(balancer.balancer.plane.proxy.running) == 1)
        assert balancer.metric("inflight_requests") == 1
        fake_controller.set_ready([late.url])
        assert client.answer().status == 200
    assert balancer.metric("requests_total", outcome="ok") == 1


def test_a_request_that_waits_in_vain_is_refused_when_its_wait_is_over(
    start_balancer: StartBalancer,
) -> None:
    balancer = start_balancer(no_replica_wait="500ms")
    started = time.monotonic()
    answer = balancer.get()
    assert answer.status == 503
    assert 0.45 < time.monotonic() - started < 1.0


def test_before_the_first_answer_of_the_controller_the_reason_is_another(
    fake_controller: FakeController,
) -> None:
    fake_controller.answer_always(Answer(status=500))
    with RunningBalancer(fake_controller.url, no_replica_wait="100ms") as balancer:
        assert balancer.admin_get("/readyz").status == 503
        answer = balancer.get()
        assert answer.status == 503
        assert balancer.metric("rejected_requests_total", reason="not_synced") == 1


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        (Answer(status=502), "http_error"),
        (Answer(body=b"<html>"), "bad_payload"),
        (Answer(body=b"null"), "bad_payload"),
        (Answer(body=b'["http://127.0.0.1:1"]'), "bad_payload"),
        (Answer(body=b'{"replica_info": []}'), "bad_payload"),
        (Answer(body=b'{"replica_info": {"not a url": {}}}'), "bad_payload"),
        (Answer(cut=True), "connect_error"),
        (Answer(unread=True), "connect_error"),
    ],
    ids=lambda value: str(getattr(value, "body", value)),
)
def test_a_failed_sync_changes_nothing(
    answer: Answer,
    result: str,
    fake_controller: FakeController,
    replica_factory: ReplicaFactory,
    start_balancer: StartBalancer,
) -> None:
    """traefik issue 912, apisix pull request 12906."""
    replica = replica_factory()
    balancer = start_balancer(replica, grace_period="0")
    assert balancer.get().status == 200
    fake_controller.answer_next(*[answer] * 3)
    failed = balancer.log.wait_for("sync.failed")
    assert failed[0]["result"] == result
    assert balancer.get().status == 200
    balancer.log.wait_for("sync.recovered")
    assert balancer.get().status == 200
    assert balancer.metric("sync_total", result=result) >= 1
    assert not balancer.log.named("replica.removed")
    assert not balancer.log.named("list.released")


def test_a_slow_controller_is_waited_for(
    fake_controller: FakeController, replica_factory: ReplicaFactory
) -> None:
    """SkyPilot issue 8128: 8 s are more than the stock balancer's 5 s."""
    replica = replica_factory()
    fake_controller.set_ready([replica.url])
    fake_controller.answer_next(Answer(delay=8.0))
    with RunningBalancer(fake_controller.url) as balancer:
        assert balancer.get().status == 200  # it waited, well within the 10 s of --no-replica-wait
        fake_controller.answer_next(Answer(delay=8.0))
        assert balancer.get().status == 200


def test_a_failing_controller_is_not_asked_more_often_than_planned(
    fake_controller: FakeController, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    """The stock balancer called 224 to 618 times in one interval."""
    balancer = start_balancer(replica_factory(), sync_interval="500ms")
    fake_controller.answer_always(Answer(body=b"junk"))
    balancer.log.wait_for("sync.failed")
    seen = len(fake_controller.syncs)
    started = time.monotonic()
    fake_controller.wait_for_sync(seen + 4)
    assert time.monotonic() - started > 3 * 0.5 * 0.9  # the interval, less its jitter


def test_a_list_change_never_touches_a_running_stream(
    fake_controller: FakeController, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    """caddy issue 5471, ray pull request 65698."""
    more, end = threading.Event(), threading.Event()
    a, b = replica_factory(), replica_factory()
    a.behave(stream([b"one", more, b"two", end, b"three"]))
    balancer = start_balancer(a)
    with balancer.client() as client:
        client.ask(request(), head_only=True)
        assert client.chunk() == b"one"
        fake_controller.set_ready([a.url, b.url])
        balancer.wait_for_replicas(2)
        more.set()
        assert client.chunk() == b"two"
        fake_controller.set_ready([b.url])
        balancer.log.wait_for("replica.removed")
        seen = len(a.requests)
        for _ in range(10):
            assert balancer.get().status == 200
        assert len(a.requests) == seen, "a draining replica got a new request"
        end.set()
        assert client.chunk() == b"three"
        assert client.chunk() == b""


def test_a_draining_replica_that_is_named_again_keeps_its_connections(
    fake_controller: FakeController, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a, b = replica_factory(), replica_factory()
    balancer = start_balancer(a, b, grace_period="60s", policy="round_robin")
    for _ in range(4):
        assert balancer.get().status == 200
    fake_controller.set_ready([b.url])
    balancer.log.wait_for("replica.removed")
    fake_controller.set_ready([a.url, b.url])
    balancer.log.wait_for("replica.revived")
    for _ in range(4):
        assert balancer.get().status == 200
    assert (a.connections, b.connections) == (1, 1)


def test_a_retired_replica_is_gone_from_the_pools_and_the_metrics(
    fake_controller: FakeController, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a, b = replica_factory(), replica_factory()
    balancer = start_balancer(a, b, grace_period="100ms", policy="round_robin")
    for _ in range(2):
        assert balancer.get().status == 200
    fake_controller.set_ready([b.url])
    balancer.log.wait_for("replica.retired")
    a.wait_for(lambda: a.open_connections == 0)
    rows = json.loads(balancer.admin_get("/replicas").body)["replicas"]
    assert [row["url"] for row in rows] == [b.url]
    assert "127.0.0.1" in balancer.admin_get("/metrics").body.decode()


def test_a_bad_entry_is_skipped_and_logged_once_and_the_rest_is_used(
    fake_controller: FakeController, replica_factory: ReplicaFactory
) -> None:
    replica = replica_factory()
    fake_controller.set_ready(["ftp://nowhere", replica.url])
    with RunningBalancer(fake_controller.url) as balancer:
        balancer.wait_for_replicas(1)
        fake_controller.wait_for_sync(count=3)
        assert balancer.get().status == 200
        assert len(balancer.log.named("list.entry_skipped")) == 1


def test_the_older_shape_of_the_answer_is_understood(
    fake_controller: FakeController, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    fake_controller.answer_always(Answer(old_shape=True))
    assert start_balancer(replica_factory()).get().status == 200


@pytest.mark.parametrize("sticky", ["cookie:session", "header:X-User"])
def test_a_sticky_session_stays_with_its_replica_through_a_list_that_keeps_it(
    sticky: str,
    fake_controller: FakeController,
    replica_factory: ReplicaFactory,
    start_balancer: StartBalancer,
) -> None:
    """SkyPilot issue 3749: applications that keep a session in their memory."""
    replicas = [replica_factory(str(number)) for number in range(3)]
    balancer = start_balancer(*replicas, sticky=sticky)
    headers = {"Cookie": "a=1; session=ann"} if "cookie" in sticky else {"X-User": "ann"}

    def ask() -> bytes:
        with balancer.client() as client:
            return client.ask(request(headers=headers)).body

    (home,) = {ask() for _ in range(20)}
    stays = [replica for replica in replicas if replica.name.encode() == home]
    goes = next(replica for replica in replicas if replica not in stays)
    fake_controller.set_ready([replica.url for replica in replicas if replica is not goes])
    balancer.log.wait_for("replica.removed")
    assert {ask() for _ in range(20)} == {home}
    with balancer.client() as client:  # without a session: by the policy
        assert len({client.ask(request()).body for _ in range(4)}) == 2


def test_the_metrics_do_not_grow_with_paths_nor_with_replicas_that_left(
    fake_controller: FakeController, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    """litellm issue 12159."""
    a = replica_factory()
    balancer = start_balancer(a, grace_period="0")
    assert balancer.get("/first").status == 200
    before = balancer.admin_get("/metrics").body.count(b"\n")
    with balancer.client() as client:
        for number in range(1000):
            assert client.ask(request(target=f"/path-{number}?user={number}")).status == 200
    assert balancer.admin_get("/metrics").body.count(b"\n") == before
    for number in range(5):
        others = [f"http://127.0.0.1:{10_000 + 100 * number + each}" for each in range(100)]
        fake_controller.set_ready([a.url, *others])
        balancer.wait_for(lambda: len(balancer.balancer.plane.table.routable()) == 101)
        fake_controller.set_ready([a.url])
        balancer.wait_for(lambda: len(balancer.balancer.plane.table) == 1)
    later = balancer.balancer.metrics.gauges.now() + 601
    balancer.balancer.metrics.gauges.now = lambda: later
    assert balancer.admin_get("/metrics").body.count(b"\n") == before


def test_the_release_of_aiohttp_is_one_without_the_fault_of_idle_connections() -> None:
    """aiohttp issue 12795: 3.14.0 and 3.14.1 fail on reused connections."""
    from importlib import metadata

    (wanted,) = (r for r in metadata.requires("skyserve-lb") or [] if r.startswith("aiohttp"))
    assert ">=3.14.4" in wanted
