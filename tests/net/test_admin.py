"""The admin port: what operators and Prometheus see, and what clients do not."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from html.parser import HTMLParser

import pytest

from controller_client.testing import (
    FakeController,
    ReplicaFactory,
    answer,
    hold,
)
from lb.admin import page
from tests.net.conftest import StartBalancer
from tests.net.harness import Closed, RawClient, RunningBalancer, request

PATHS = ["/", "/livez", "/readyz", "/metrics", "/replicas"]


def test_liveness_and_readiness_before_the_first_sync(fake_controller: FakeController) -> None:
    fake_controller.refuse()
    with RunningBalancer(fake_controller.url) as balancer:
        assert balancer.admin_get("/livez").body == b"ok\n"
        unready = balancer.admin_get("/readyz")
        assert (unready.status, unready.body) == (503, b"the controller has not answered yet\n")


def test_readiness_follows_the_ready_list_and_the_drain(
    fake_controller: FakeController, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    balancer = start_balancer(a, grace_period="0")
    ready = balancer.admin_get("/readyz")
    assert (ready.status, ready.body) == (200, b"ok\n")
    fake_controller.set_ready([])
    balancer.log.wait_for("list.released")
    unready = balancer.admin_get("/readyz")
    assert (unready.status, unready.body) == (503, b"no routable replica\n")
    assert balancer.admin_get("/livez").status == 200


def test_a_drain_asked_for_by_post(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    go = threading.Event()
    a.behave(hold(go))
    balancer = start_balancer(a)
    with balancer.client() as busy:
        busy.send(request())
        a.wait_for(lambda: a.requests)
        with RawClient(balancer.admin) as client:
            assert client.ask(request("GET", "/drain")).status == 405
            from_a_page = client.ask(request("POST", "/drain", {"Origin": "http://elsewhere"}))
            assert from_a_page.status == 403
            assert client.ask(request("GET", "/readyz")).status == 200
            assert client.ask(request("POST", "/drain")).status == 202
            unready = client.ask(request("GET", "/readyz"))
            assert (unready.status, unready.body) == (503, b"draining\n")
            assert balancer.metric("draining") == 1
        go.set()
        assert busy.answer().status == 200
    balancer.log.wait_for("drain.finished")


def test_the_replicas_as_json(
    fake_controller: FakeController, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    go = threading.Event()
    a.behave(hold(go))
    balancer = start_balancer(a)
    with balancer.client() as busy:
        busy.send(request())
        a.wait_for(lambda: a.requests)
        answered = balancer.admin_get("/replicas")
        assert answered.values(b"content-type") == [b"application/json; charset=utf-8"]
        assert json.loads(answered.body) == {
            "replicas": [
                {
                    "url": a.url,
                    "state": "serving",
                    "ejected": False,
                    "accelerator": None,
                    "in_flight": 1,
                    "idle_connections": 0,
                    "active_connections": 1,
                }
            ]
        }
        go.set()
        assert busy.answer().status == 200
    (row,) = json.loads(balancer.admin_get("/replicas").body)["replicas"]
    assert (row["in_flight"], row["idle_connections"], row["active_connections"]) == (0, 1, 0)


class Page(HTMLParser):
    """What a browser would find: the tags and the text of each cell."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.cells: list[str] = []
        self._in_cell = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "action")]
        self._in_cell = tag in ("td", "th")
        if self._in_cell:
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_cell = False

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.cells[-1] += data


def test_the_page_for_people(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a, b = replica_factory(), replica_factory()
    balancer = start_balancer(a, b, service_name="chat <b>")
    answered = balancer.admin_get("/")
    assert answered.status == 200
    assert answered.values(b"content-type") == [b"text/html; charset=utf-8"]
    assert answered.values(b"content-security-policy") == [
        b"default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
    ]
    text = answered.body.decode()
    assert "<h1>chat &lt;b&gt;</h1>" in text
    assert "<p>Ready.</p>" in text
    found = Page(text)
    assert found.cells[:3] == ["replica", "state", "ejected"]
    assert found.cells[7:11] == [a.url, "serving", "no", ""]
    assert found.cells[14] == b.url
    assert "script" not in found.tags
    assert found.links == ["/replicas", "/metrics", "/readyz", "/livez"]
    for link in found.links:
        assert balancer.admin_get(link).status == 200


def test_all_that_the_page_shows_is_escaped() -> None:
    evil = "<script>alert('x')</script>&\""
    row = {
        "url": evil,
        "state": evil,
        "ejected": True,
        "accelerator": evil,
        "in_flight": 1,
        "idle_connections": 2,
        "active_connections": 3,
    }
    found = Page(page(evil, evil, [row]))
    assert "script" not in found.tags
    assert found.cells[7:] == [evil, evil, "yes", evil, "1", "2", "3"]


def test_the_metrics(replica_factory: ReplicaFactory, start_balancer: StartBalancer) -> None:
    a = replica_factory()
    balancer = start_balancer(a, service_name="chat")
    assert balancer.get("/secret-path?secret-query").status == 200
    answered = balancer.admin_get("/metrics")
    (kind,) = answered.values(b"content-type")
    assert kind.startswith(b"text/plain; version=")
    text = answered.body.decode()
    assert 'skyserve_lb_requests_total{outcome="ok",service="chat"} 1.0' in text
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(re.match(r'skyserve_lb_\w+\{(.*,)?service="chat"[,}]', line) for line in samples)
    assert "secret" not in text
    assert "tls_certificate" not in text


@pytest.mark.parametrize("path", PATHS)
def test_clients_do_not_reach_it(
    path: str, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    a.behave_always(answer(b"the replica's own"))
    balancer = start_balancer(a)
    assert balancer.get(path).body == b"the replica's own"
    assert balancer.post(b"", "/drain").body == b"the replica's own"
    assert [seen.target.decode() for seen in a.requests] == [path, "/drain"]
    assert balancer.metric("draining") == 0


def test_it_serves_no_replica(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    balancer = start_balancer(a)
    assert balancer.admin_get("/v1/models").status == 404
    with RawClient(balancer.admin) as client:
        assert client.ask(request("HEAD", "/livez"), head_only=True).status == 200
    assert a.requests == []


def test_it_answers_while_the_data_port_is_full(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    balancer = start_balancer(replica_factory(), max_connections="1")
    with balancer.client() as first, balancer.client() as second:
        assert first.ask(request()).status == 200
        try:
            assert second.answer().status == 503
        except Closed:
            pytest.fail("it was closed without a word")
        assert balancer.admin_get("/readyz").status == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_it_listens_on_the_address_that_is_asked_for(
    host: str, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    balancer = start_balancer(replica_factory(), admin_host=host, host=host)
    (started,) = balancer.log.named("server.started")
    shown = f"[{host}]:" if ":" in host else f"{host}:"
    assert started["admin"].startswith(shown)
    assert started["address"].startswith(shown)
    for address in (balancer.admin, balancer.address):
        with RawClient((host, address[1])) as client:
            assert client.ask(request(target="/livez")).status == 200


PROMTOOL = shutil.which("promtool")
if PROMTOOL is not None:  # a tool of Prometheus, which is no dependency

    def test_promtool_has_nothing_to_say(
        replica_factory: ReplicaFactory, start_balancer: StartBalancer
    ) -> None:
        balancer = start_balancer(replica_factory())
        assert balancer.get().status == 200
        checked = subprocess.run(
            [str(PROMTOOL), "check", "metrics"],
            input=balancer.admin_get("/metrics").body,
            capture_output=True,
            check=False,
        )
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
