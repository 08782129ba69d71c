"""The admin port: what operators and Prometheus see, and what clients do not."""

from __future__ import annotations

import json
import re
import select
import shutil
import socket
import subprocess
import threading
import time
from contextlib import ExitStack
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from controller_client.testing import (
    FakeController,
    ReplicaFactory,
    answer,
    hold,
)
from lb.access import refusal
from lb.admin import MAX_CONNECTIONS
from lb.errors import EXIT_BAD_CONFIGURATION, StartError
from lb.live import MAX_LISTENERS
from tests.net import canned
from tests.net.canned import CannedAdmin, address_of
from tests.net.conftest import StartBalancer
from tests.net.harness import PATIENCE_SECONDS, Closed, RawClient, RunningBalancer, request

PATHS = ["/", "/livez", "/readyz", "/metrics", "/replicas", "/status", "/events", "/page/page.js"]


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
            assert client.ask(drain()).status == 202
            unready = client.ask(request("GET", "/readyz"))
            assert (unready.status, unready.body) == (503, b"draining\n")
            assert balancer.metric("draining") == 1
        go.set()
        assert busy.answer().status == 200
    balancer.log.wait_for("drain.finished")


def drain(*headers: tuple[str, str], host: str = "127.0.0.1:9080") -> bytes:
    return request("POST", "/drain", headers, host=host)


def bearer(token: str) -> tuple[str, str]:
    return ("Authorization", f"Bearer {token}")


def ask(balancer: RunningBalancer, *requests: bytes) -> list[tuple[int, str]]:
    """Status and text of each answer, all over one connection."""
    with RawClient(balancer.admin) as client:
        answers = [client.ask(each) for each in requests]
    return [(answer.status, answer.body.decode()) for answer in answers]


def test_no_web_page_drains_it(start_balancer: StartBalancer) -> None:
    balancer = start_balancer()
    page = "a web page may not do this\n"
    name = "the Host header must be an IP address or localhost\n"
    assert (
        ask(
            balancer,
            drain(("Origin", "http://elsewhere.example")),
            drain(("Origin", "null")),
            drain(("Sec-Fetch-Site", "same-origin")),
            drain(host="rebound.example:9080"),
            drain(host="127.0.0.1.rebound.example"),
            drain(host=""),
        )
        == [(403, page)] * 3 + [(403, name)] * 3
    )
    assert balancer.metric("draining") == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.7:9080", "[::1]:9080", "LocalHost:1"])
def test_tools_drain_it_by_any_address(host: str) -> None:
    asked = {"token": None, "authorization": None, "from_browser": False}
    assert refusal(**asked, loopback=True, hosts=[host]) is None  # type: ignore[arg-type]


def test_beyond_the_loopback_address_nothing_can_be_changed(start_balancer: StartBalancer) -> None:
    balancer = start_balancer(admin_host="0.0.0.0")
    balancer.admin = ("127.0.0.1", balancer.admin[1])
    refused, livez = ask(balancer, drain(), request("GET", "/livez"))
    assert refused == (
        403,
        (
            "the admin port is not on a loopback address alone, so this needs a token: "
            "see --admin-token-file; SIGTERM drains too\n"
        ),
    )
    assert livez == (200, "ok\n")
    assert balancer.metric("draining") == 0


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.touch(mode=0o600)
    file.write_text("s3cret-one\n")
    return file


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_with_a_token_it_is_drained_by_who_has_it(
    host: str, token_file: Path, start_balancer: StartBalancer
) -> None:
    balancer = start_balancer(admin_host=host, admin_token_file=str(token_file))
    balancer.admin = ("127.0.0.1", balancer.admin[1])
    with RawClient(balancer.admin) as client:
        unknown = client.ask(drain())
        assert unknown.status == 401
        assert unknown.values(b"www-authenticate") == [b"Bearer"]
    tries = [
        drain(bearer("s3cret-on")),
        drain(bearer("s3cret-one2")),
        drain(bearer("s3cret-ön\x80")),
        drain(bearer("")),
        drain(("Authorization", "Basic s3cret-one")),
        drain(("Authorization", "s3cret-one")),
    ]
    assert {status for status, _ in ask(balancer, *tries)} == {401}
    assert ask(balancer, drain(bearer("s3cret-one"), ("Origin", "http://elsewhere")))[0][0] == 403
    assert balancer.metric("draining") == 0
    assert ask(balancer, request("GET", "/readyz"))[0][0] == 503  # reading needs none
    # By name too: a page that a rebound name has brought does not know the token.
    answered = ask(balancer, drain(("Authorization", "bearer  s3cret-one"), host="lb.example"))
    assert answered == [(202, "draining\n")]
    assert "s3cret" not in json.dumps(balancer.log.events)


