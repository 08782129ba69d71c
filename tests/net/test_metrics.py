"""The metrics, from outside: what a page of /metrics says, and what moves on it, and by how much."""

from __future__ import annotations

import asyncio
import itertools
import re
import shutil
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import pytest
from prometheus_client.parser import text_string_to_metric_families

from controller_client.client import ControllerClient
from controller_client.testing import (
    Answer,
    Behaviour,
    FakeController,
    ReplicaFactory,
    ScriptedReplica,
    answer,
    cut,
    hold,
    raw,
    reset,
    stale,
    stall,
    stream,
)
from lb.app import mode_of
from lb.errors import RejectReason
from lb.metrics import FORGET_SECONDS, Metrics
from tests.net.conftest import StartBalancer
from tests.net.harness import Closed, RawClient, RunningBalancer, chunked, request
from tests.net.test_tls import Pair, TlsClient, TlsReplica, make_pair, pair
from tests.net.test_upgrades import switch, upgraded

__all__ = ["make_pair", "pair"]  # fixtures

README = Path(__file__).parents[2] / "README.md"
PREFIX = "skyserve_lb_"

# --- the list: /metrics has these families, and no other ----------------------------------------

DURATION = ".05 .1 .25 .5 1 2.5 5 10 20 30 60 120 180 300 450 600 900"
FIRST_BYTE = ".01 .025 .05 .1 .25 .5 1 2.5 5 10 30 60 120 300 600"
OWN_TIME = ".0001 .00025 .0005 .001 .0025 .005 .01 .025 .05 .1 .25 1"
CONNECT = ".005 .01 .025 .05 .1 .25 .5 1 2.5 5"

OUTCOME = "ok client_error upstream_error lb_error client_closed"
REJECTED = (
    "not_synced no_replicas all_ejected overload queue_timeout shutting_down body_too_large"
    " bad_request"
)
UPSTREAM = "connect_refused connect_timeout dns tls reset timeout protocol truncated"
CHANGES = "added removed held released revived ejected restored"
SYNCS = "ok empty timeout connect_error http_error bad_payload"
# Labels whose values no list can hold: `replica` is bounded in time, `code` by what is a status.
OPEN = ""

Labels = dict[str, str]
LIST: dict[tuple[str, str], Labels] = {
    ("info", "gauge"): dict.fromkeys(("version", "python", "policy", "mode"), OPEN),
    ("requests_total", "counter"): {"outcome": OUTCOME},
    ("responses_total", "counter"): {"code": OPEN, "method": OPEN},
    ("rejected_requests_total", "counter"): {"reason": REJECTED},
    ("request_duration_seconds", "histogram"): {"outcome": OUTCOME, "le": DURATION},
    ("time_to_first_byte_seconds", "histogram"): {"outcome": OUTCOME, "le": FIRST_BYTE},
    ("overhead_seconds", "histogram"): {"le": OWN_TIME},
    ("inflight_requests", "gauge"): {},
    ("inflight_oldest_seconds", "gauge"): {},
    ("received_bytes_total", "counter"): {},
    ("sent_bytes_total", "counter"): {},
    ("client_disconnects_total", "counter"): {"phase": "request_body before_head streaming"},
    ("retries_total", "counter"): {
        "reason": "connect_error stale_connection reset_before_response"
    },
    ("retries_exhausted_total", "counter"): {},
    ("upstream_errors_total", "counter"): {"reason": UPSTREAM},
    ("upstream_connect_duration_seconds", "histogram"): {"le": CONNECT},
    ("pool_connections", "gauge"): {"state": "idle active"},
    ("pool_connections_total", "counter"): {"result": "created reused"},
    ("replicas", "gauge"): {"state": "serving held draining ejected"},
    ("replica_set_changes_total", "counter"): {"change": CHANGES},
    ("replica_inflight_requests", "gauge"): {"replica": OPEN},
    ("replica_requests_total", "counter"): {"replica": OPEN, "outcome": OUTCOME},
    ("sync_total", "counter"): {"result": SYNCS},
    ("sync_duration_seconds", "histogram"): {"le": CONNECT},
    ("sync_last_success_timestamp_seconds", "gauge"): {},
    ("arrivals_pending", "gauge"): {},
    ("arrivals_dropped_total", "counter"): {"reason": "overflow expired"},
    ("event_loop_lag_seconds", "histogram"): {"le": OWN_TIME},
    ("draining", "gauge"): {},
    ("tls_certificate_not_after_timestamp_seconds", "gauge"): {},
}


# --- reading a page -----------------------------------------------------------------------------


def scrape(balancer: RunningBalancer) -> str:
    answered = balancer.admin_get("/metrics")
    assert answered.status == 200
    return answered.body.decode()


def samples(text: str, **replicas: ScriptedReplica) -> dict[str, float]:
    """Every sample, as its name and the values of its labels: `responses_total 200 GET`.

    `service` is left out, `replica` is the name that it has here.
    """
    names = {f"127.0.0.1:{each.port}": name for name, each in replicas.items()}
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [
                names.get(value, value)
                for label, value in sorted(sample.labels.items())
                if label != "service"
            ]
            found[" ".join([sample.name.removeprefix(PREFIX), *labels])] = sample.value
    return found


# What moves by itself, and what is a time.
RESTLESS = re.compile(r"event_loop_lag_|\w+_(bucket|sum)\b|\w+_timestamp_seconds")