def put(file: Path, text: str, mode: int = 0o600) -> None:
    """Replace the file in one step, as those do that care."""
    fresh = file.with_suffix(".new")
    fresh.touch(mode=0o600)
    fresh.write_text(text)
    fresh.chmod(mode)
    fresh.replace(file)


def test_the_token_is_read_again_when_it_changes_and_when_told(
    token_file: Path, start_balancer: StartBalancer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lb.app.WATCH_SECONDS", 0.02)
    balancer = start_balancer(admin_token_file=str(token_file))
    put(token_file, "s3cret-two")
    balancer.log.wait_for("admin.token_reloaded")
    assert ask(balancer, drain(bearer("s3cret-one")))[0][0] == 401
    put(token_file, "s3cret two words")
    (failed,) = balancer.log.wait_for("admin.token_reload_failed")
    assert failed["cause"] == "it holds no token: one word of at most 4096 ASCII characters"
    token_file.unlink()
    failed = balancer.log.wait_for("admin.token_reload_failed", 2)[1]
    assert failed["cause"] == "No such file or directory"
    put(token_file, "s3cret-three", mode=0o644)
    balancer.log.wait_for("admin.token_reloaded", 2)
    (exposed,) = balancer.log.named("admin.token_exposed")
    assert (exposed["mode"], exposed["file"]) == ("0644", str(token_file))
    balancer.call(balancer.balancer.reload)  # as on SIGHUP
    balancer.log.wait_for("admin.token_reloaded", 3)
    assert ask(balancer, drain(bearer("s3cret-two")), drain(bearer("s3cret-three"))) == [
        (401, "the token of --admin-token-file is needed: Authorization: Bearer TOKEN\n"),
        (202, "draining\n"),
    ]
    assert "s3cret" not in json.dumps(balancer.log.events)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "it is empty"),
        (b" \n\n", "it is empty"),
        (b"s3cret words", "it holds no token: one word of at most 4096 ASCII characters"),
        (b"s3cret\xff", "it holds no token: one word of at most 4096 ASCII characters"),
        (b"s3cret" * 1000, "it holds no token: one word of at most 4096 ASCII characters"),
        (None, "No such file or directory"),
    ],
)
def test_a_file_without_a_token_is_a_fault(
    content: bytes | None, fault: str, token_file: Path, fake_controller: FakeController
) -> None:
    if content is None:
        token_file.unlink()
    else:
        token_file.write_bytes(content)
    with (
        pytest.raises(StartError) as caught,
        RunningBalancer(fake_controller.url, admin_token_file=str(token_file)),
    ):
        pass
    assert str(caught.value) == f"--admin-token-file {token_file}: {fault}"
    assert caught.value.exit_code == EXIT_BAD_CONFIGURATION


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