@contextmanager
def watching(balancer: RunningBalancer, **replicas: ScriptedReplica) -> Iterator[Counter[str]]:
    """`with watching(balancer, a=a) as moved: ...`; then all that is not what it was, and by how much."""
    moved = Counter[str]()
    before = samples(scrape(balancer), **replicas)
    yield moved
    after = samples(scrape(balancer), **replicas)
    for key in before | after:
        change = after.get(key, 0) - before.get(key, 0)
        if change and not RESTLESS.match(key):
            moved[key] = change  # type: ignore[assignment]


def move(**amounts: float) -> Counter[str]:
    """One sample for each: `move(requests_total__ok=1)`."""
    return Counter({key.replace("__", " "): amount for key, amount in amounts.items()})


def finished(
    outcome: str, code: int, *, method: str = "GET", replica: str = "a", sends: bool = True
) -> Counter[str]:
    """What every finished request moves; with `replica=""` no replica was chosen."""
    moved = Counter(
        {
            f"requests_total {outcome}": 1,
            f"responses_total {code} {method}": 1,
            f"request_duration_seconds_count {outcome}": 1,
            "arrivals_pending": 1,
        }
    )
    if code != 499:
        moved[f"time_to_first_byte_seconds_count {outcome}"] = 1
    if replica:
        moved[f"replica_requests_total {outcome} {replica}"] = 1
    if sends:
        moved["overhead_seconds_count"] = 1
    return moved


CREATED = move(pool_connections_total__created=1, upstream_connect_duration_seconds_count=1)
REUSED = move(pool_connections_total__reused=1)
IDLE = move(pool_connections__idle=1)  # and kept for another request
EJECTED = move(replica_set_changes_total__ejected=1, replicas__ejected=1)
GIVEN_UP = move(retries_exhausted_total=1)

StartQuiet = Callable[..., RunningBalancer]


@pytest.fixture
def start_quiet(start_balancer: StartBalancer, monkeypatch: pytest.MonkeyPatch) -> StartQuiet:
    """A balancer that syncs but once, and keeps its connections: what moves is moved by a request."""
    monkeypatch.setattr("lb.syncer.URGENT_INTERVAL_SECONDS", 3600.0)

    def start(*replicas: ScriptedReplica, **settings: str) -> RunningBalancer:
        quiet = {"sync_interval": "1h", "upstream_keepalive": "10m", "no_replica_wait": "0"}
        balancer = start_balancer(*replicas, **quiet | settings)
        balancer.wait_for(lambda: balancer.balancer.plane.proxy.synced)
        return balancer

    return start


@pytest.fixture
def a(replica_factory: ReplicaFactory) -> ScriptedReplica:
    return replica_factory("a")


@pytest.fixture
def b(replica_factory: ReplicaFactory) -> ScriptedReplica:
    return replica_factory("b")


def ask(balancer: RunningBalancer, data: bytes) -> int | None:
    """The status of the answer; None if it was cut."""
    with balancer.client() as client:
        try:
            return client.ask(data).status
        except Closed:
            return None


# --- requests -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "label"),
    [
        *[(each, each) for each in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")],
        ("PROPFIND", "other"),
    ],
)
def test_a_request_that_is_answered(
    method: str, label: str, a: ScriptedReplica, start_quiet: StartQuiet
) -> None:
    a.behave(answer(b"" if method == "HEAD" else b"hello"))
    balancer = start_quiet(a)
    with watching(balancer, a=a) as moved, balancer.client() as client:
        assert client.ask(request(method), head_only=method == "HEAD").status == 200
    expected = finished("ok", 200, method=label) + CREATED + IDLE
    assert moved == expected + Counter({} if method == "HEAD" else {"sent_bytes_total": 5})


def test_bodies_are_counted_without_their_framing(
    a: ScriptedReplica, start_quiet: StartQuiet
) -> None:
    a.behave(stream([b"four", b"words"]))
    balancer = start_quiet(a)
    body = request("POST", headers={"Transfer-Encoding": "chunked"}) + chunked(b"abc", b"de")
    with watching(balancer, a=a) as moved:
        assert ask(balancer, body) == 200
    assert moved == finished("ok", 200, method="POST") + CREATED + IDLE + move(
        received_bytes_total=5, sent_bytes_total=9
    )


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(204, "ok"), (302, "ok"), (404, "client_error"), (500, "upstream_error"), (503, "upstream_error")],
)  # fmt: skip
def test_a_replica_s_own_status_says_whose_fault_it_is(
    status: int, outcome: str, a: ScriptedReplica, start_quiet: StartQuiet
) -> None:
    a.behave(answer(b"", status=status))
    balancer = start_quiet(a)
    with watching(balancer, a=a) as moved:
        assert ask(balancer, request()) == status
    assert moved == finished(outcome, status) + CREATED + IDLE


def test_a_connection_that_is_used_again(a: ScriptedReplica, start_quiet: StartQuiet) -> None:
    a.behave_always(answer(b""))
    balancer = start_quiet(a)
    assert ask(balancer, request()) == 200
    with watching(balancer, a=a) as moved:
        assert ask(balancer, request()) == 200
    assert moved == finished("ok", 200) + REUSED


def test_an_upgraded_connection_is_one_request_until_it_ends(
    a: ScriptedReplica, start_quiet: StartQuiet
) -> None:
    a.behave(switch())
    balancer = start_quiet(a)
    with watching(balancer, a=a) as moved:
        with balancer.client() as client:
            upgraded(client)
            client.send(b"hello")
            assert client.read(5) == b"hello"
            meanwhile = samples(scrape(balancer))
        balancer.log.wait_for("request.finished")
    assert (meanwhile["inflight_requests"], meanwhile["requests_total ok"]) == (1, 0)
    assert moved == finished("ok", 101) + CREATED + move(received_bytes_total=5, sent_bytes_total=5)


# --- refusals -----------------------------------------------------------------------------------

# A client is refused before there is a request: no arrival, no method to tell.
BAD_REQUESTS = [
    (b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400, "bad_request"),
    (b"nonsense\r\n\r\n", 400, "bad_request"),
    (b"CONNECT x:1 HTTP/1.1\r\nHost: x:1\r\n\r\n", 405, "bad_request"),
    (b"GET / HTTP/1.1\r\nHost: x\r\nExpect: magic\r\n\r\n", 417, "bad_request"),
    (b"FETCH / HTTP/1.1\r\nHost: x\r\n\r\n", 501, "bad_request"),
    (
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999999999999999\r\n\r\n",
        413,
        "body_too_large",
    ),
]


@pytest.mark.parametrize(("data", "status", "reason"), BAD_REQUESTS)
def test_a_client_that_is_refused(
    data: bytes, status: int, reason: str, a: ScriptedReplica, start_quiet: StartQuiet
) -> None:
    balancer = start_quiet(a, access_log="errors")
    with watching(balancer, a=a) as moved, balancer.client() as client:
        answered = client.ask(data)
        assert answered.status == status
    assert moved == Counter(
        {
            "requests_total client_error": 1,
            f"responses_total {status} other": 1,
            "request_duration_seconds_count client_error": 1,
            f"rejected_requests_total {reason}": 1,
        }
    )
    (line,) = balancer.log.wait_for("request.refused")
    assert (line["status"], line["reason"]) == (status, reason)
    assert line["cause"] == answered.detail


def test_a_client_that_is_one_too_many(a: ScriptedReplica, start_quiet: StartQuiet) -> None:
    balancer = start_quiet(a, max_connections="1", access_log="off")
    with watching(balancer, a=a) as moved, balancer.client(), balancer.client() as second:
        assert second.answer().status == 503
    assert moved == move(
        requests_total__lb_error=1,
        responses_total__503__other=1,
        request_duration_seconds_count__lb_error=1,
        rejected_requests_total__overload=1,
    )
    assert not balancer.log.named("request.refused")


def test_a_body_that_breaks_off_its_coding(a: ScriptedReplica, start_quiet: StartQuiet) -> None:
    balancer = start_quiet(a)
    with watching(balancer, a=a) as moved, balancer.client() as client:
        client.send(request("POST", headers={"Transfer-Encoding": "chunked"}) + b"3\r\nabc\r\n")
        a.wait_for(lambda: a.requests)
        assert client.ask(b"zzz\r\n").status == 400
    a.faults.clear()
    assert moved == finished("client_error", 400, method="POST") + CREATED + move(
        received_bytes_total=3, rejected_requests_total__bad_request=1
    )


def test_a_request_before_the_first_list(start_quiet: StartQuiet) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        with RunningBalancer(url, no_replica_wait="0") as balancer:
            with watching(balancer) as moved:
                assert ask(balancer, request()) == 503
            assert moved == finished("lb_error", 503, replica="", sends=False) + move(
                rejected_requests_total__not_synced=1
            )


def test_a_request_while_no_replica_is_named(start_quiet: StartQuiet) -> None:
    balancer = start_quiet()
    with watching(balancer) as moved:
        assert ask(balancer, request()) == 503
    assert moved == finished("lb_error", 503, replica="", sends=False) + move(
        rejected_requests_total__no_replicas=1
    )


def test_a_request_while_every_replica_refuses(a: ScriptedReplica, start_quiet: StartQuiet) -> None:
    balancer = start_quiet(a)
    a.refuse()
    with watching(balancer, a=a) as moved:
        assert ask(balancer, request()) == 503
    assert moved == finished("lb_error", 503, sends=False) + EJECTED + move(
        rejected_requests_total__all_ejected=1,
        upstream_errors_total__connect_refused=1,
        retries_total__connect_error=1,
    )


def test_every_reason_to_refuse_is_there_from_the_start_and_no_other(
    start_quiet: StartQuiet,
) -> None:
    """`queue_timeout` stays at 0: nothing queues here but for a replica. `shutting_down` counts what is
    cut off at the end of the drain, when nobody scrapes any more; the log has it."""
    found = samples(scrape(start_quiet()))
    reasons = {key.split()[1] for key in found if key.startswith("rejected_requests_total ")}
    assert reasons == set(REJECTED.split()) == set(get_args(RejectReason))


# --- attempts -----------------------------------------------------------------------------------


def refusing(replica: ScriptedReplica) -> None:
    replica.refuse()


def stalling_connects(replica: ScriptedReplica) -> None:
    replica.stall_connects()


@pytest.mark.parametrize(
    ("make_dead", "reason"),
    [(refusing, "connect_refused"), (stalling_connects, "connect_timeout")],
)
def test_a_connect_that_fails_is_retried_elsewhere(
    make_dead: Callable[[ScriptedReplica], None],
    reason: str,
    a: ScriptedReplica,
    b: ScriptedReplica,
    start_quiet: StartQuiet,
) -> None:
    b.behave_always(answer(b""))
    balancer = start_quiet(a, b, connect_timeout="300ms")
    make_dead(a)
    with watching(balancer, a=a, b=b) as moved:  # one of two has its turn with a, whichever it is
        assert ask(balancer, request()) == 200
        assert ask(balancer, request()) == 200
    failed = Counter({f"upstream_errors_total {reason}": 1, "retries_total connect_error": 1})
    both = finished("ok", 200, replica="b") + finished("ok", 200, replica="b")
    assert moved == both + CREATED + REUSED + IDLE + EJECTED + failed