def test_the_status_as_json(
    fake_controller: FakeController, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a, b = replica_factory(), replica_factory()
    balancer = start_balancer(a, b, service_name="chat", sticky="cookie:sid", sync_interval="20s")
    answered = balancer.admin_get("/status")
    assert answered.values(b"content-type") == [b"application/json; charset=utf-8"]
    found = json.loads(answered.body)
    about = found["about"]
    assert (about["service"], about["policy"], about["sticky"]) == (
        *("chat", "least_load"),
        "cookie:sid",
    )
    assert about["started"] <= found["now"]
    assert (found["not_ready"], found["draining"], found["held"]) == (None, False, None)
    assert found["counts"] == {"serving": 2, "held": 0, "draining": 0, "ejected": 0}
    assert {each["url"] for each in found["replicas"]} == {a.url, b.url}
    assert all(about["started"] <= each["since"] <= found["now"] for each in found["replicas"])
    sync = found["sync"]
    assert (sync["result"], sync["interval"], sync["failing_since"]) == ("ok", 20.0, None)
    assert about["started"] <= sync["last_answer"] <= found["now"]
    assert [each["event"] for each in found["events"]] == [
        *("server.started", "replica.added", "replica.added")
    ]


def test_the_status_follows_the_list(
    fake_controller: FakeController, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    balancer = start_balancer(a, grace_period="60s")

    def found() -> dict[str, Any]:
        status: dict[str, Any] = json.loads(balancer.admin_get("/status").body)
        return status

    fake_controller.set_ready([])
    balancer.log.wait_for("list.held")
    held = found()
    assert held["held"]["until"] - held["held"]["since"] == pytest.approx(60)
    assert held["held"]["since"] <= held["now"]
    assert held["replicas"][0]["state"] == "held"
    assert held["sync"]["result"] == "empty"
    fake_controller.refuse()
    balancer.log.wait_for("sync.failed")
    failing = found()
    assert failing["sync"]["result"] == "connect_error"
    assert failing["sync"]["cause"]
    assert held["now"] <= failing["sync"]["failing_since"] <= failing["now"]
    assert failing["sync"]["last_answer"] < failing["sync"]["failing_since"]
    assert failing["not_ready"] is None  # held is routable


def test_the_history_counts_what_was_answered(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lb.app.WATCH_SECONDS", 0.02)
    monkeypatch.setattr("lb.history.STEP_SECONDS", 0.2)
    a = replica_factory()
    balancer = start_balancer(a)
    a.behave(answer(b"no", status=500), answer(b"yes"), answer(b"yes"))
    for _ in range(3):
        balancer.get("/secret-path?secret-query")

    def look() -> dict[str, Any] | None:
        found: dict[str, Any] = json.loads(balancer.admin_get("/status").body)
        return found if found["replicas"][0]["finished"] == 3 else None

    deadline = time.monotonic() + PATIENCE_SECONDS
    while (found := look()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (row,) = found["replicas"]
    assert (row["failed"], row["share"]) == (1, 1.0)
    assert sum(found["history"]["rate"]["ok"]) > 0
    assert sum(found["history"]["rate"]["upstream_error"]) > 0
    assert found["recent"]["failed"] == pytest.approx(1 / 3, rel=0.001)
    assert 0 < found["recent"]["first_byte"]["p50"] <= found["recent"]["duration"]["p99"]
    assert "secret" not in json.dumps(found)


# --- the page and its events ----------------------------------------------------------------------


class Page(HTMLParser):
    """What a browser would load and follow, and what is in the page itself."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.inline: list[str] = []
        self._open = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open = tag
        for name, value in attrs:
            if name in ("href", "src"):
                (self.links if tag == "a" else self.loads).append(value or "")
            elif name == "style" or name.startswith("on"):
                self.inline.append(name)

    def handle_data(self, data: str) -> None:
        if self._open in ("script", "style") and data.strip():
            self.inline.append(data)


def test_the_page_and_all_that_it_loads(start_balancer: StartBalancer) -> None:
    balancer = start_balancer()
    answered = balancer.admin_get("/")
    assert (answered.status, answered.values(b"content-type")) == (
        200,
        [b"text/html; charset=utf-8"],
    )
    found = Page(answered.body.decode())
    assert found.inline == []
    assert found.loads == ["page/icon.svg", "page/page.css", "page/page.js"]
    assert found.links == ["status", "status", "replicas", "metrics", "readyz", "livez"]
    types = []
    for each in found.loads:
        loaded = balancer.admin_get(f"/{each}")
        assert loaded.status == 200
        types += loaded.values(b"content-type")
    assert types == [
        *(b"image/svg+xml; charset=utf-8", b"text/css; charset=utf-8"),
        b"text/javascript; charset=utf-8",
    ]
    assert {balancer.admin_get(f"/{each}").status for each in found.links} == {200, 503}


def test_what_a_browser_may_do_with_it(start_balancer: StartBalancer) -> None:
    balancer = start_balancer()
    policy = (
        b"default-src 'none'; connect-src 'self'; img-src 'self'; script-src 'self'; "
        b"style-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        b"require-trusted-types-for 'script'; trusted-types 'none'"
    )
    for path in ("/", "/page/page.js", "/status", "/events", "/nowhere"):
        with RawClient(balancer.admin) as client:
            answered = client.ask(request(target=path), head_only=True)
        assert answered.values(b"content-security-policy") == [policy]
        assert answered.values(b"x-content-type-options") == [b"nosniff"]
        assert answered.values(b"cross-origin-resource-policy") == [b"same-origin"]
        assert answered.values(b"cache-control") == [b"no-store"]


class Listener:
    """One that reads `/events`."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.client = RawClient(address)
        self.head = self.client.ask(request(target="/events"), head_only=True)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.client.sock.close()

    def status(self) -> dict[str, Any]:
        """The next one that comes."""
        while not (event := self.client.chunk()).startswith(b"data: "):
            assert event == b"retry: 2000\n\n"
        assert event.endswith(b"\n\n")
        assert event.count(b"\n") == 2
        status: dict[str, Any] = json.loads(event[6:])
        return status


def test_events_tell_what_happens(
    fake_controller: FakeController, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a, b = replica_factory(), replica_factory()
    balancer = start_balancer(a)
    with Listener(balancer.admin) as listener:
        assert listener.head.values(b"content-type") == [b"text/event-stream"]
        assert [each["url"] for each in listener.status()["replicas"]] == [a.url]
        fake_controller.set_ready([a.url, b.url])
        while len(listener.status()["replicas"]) < 2:
            pass


def test_an_open_page_keeps_no_balancer_from_ending(start_balancer: StartBalancer) -> None:
    balancer = start_balancer()
    with Listener(balancer.admin) as listener:
        listener.status()
        balancer.call(balancer.balancer.drain)
        while not listener.status()["draining"]:
            pass
        balancer.call(balancer.balancer.drain)
        balancer._thread.join(PATIENCE_SECONDS)
        assert not balancer._thread.is_alive()


def test_only_so_many_are_fed_and_a_place_that_is_left_is_free(
    start_balancer: StartBalancer,
) -> None:
    balancer = start_balancer()
    with ExitStack() as stack:
        listeners = [stack.enter_context(Listener(balancer.admin)) for _ in range(MAX_LISTENERS)]
        assert {each.head.status for each in listeners} == {200}
        refused = balancer.admin_get("/events")
        assert (refused.status, refused.values(b"retry-after")) == (503, [b"5"])
        assert balancer.admin_get("/status").status == 200
        listeners[0].client.sock.close()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            with Listener(balancer.admin) as late:
                if late.head.status == 200:
                    assert late.status()["about"]
                    return
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_connections_that_ask_nothing_make_room_the_oldest_first(
    start_balancer: StartBalancer,
) -> None:
    balancer = start_balancer()
    with ExitStack() as stack:
        silent = [stack.enter_context(RawClient(balancer.admin)) for _ in range(MAX_CONNECTIONS)]
        for each in silent:
            each.send(b"GET /livez HT")
        assert balancer.admin_get("/livez").status == 200
        with pytest.raises((Closed, ConnectionError)):
            silent[0].answer()
        silent[-1].send(b"TP/1.1\r\nHost: x\r\n\r\n")
        assert silent[-1].answer().status == 200


def test_one_that_does_not_read_is_cut_off_and_nothing_piles_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lb.live.INTERVAL_SECONDS", 0.001)
    monkeypatch.setattr("lb.live.STALL_SECONDS", 0.3)
    many = [canned.replica(f"10.0.0.{number}:8000") for number in range(3000)]
    admin = CannedAdmin(canned.snapshot(*many))
    with admin as url, socket.socket() as deaf, Listener(address_of(url)) as other:
        size = len(json.dumps(other.status()))
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(address_of(url))
        deaf.sendall(request(target="/events"))
        poller = select.poll()
        poller.register(deaf, 0)  # tells of a reset all the same
        sent = 0
        while not poller.poll(0):
            other.status()
            sent += 1
            assert sent * size < 2**30
        # Whoever reads is fed on, and what was kept for the deaf one is what the kernel took.
        assert other.status()["replicas"]
        assert admin.most_buffered < 2**20 + size


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