def attempts_failed(controller: FakeController, url: str) -> Counter[str]:
    """What moves when the one replica, of this URL, cannot be used."""
    controller.set_ready([url])
    with RunningBalancer(controller.url, sync_interval="1h", no_replica_wait="0") as balancer:
        balancer.wait_for_replicas(1)
        with watching(balancer) as moved:
            assert ask(balancer, request()) == 503
    return Counter({key: n for key, n in moved.items() if key.startswith("upstream_errors_total")})


def test_a_replica_that_cannot_be_found(fake_controller: FakeController) -> None:
    moved = attempts_failed(fake_controller, "http://replica.invalid:1")
    assert moved == move(upstream_errors_total__dns=1)


def test_a_replica_that_cannot_be_trusted(pair: Pair, fake_controller: FakeController) -> None:
    with TlsReplica(pair, b"", goodbye=True) as replica:
        moved = attempts_failed(fake_controller, f"https://localhost:{replica.port}")
    assert moved == move(upstream_errors_total__tls=1)


def test_a_stale_connection(a: ScriptedReplica, start_quiet: StartQuiet) -> None:
    balancer = start_quiet(a)
    a.behave(answer(b""), stale(), answer(b""))
    assert ask(balancer, request()) == 200
    with watching(balancer, a=a) as moved:
        assert ask(balancer, request()) == 200
    assert moved == finished("ok", 200) + REUSED + CREATED + move(
        upstream_errors_total__reset=1, retries_total__stale_connection=1
    )


def test_a_request_that_is_lost_again_and_again(
    a: ScriptedReplica, start_quiet: StartQuiet
) -> None:
    a.behave_always(reset())
    balancer = start_quiet(a, no_replica_wait="10s")
    with watching(balancer, a=a) as moved:
        assert ask(balancer, request()) == 502
    created = Counter({key: 3 * n for key, n in CREATED.items()})
    assert moved == finished("upstream_error", 502) + created + EJECTED + GIVEN_UP + move(
        upstream_errors_total__reset=3, retries_total__reset_before_response=2
    )


@pytest.mark.parametrize(
    ("behaviour", "reason", "status", "settings"),
    [
        (raw(b"what?\r\n\r\n"), "protocol", 502, {}),
        (raw(b"HTTP/1.1 200 OK\r\nX-Half: ", close=True), "truncated", 502, {}),
        (stall(), "timeout", 504, {"total_timeout": "300ms"}),
    ],
    ids=["protocol", "truncated", "timeout"],
)
def test_an_attempt_that_is_not_repeated(
    behaviour: Behaviour,
    reason: str,
    status: int,
    settings: dict[str, str],
    a: ScriptedReplica,
    start_quiet: StartQuiet,
) -> None:
    a.behave(behaviour)
    balancer = start_quiet(a, **settings)
    with watching(balancer, a=a) as moved:
        assert ask(balancer, request()) == status
    failed = Counter({f"upstream_errors_total {reason}": 1})
    assert moved == finished("upstream_error", status) + CREATED + GIVEN_UP + failed


@pytest.mark.parametrize(
    ("behaviour", "reason", "settings"),
    [
        (cut(b"half"), "truncated", {}),
        (cut(b"half", how="rst"), "reset", {}),
        (stream([b"half", threading.Event()]), "timeout", {"stream_idle_timeout": "200ms"}),
    ],
    ids=["truncated", "reset", "timeout"],
)
def test_an_answer_that_breaks_off(
    behaviour: Behaviour,
    reason: str,
    settings: dict[str, str],
    a: ScriptedReplica,
    start_quiet: StartQuiet,
) -> None:
    a.behave(behaviour)
    balancer = start_quiet(a, **settings)
    with watching(balancer, a=a) as moved:
        assert ask(balancer, request()) is None
    cut_off = Counter({f"upstream_errors_total {reason}": 1, "sent_bytes_total": 4})
    assert moved == finished("upstream_error", 200) + CREATED + cut_off


# --- clients that leave -------------------------------------------------------------------------

LONG_POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc"


@pytest.mark.parametrize(
    ("data", "behaviour", "phase", "code", "more"),
    [
        (LONG_POST, answer(), "request_body", 499, {"received_bytes_total": 3}),
        (request(), stall(), "before_head", 499, {}),
        (request(), stream([b"half", threading.Event()]), "streaming", 200, {"sent_bytes_total": 4}),
    ],
    ids=["request_body", "before_head", "streaming"],
)  # fmt: skip
def test_a_client_that_leaves(
    data: bytes,
    behaviour: Behaviour,
    phase: str,
    code: int,
    more: dict[str, int],
    a: ScriptedReplica,
    start_quiet: StartQuiet,
) -> None:
    a.behave(behaviour)
    balancer = start_quiet(a)
    with watching(balancer, a=a) as moved:
        with balancer.client() as client:
            client.send(data)
            a.wait_for(lambda: a.requests)
            if phase == "streaming":
                client.read_until(b"half")
        balancer.log.wait_for("request.finished")
    method = data.split()[0].decode()
    gone = Counter({f"client_disconnects_total {phase}": 1, **more})
    assert moved == finished("client_closed", code, method=method) + CREATED + gone


# --- times --------------------------------------------------------------------------------------


def buckets(text: str, name: str, **labels: str) -> dict[float, float]:
    """The cumulated counts of a histogram, by upper edge."""
    return {
        float(sample.labels["le"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"{PREFIX}{name}_bucket" and labels.items() <= sample.labels.items()
    }


def test_a_slow_answer_falls_into_its_bucket(a: ScriptedReplica, start_quiet: StartQuiet) -> None:
    more = threading.Event()
    a.behave(answer(b"", delay=0.3), stream([b"first", more]))
    balancer = start_quiet(a)
    assert ask(balancer, request()) == 200
    text = scrape(balancer)
    for name in ("request_duration_seconds", "time_to_first_byte_seconds"):
        found = buckets(text, name, outcome="ok")
        assert [found[0.25], found[float("inf")]] == [0, 1]
        assert 0.3 <= samples(text)[f"{name}_sum ok"] < 60
    with balancer.client() as client:
        client.send(request())
        client.read_until(b"first")
        time.sleep(0.3)  # what is measured
        more.set()
        client.read_until(b"0\r\n\r\n")
    balancer.log.wait_for("request.finished", 2)
    text, before = scrape(balancer), text
    firsts, alls = (
        samples(text)[f"{name}_sum ok"] - samples(before)[f"{name}_sum ok"]
        for name in ("time_to_first_byte_seconds", "request_duration_seconds")
    )
    assert alls - firsts >= 0.29


def test_own_time_leaves_out_the_wait_for_a_replica(
    a: ScriptedReplica, fake_controller: FakeController, start_balancer: StartBalancer
) -> None:
    balancer = start_balancer(no_replica_wait="20s")
    with balancer.client() as client:
        client.send(request())
        balancer.wait_for(lambda: balancer.balancer.plane.proxy.running)
        time.sleep(0.3)  # what is not to be measured
        fake_controller.set_ready([a.url])
        assert client.answer().status == 200
    found = samples(scrape(balancer))
    assert found["overhead_seconds_count"] == 1
    assert found["time_to_first_byte_seconds_sum ok"] - found["overhead_seconds_sum"] >= 0.3


def test_the_lag_of_a_loop_that_is_held_up(start_quiet: StartQuiet) -> None:
    balancer = start_quiet()
    balancer.call(lambda: time.sleep(0.8))  # longer than the loop's own pace, 0.5 s, by 0.3 s
    deadline = time.monotonic() + 20
    while True:
        found = buckets(scrape(balancer), "event_loop_lag_seconds")
        if found[float("inf")] > found[0.25]:
            return
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_connects_and_syncs_are_timed(a: ScriptedReplica, start_quiet: StartQuiet) -> None:
    balancer = start_quiet(a)
    assert ask(balancer, request()) == 200
    text = scrape(balancer)
    for name in ("upstream_connect_duration_seconds", "sync_duration_seconds"):
        assert samples(text)[f"{name}_count"] == buckets(text, name)[float("inf")] == 1
        assert 0 < samples(text)[f"{name}_sum"] < 20


# --- gauges -------------------------------------------------------------------------------------


def test_what_is_in_flight(a: ScriptedReplica, start_quiet: StartQuiet) -> None:
    go = threading.Event()
    a.behave_always(hold(go, answer(b"")))
    balancer = start_quiet(a)
    with balancer.client() as one, balancer.client() as two:
        with watching(balancer, a=a) as moved:
            one.send(request())
            two.send(request())
            a.wait_for(lambda: len(a.requests) == 2)
        oldest = moved.pop("inflight_oldest_seconds")
        assert moved == move(
            inflight_requests=2,
            replica_inflight_requests__a=2,
            pool_connections__active=2,
            pool_connections_total__created=2,
            upstream_connect_duration_seconds_count=2,
            arrivals_pending=2,
        )
        time.sleep(0.2)
        assert samples(scrape(balancer))["inflight_oldest_seconds"] >= oldest + 0.2
        go.set()
        assert one.answer().status == two.answer().status == 200
    found = samples(scrape(balancer), a=a)
    for key in ("inflight_requests", "inflight_oldest_seconds", "replica_inflight_requests a"):
        assert found[key] == 0
    assert (found["pool_connections active"], found["pool_connections idle"]) == (0, 2)


def states(balancer: RunningBalancer) -> dict[str, int]:
    found = samples(scrape(balancer))
    return {
        key: int(found[f"replicas {key}"]) for key in ("serving", "held", "draining", "ejected")
    }


def test_replicas_by_state_and_how_they_change(
    a: ScriptedReplica,
    b: ScriptedReplica,
    fake_controller: FakeController,
    start_balancer: StartBalancer,
) -> None:
    balancer = start_balancer(a, grace_period="1h")
    assert states(balancer) == {"serving": 1, "held": 0, "draining": 0, "ejected": 0}
    expected = Counter({"added": 1})

    def changes() -> Counter[str]:
        found = samples(scrape(balancer))
        return Counter(
            {key: int(found[f"replica_set_changes_total {key}"]) for key in CHANGES.split()}
        )

    assert changes() == expected
    fake_controller.set_ready([a.url, b.url])
    balancer.wait_for_replicas(2)
    fake_controller.set_ready([b.url])
    balancer.log.wait_for("replica.removed")
    assert changes() == (expected := expected + Counter({"added": 1, "removed": 1}))
    assert states(balancer) == {"serving": 1, "held": 0, "draining": 1, "ejected": 0}
    fake_controller.set_ready([a.url, b.url])
    balancer.log.wait_for("replica.revived")
    assert changes() == (expected := expected + Counter({"revived": 1}))
    fake_controller.set_ready([])
    balancer.log.wait_for("list.held")
    assert changes() == (expected := expected + Counter({"held": 2}))
    assert states(balancer) == {"serving": 0, "held": 2, "draining": 0, "ejected": 0}
    fake_controller.set_ready([a.url, b.url])
    balancer.log.wait_for("list.restored")
    a.refuse()
    while not balancer.log.named("replica.ejected"):
        assert ask(balancer, request()) == 200
    assert changes() == (expected := expected + Counter({"ejected": 1}))
    assert states(balancer) == {"serving": 2, "held": 0, "draining": 0, "ejected": 1}
    a.accept()
    balancer.wait_for(
        lambda: not balancer.balancer.plane.table.routable()[0].avoided(time.monotonic())
    )
    while not balancer.log.named("replica.restored"):
        assert ask(balancer, request()) == 200
    assert changes() == expected + Counter({"restored": 1})
    assert states(balancer) == {"serving": 2, "held": 0, "draining": 0, "ejected": 0}


def test_a_list_that_is_empty_for_too_long_is_released(
    a: ScriptedReplica,
    b: ScriptedReplica,
    fake_controller: FakeController,
    start_balancer: StartBalancer,
) -> None:
    balancer = start_balancer(a, b, grace_period="100ms")
    fake_controller.set_ready([])
    balancer.log.wait_for("list.released")
    assert samples(scrape(balancer))["replica_set_changes_total released"] == 2


def test_draining_is_told(a: ScriptedReplica, start_quiet: StartQuiet) -> None:
    go = threading.Event()
    a.behave(hold(go))
    balancer = start_quiet(a)
    assert samples(scrape(balancer))["draining"] == 0
    with balancer.client() as client:
        client.send(request())
        a.wait_for(lambda: a.requests)
        balancer.call(balancer.balancer.drain)
        balancer.log.wait_for("drain.started")
        assert samples(scrape(balancer))["draining"] == 1
        go.set()
        assert client.answer().status == 200


def test_the_certificate_s_end_is_told_if_there_is_one(
    pair: Pair, a: ScriptedReplica, start_quiet: StartQuiet
) -> None:
    key = "tls_certificate_not_after_timestamp_seconds"
    assert key not in samples(scrape(start_quiet(a)))
    found = samples(scrape(start_quiet(a, **pair.settings)))
    assert found[key] == pytest.approx(time.time() + 30 * 86400, abs=3600)


def test_info_says_what_runs(a: ScriptedReplica, start_quiet: StartQuiet) -> None:
    from lb import __version__

    balancer = start_quiet(a, service_name="chat", policy="round_robin")
    (info,) = (line for line in scrape(balancer).splitlines() if line.startswith(PREFIX + "info{"))
    assert re.fullmatch(
        rf'{PREFIX}info\{{mode="standalone",policy="round_robin",python="3\.\d+\.\d+",'
        rf'service="chat",version="{re.escape(__version__)}"\}} 1\.0',
        info,
    )


@pytest.mark.parametrize(
    ("controller", "mode"),
    [
        ("http://127.0.0.1:20001", "sidecar"),
        ("http://[::1]:20001", "sidecar"),
        ("http://localhost:20001", "sidecar"),
        ("http://10.0.0.1:20001", "standalone"),
        ("https://controller.example/of/chat", "standalone"),
    ],
)
def test_the_mode_is_read_off_the_controller_s_address(controller: str, mode: str) -> None:
    assert mode_of(controller) == mode


# --- the control plane --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sync", "result"),
    [
        (Answer(), "ok"),
        (Answer(ready=[]), "empty"),
        (Answer(delay=5), "timeout"),
        (Answer(cut=True), "connect_error"),
        (Answer(status=500), "http_error"),
        (Answer(body=b"junk"), "bad_payload"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_sync_is_counted_by_its_result(
    sync: Answer,
    result: str,
    a: ScriptedReplica,
    fake_controller: FakeController,
    start_quiet: StartQuiet,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hasty(self: ControllerClient, url: str, *, timeout: float = 0.3) -> None:
        of_old(self, url, timeout=timeout)

    of_old = ControllerClient.__init__
    monkeypatch.setattr(ControllerClient, "__init__", hasty)
    balancer = start_quiet(a)
    before = samples(scrape(balancer))
    assert before["sync_total ok"] == before["sync_duration_seconds_count"] == 1
    told = before["sync_last_success_timestamp_seconds"]
    assert told == pytest.approx(time.time(), abs=20)
    fake_controller.answer_next(sync)
    calls = len(fake_controller.syncs)
    syncer = balancer.balancer._syncer
    with watching(balancer, a=a) as moved:
        asyncio.run_coroutine_threadsafe(syncer.sync_once(), balancer.loop).result(20)
    assert len(fake_controller.syncs) == calls + 1
    held = move(replica_set_changes_total__held=1, replicas__held=1, replicas__serving=-1)
    expected = Counter({f"sync_total {result}": 1, "sync_duration_seconds_count": 1})
    expected.update(held if result == "empty" else {})
    assert moved == expected
    answered = samples(scrape(balancer))["sync_last_success_timestamp_seconds"]
    assert (answered > told) == (result in ("ok", "empty"))


def test_arrivals_wait_for_the_next_sync_or_are_dropped(start_quiet: StartQuiet) -> None:
    balancer = start_quiet()
    arrivals = balancer.balancer.plane.proxy.arrivals

    def old_and_new() -> None:
        arrivals.record(time.time() - 61)
        arrivals.record(time.time())

    with watching(balancer) as moved:
        balancer.call(old_and_new)
    assert moved == move(arrivals_pending=2)
    with watching(balancer) as moved:
        balancer.call(lambda: arrivals.restore(arrivals.take(time.time())))
    assert moved == move(arrivals_pending=-1, arrivals_dropped_total__expired=1)

    def flood() -> None:
        for _ in range(500_002):
            arrivals.record(0.0)

    with watching(balancer) as moved:
        balancer.call(flood)
    assert moved == move(arrivals_pending=499_999, arrivals_dropped_total__overflow=3)


# --- the page as a whole ------------------------------------------------------------------------


def full_page(replica: ScriptedReplica, start: StartBalancer, pair: Pair) -> str:
    """A page with every family: of a balancer that serves TLS, and has answered a request."""
    balancer = start(replica, **pair.settings)
    with TlsClient(balancer.address, pair) as client:
        assert client.ask(request()).status == 200
    return scrape(balancer)


Families = dict[tuple[str, str], tuple[str, dict[str, set[str]]]]


def families(text: str) -> Families:
    """By name and type: the help text, and the labels with their values."""
    found: Families = {}
    for family in text_string_to_metric_families(text):
        name = family.name.removeprefix(PREFIX) + ("_total" if family.type == "counter" else "")
        labels: dict[str, set[str]] = {}
        for sample in family.samples:
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
        assert (name, family.type) not in found
        found[name, family.type] = family.documentation, labels
    return found


def test_the_page_is_the_list(
    pair: Pair, a: ScriptedReplica, start_balancer: StartBalancer
) -> None:
    found = families(full_page(a, start_balancer, pair))
    assert found.keys() == LIST.keys()
    for family, expected in LIST.items():
        text, labels = found[family]
        assert re.fullmatch(r"[A-Z0-9].+\.", text), family
        assert labels.keys() == expected.keys() | {"service"}, family
        assert labels["service"] == {"default"}
        for label, values in expected.items():
            if label == "le":
                edges = {float(each) for each in values.split()} | {float("inf")}
                assert {float(each) for each in labels[label]} == edges, family
            elif values is not OPEN:
                assert labels[label] == set(values.split()), (family, label)


def test_no_name_is_one_that_scrapers_rewrite(
    pair: Pair, a: ScriptedReplica, start_balancer: StartBalancer
) -> None:
    text = full_page(a, start_balancer, pair)
    for line in text.splitlines():
        assert line.startswith((PREFIX, f"# HELP {PREFIX}", f"# TYPE {PREFIX}")), line
    assert "_created" not in text


def table(found: Families) -> str:
    """The README's table of metrics."""
    rows = []
    for (name, kind), (text, labels) in found.items():
        shown = []
        for label in labels.keys() - {"service", "le"}:
            values = LIST[name, kind][label]
            shown.append(f"`{label}`" + (f": {', '.join(values.split())}" if values else ""))
        rows.append(f"| `{name}` | {kind} | {'; '.join(sorted(shown))} | {text} |\n")
    return "| name | type | labels | meaning |\n| --- | --- | --- | --- |\n" + "".join(rows)


def test_the_readme_has_the_table_of_the_metrics(
    pair: Pair, a: ScriptedReplica, start_balancer: StartBalancer
) -> None:
    expected = table(families(full_page(a, start_balancer, pair)))
    _, begin, rest = README.read_text(encoding="utf-8").partition("<!-- metrics -->\n")
    block, end, _ = rest.partition("<!-- /metrics -->")
    assert begin
    assert end
    assert block == expected, f"put this between README.md's metrics markers:\n{expected}"


PROMTOOL = shutil.which("promtool")


@pytest.mark.skipif(PROMTOOL is None, reason="promtool (Debian: prometheus) is not installed")
def test_promtool_has_nothing_to_say(
    pair: Pair, a: ScriptedReplica, start_balancer: StartBalancer
) -> None:
    checked = subprocess.run(
        [str(PROMTOOL), "check", "metrics"],
        input=full_page(a, start_balancer, pair),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


# --- bounds -------------------------------------------------------------------------------------


def series(balancer: RunningBalancer) -> set[str]:
    lines = scrape(balancer).splitlines()
    return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}


def in_batches(client: RawClient, requests: Iterator[bytes], status: int, size: int = 8) -> int:
    """Ask for all of it, `size` requests ahead; how many there were."""
    count = 0
    while batch := list(itertools.islice(requests, size)):
        client.send(b"".join(batch))
        for _ in batch:
            assert client.answer().status == status
        count += len(batch)
    return count


def test_series_do_not_grow_with_what_clients_send(
    a: ScriptedReplica, fake_controller: FakeController, start_balancer: StartBalancer
) -> None:
    """litellm issue 12159."""
    a.behave_always(answer(b""))
    balancer = start_balancer(a, grace_period="0", no_replica_wait="0", access_log="off")
    known = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND", "MKCOL", "LOCK"]
    methods = itertools.cycle(known)

    def some(count: int, kind: str) -> Iterator[bytes]:
        for number in range(count):
            headers = {"X-Request-Id": f"{kind}-{number}", "Authorization": f"Bearer {number}"}
            yield request(next(methods), f"/{kind}/{number}?user={number}", headers)

    def all_statuses() -> None:
        with balancer.client() as client:
            assert in_batches(client, some(len(known), "first"), 200) == len(known)
        assert ask(balancer, b"FETCH0 / HTTP/1.1\r\nHost: x\r\n\r\n") == 501

    all_statuses()
    with balancer.client() as client:
        assert in_batches(client, some(1000, "answered"), 200) == 1000
    for number in range(100):
        assert ask(balancer, b"FETCH%d / HTTP/1.1\r\nHost: x\r\n\r\n" % number) == 501
    fake_controller.set_ready([])
    balancer.log.wait_for("list.released")
    with balancer.client() as client:
        in_batches(client, some(len(known), "first"), 503)
        before = series(balancer)
        assert in_batches(client, some(9000, "refused"), 503) == 9000
    assert series(balancer) == before
    assert len([key for key in before if "responses_total" in key]) <= 3 * 8


def test_series_of_500_replicas_go_10_minutes_after_they_left(
    a: ScriptedReplica, fake_controller: FakeController, start_balancer: StartBalancer
) -> None:
    balancer = start_balancer(a, grace_period="0")
    assert ask(balancer, request()) == 200
    before = series(balancer)
    others = [f"http://127.0.0.1:{10_000 + each}" for each in range(500)]
    fake_controller.set_ready([a.url, *others])
    balancer.wait_for_replicas(501)
    grown = series(balancer)
    assert len(grown - before) == 500 * (1 + len(OUTCOME.split()))
    fake_controller.set_ready([a.url])
    balancer.log.wait_for("replica.retired", 500)
    assert len(series(balancer) - before) == 500 * len(OUTCOME.split())
    gauges = balancer.balancer.metrics.gauges
    retired = gauges.now()
    gauges.now = lambda: retired + FORGET_SECONDS - 30  # it was a moment ago, on a slow machine
    assert len(series(balancer) - before) == 500 * len(OUTCOME.split())
    gauges.now = lambda: retired + FORGET_SECONDS
    assert series(balancer) == before
    assert FORGET_SECONDS == 600


def test_a_replica_that_comes_back_goes_on_counting(
    a: ScriptedReplica, fake_controller: FakeController, start_balancer: StartBalancer
) -> None:
    balancer = start_balancer(a, grace_period="0")
    assert ask(balancer, request()) == 200
    fake_controller.set_ready([])
    balancer.log.wait_for("replica.retired")
    fake_controller.set_ready([a.url])
    balancer.wait_for_replicas(1)
    gauges = balancer.balancer.metrics.gauges
    later = gauges.now() + 2 * FORGET_SECONDS
    gauges.now = lambda: later
    assert ask(balancer, request()) == 200
    assert samples(scrape(balancer), a=a)["replica_requests_total ok a"] == 2


def test_a_request_that_outlives_its_replica_s_series_brings_none_back(
    a: ScriptedReplica, fake_controller: FakeController, start_balancer: StartBalancer
) -> None:
    balancer = start_balancer(a, grace_period="0", no_replica_wait="1h", total_timeout="1h")
    a.refuse()
    with balancer.client() as client:
        client.send(request())
        balancer.log.wait_for("request.retried")
        fake_controller.set_ready([])
        balancer.log.wait_for("replica.retired")
        gauges = balancer.balancer.metrics.gauges
        later = gauges.now() + 2 * FORGET_SECONDS
        gauges.now = lambda: later
        assert not [key for key in series(balancer) if "replica_requests_total" in key]
    balancer.log.wait_for("request.finished")
    assert not [key for key in series(balancer) if "replica_requests_total" in key]


# --- the numbers of several processes -----------------------------------------------------------


def worked(*replicas: str) -> Metrics:
    """What one process counted that sent one request to each of these."""
    metrics = Metrics(service="s", policy="p")
    for replica in replicas:
        metrics.replica_added(replica)
        metrics.request_finished(("ok", 200, "GET", 0.2, 0.01, 0.001, 3, 5, replica))
    metrics.connection_created(0.002)
    metrics.connection_reused()
    metrics.loop_lag(0.0002)
    metrics.client_disconnected("streaming")
    metrics.retries_exhausted()
    return metrics


def test_the_numbers_of_processes_add_up() -> None:
    """To those of one process that did it all; but a replica that is not known here stays unknown."""
    total = Metrics(service="s", policy="p")
    total.replica_added("a")
    total.replica_added("b")
    total.numbers.add(worked("a", "b").take())
    total.numbers.add(worked("a", "gone").take())
    numbers = total.numbers
    assert numbers.requests["ok"] == numbers.responses[200, "GET"] == 4
    assert (numbers.received_bytes, numbers.sent_bytes, numbers.exhausted) == (12, 20, 2)
    assert (numbers.connections["created"], numbers.connections["reused"]) == (2, 2)
    assert (sum(numbers.connects.counts), sum(numbers.loop_lags.counts)) == (2, 2)
    assert sum(numbers.durations["ok"].counts) == sum(numbers.overheads.counts) == 4
    assert numbers.durations["ok"].sum == pytest.approx(0.8)
    assert numbers.disconnects["streaming"] == 2
    assert {name: counts["ok"] for name, counts in numbers.replicas.items()} == {"a": 2, "b": 1}


def test_what_was_taken_is_counted_no_more() -> None:
    metrics = worked("a")
    assert metrics.take().requests["ok"] == 1
    taken = metrics.take()
    assert taken.replicas.keys() == {"a"}  # it is known still
    assert not any(taken.requests.values())
    assert (taken.received_bytes, taken.exhausted, sum(taken.durations["ok"].counts)) == (0, 0, 0)
    metrics.request_finished(("ok", 200, "GET", 0.2, 0.01, 0.001, 3, 5, "a"))
    assert metrics.take().replicas["a"]["ok"] == 1
