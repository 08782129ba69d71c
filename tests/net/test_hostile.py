"""What is no valid HTTP: from clients (nothing of it reaches a replica) and from replicas (no client)."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from controller_client.fakes.http import response
from controller_client.testing import (
    Behaviour,
    Exchange,
    FakeController,
    ReplicaFactory,
    ScriptedReplica,
    answer,
    early,
    raw,
    stall,
)
from tests.net.conftest import StartBalancer
from tests.net.harness import Answer, Closed, RawClient, RunningBalancer, chunked, request

KIB = 1024
SECRET = "s3cret"

POST = b"POST /?s3cret HTTP/1.1\r\nHost: x\r\nAuthorization: s3cret\r\n"
GET = b"GET /?s3cret HTTP/1.1\r\nHost: x\r\nAuthorization: s3cret\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"


class Site:
    """A balancer in front of one replica, for many tests: it must never need a new start."""

    def __init__(self, stack: ExitStack) -> None:
        self.replica = stack.enter_context(ScriptedReplica())
        controller = stack.enter_context(FakeController([self.replica.url]))
        self.balancer = stack.enter_context(RunningBalancer(controller.url))
        self.balancer.wait_for_replicas(1)

    def log_text(self) -> str:
        return json.dumps(self.balancer.log.events)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(stack)


def refused(client: RawClient) -> Answer:
    """Our own answer, well-formed, and then the end of the connection, without an RST."""
    answered = client.answer()
    assert answered.status >= 400
    assert answered.values(b"content-type") == [b"application/json"]
    assert answered.values(b"connection") == [b"close"]
    assert answered.detail
    assert client.ended(), "an RST may destroy the answer on its way"
    return answered


def assert_unharmed(site: Site, requests_before: int, rejected_before: float) -> None:
    assert len(site.replica.requests) == requests_before, "it has reached the replica"
    assert SECRET not in site.log_text()
    rejected = site.balancer.metric("rejected_requests_total")
    assert rejected == rejected_before + 1
    assert site.balancer.get().status == 200
    assert site.balancer.in_flight() == 0


# --- from clients: refused by the head ----------------------------------------------------------

BAD_FRAMING = {
    "length and coding": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + LAST,
    "coding and length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n" + LAST,
    "same length twice": POST + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "two lengths": POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    "list of lengths": POST + b"Content-Length: 5, 5\r\n\r\nhello",
    "empty length": POST + b"Content-Length:\r\n\r\n",
    "length +5": POST + b"Content-Length: +5\r\n\r\nhello",
    "length -5": POST + b"Content-Length: -5\r\n\r\nhello",
    "length 0x5": POST + b"Content-Length: 0x5\r\n\r\nhello",
    "length 5 5": POST + b"Content-Length: 5 5\r\n\r\nhello",
    "length 5_0": POST + b"Content-Length: 5_0\r\n\r\nhello",
    "length 10**30": POST + b"Content-Length: 1" + b"0" * 30 + b"\r\n\r\nhello",
    "length 2**64": POST + b"Content-Length: 18446744073709551616\r\n\r\nhello",
    "length 2**64-1": POST + b"Content-Length: 18446744073709551615\r\n\r\n" + SMUGGLED,
    "length 2**63": POST + b"Content-Length: 9223372036854775808\r\n\r\n" + SMUGGLED,
    "coding in 1.0": b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n" + LAST,
    **{
        f"coding {coding!r}": POST + b"Transfer-Encoding:" + coding + b"\r\n\r\n" + LAST + SMUGGLED
        for coding in (
            *(b" chunked,", b" ,chunked", b" chunked, gzip", b" gzip, chunked", b" gzip"),
            *(b" xchunked", b" chunkedx", b" chunked;q=1", b' "chunked"', b" identity", b""),
            *(b" \x0bchunked", b" chunked\x0b", b" \x00chunked", b" chunked\x00", b" \xffchunked"),
            *(b"\r\n chunked", b" chunked\r\nTransfer-Encoding: chunked", b" chunked \t"),
            *(b" chunked\r\nTransfer-Encoding: identity", b" gzip\r\nTransfer-Encoding: chunked"),
            *(b" chunked\rX: y", b" chunked, chunked", b" chunked\r\nTransfer-Encoding:"),
        )
    },
    "space before colon": POST + b"Transfer-Encoding : chunked\r\n\r\n" + LAST,
    "tab before colon": POST + b"Content-Length\t: 5\r\n\r\nhello",
}

BAD_CHUNKS = {
    f"chunk {text!r}": CHUNKED + text + LAST + SMUGGLED
    for text in (
        *(b"5 5\r\nhello\r\n", b"0x5\r\nhello\r\n", b"5\nhello\r\n", b"5 \r\nhello\r\n"),
        *(b" 5\r\nhello\r\n", b"+5\r\nhello\r\n", b"-5\r\nhello\r\n", b"5_0\r\nhello\r\n"),
        *(b"5;\r\nhello\r\n", b"5;a\nhello\r\n", b"5;a\rb\r\nhello\r\n", b"5;\0\r\nhello\r\n"),
        *(b"10000000000000005\r\nhello\r\n", b"fffffffffffffffff\r\nhello\r\n", b"g\r\n"),
        *(b"5\r\nhello", b"5\r\nhello\n", b"5\r\nhello\r", b"5\r\nhelloXX", b"\r\n5\r\nhello\r\n"),
        *(
            b"5\r\rhello\r\n",
            b"0\n\n",
            b"0\r\n\n",
            b"0\r\nno trailer\r\n\r\n",
            b"0\r\nA : b\r\n\r\n",
        ),
        *(b"0\r\nContent-Length: 5\r\n\r\n", b"0\r\nTransfer-Encoding: chunked\r\n\r\n"),
    )
}

BAD_HEADS = {
    "bare LF everywhere": GET.replace(b"\r\n", b"\n") + b"\n",
    "bare LF after a header": GET + b"A: b\nC: d\r\n\r\n",
    "bare LF after the request line": GET.replace(b"\r\n", b"\n", 1) + b"\r\n",
    "bare LF at the end": GET + b"\n",
    "bare CR in a value": GET + b"A: s3cret\rs3cret: b\r\n\r\n",
    "bare CR at the end of a value": GET + b"A: s3cret\r\r\n\r\n",
    "bare CR after the request line": b"GET / HTTP/1.1\rHost: x\r\n\r\n",
    "NUL in a value": GET + b"A: s3cret\0\r\n\r\n",
    "NUL in a name": GET + b"s3cret\0: a\r\n\r\n",
    "NUL in the target": b"GET /s3cret\0 HTTP/1.1\r\nHost: x\r\n\r\n",
    "control in a value": GET + b"A: s3cret\x01\r\n\r\n",
    "DEL in a value": GET + b"A: s3cret\x7f\r\n\r\n",
    "folded value": GET + b"A: s3cret\r\n s3cret\r\n\r\n",
    "folded value with tab": GET + b"A: s3cret\r\n\ts3cret\r\n\r\n",
    "folded first line": b"GET / HTTP/1.1\r\n Host: x\r\n\r\n",
    "space before colon": GET + b"s3cret : a\r\n\r\n",
    "space in a name": GET + b"s3cret a: b\r\n\r\n",
    "latin-1 in a name": GET + b"s3cret\xe9: a\r\n\r\n",
    "no name": GET + b": s3cret\r\n\r\n",
    "no colon": GET + b"s3cret\r\n\r\n",
    "same Host twice": GET + b"Host: x\r\n\r\n",
    "two Hosts": GET + b"host: s3cret\r\n\r\n",
    "no Host": b"GET /s3cret HTTP/1.1\r\nA: s3cret\r\n\r\n",
    **{
        f"Host {host!r}": b"GET / HTTP/1.1\r\nHost: " + host + b"\r\n\r\n"
        for host in (b"s3cret a", b"s3cret/a", b"a@s3cret", b"s3cret\xe9", b"s3cret?", b"s3cret#")
    },
    "two Content-Types": GET + b"Content-Type: s3cret\r\nContent-Type: b\r\n\r\n",
    "space in the target": b"GET /s3cret s3cret HTTP/1.1\r\nHost: x\r\n\r\n",
    "space after the version": b"GET / HTTP/1.1 \r\nHost: x\r\n\r\n",
    "latin-1 in the target": b"GET /s3cret\xe9 HTTP/1.1\r\nHost: x\r\n\r\n",
    "asterisk for GET": b"GET * HTTP/1.1\r\nHost: x\r\n\r\n",
    "relative target": b"GET s3cret HTTP/1.1\r\nHost: x\r\n\r\n",
    "query alone": b"GET ?s3cret HTTP/1.1\r\nHost: x\r\n\r\n",
    "target without authority": b"GET http:///s3cret HTTP/1.1\r\nHost: x\r\n\r\n",
    "target with fragment for a host": b"GET http://s3cret#a HTTP/1.1\r\nHost: x\r\n\r\n",
    "target with a bad port": b"GET http://s3cret:99999/ HTTP/1.1\r\nHost: x\r\n\r\n",
    "target with open bracket": b"GET http://[s3cret/ HTTP/1.1\r\nHost: x\r\n\r\n",
    "authority for GET": b"GET s3cret:80 HTTP/1.1\r\nHost: x\r\n\r\n",
    "CONNECT": b"CONNECT s3cret:80 HTTP/1.1\r\nHost: s3cret:80\r\n\r\n" + SMUGGLED,
    "CONNECT to a path": b"CONNECT /s3cret HTTP/1.1\r\nHost: x\r\n\r\n",
    "HTTP/0.9": b"GET /s3cret\r\n\r\n",
    "HTTP/0.9 by name": b"GET /s3cret HTTP/0.9\r\n\r\n",
    "HTTP/1.2": b"GET /s3cret HTTP/1.2\r\nHost: x\r\n\r\n",
    "HTTP/2.0": b"GET /s3cret HTTP/2.0\r\nHost: x\r\n\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
    "lower-case version": b"GET /s3cret http/1.1\r\nHost: x\r\n\r\n",
    "another protocol": b"GET /s3cret SMTP/1.1\r\nHost: x\r\n\r\n",
    "lower-case method": b"get /s3cret HTTP/1.1\r\nHost: x\r\n\r\n",
    "unknown method": b"S3CRET /s3cret HTTP/1.1\r\nHost: x\r\n\r\n",
    "tabs in the request line": b"GET\t/s3cret\tHTTP/1.1\r\nHost: x\r\n\r\n",
    "space first": b" GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03s3cret" + bytes(200),
    "zeros": bytes(1000),
    "a line of text": b"s3cret was here\r\n",
    "SSH": b"SSH-2.0-s3cret\r\n",
    "an answer": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nA: s3cret\r\n\r\n",
}

STATUSES = {
    "length 2**64-1": 413,
    "length 2**63": 413,
    "coding b' ,chunked'": 501,
    "coding b' gzip, chunked'": 501,
    "coding b''": 501,
    "coding b' gzip\\r\\nTransfer-Encoding: chunked'": 400,
    "CONNECT": 405,
    "CONNECT to a path": 405,
    "HTTP/0.9": 505,
    "HTTP/0.9 by name": 505,
    "HTTP/2.0": 505,
    "lower-case method": 501,
    "unknown method": 501,
    "a line of text": 501,  # its first word might be a method
}
ALL_BAD = {**BAD_FRAMING, **BAD_CHUNKS, **BAD_HEADS}


@pytest.mark.parametrize("name", ALL_BAD)
def test_a_bad_request_is_refused_whole(name: str, site: Site) -> None:
    """tinyproxy issue 609, and what nginx, HAProxy and Envoy each let through in part."""
    before = len(site.replica.requests)
    rejected = site.balancer.metric("rejected_requests_total")
    with site.balancer.client() as client:
        client.send(ALL_BAD[name])
        answered = refused(client)
    assert answered.status == STATUSES.get(name, 400)
    assert SECRET.encode() not in answered.head + answered.body
    assert_unharmed(site, before, rejected)
    site.replica.requests.pop()


@pytest.mark.parametrize("name", {**BAD_FRAMING, **BAD_HEADS})
def test_a_bad_head_is_refused_in_whatever_pieces_it_comes(name: str, site: Site) -> None:
    before = len(site.replica.requests)
    data = {**BAD_FRAMING, **BAD_HEADS}[name]
    with site.balancer.client() as client:
        client.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            for position in range(len(data)):
                client.send(data[position : position + 1])
        except (BrokenPipeError, ConnectionResetError):
            pytest.fail("reset while it still sent")
        answered = refused(client)
    assert answered.status in (STATUSES.get(name, 400), 400)
    assert SECRET.encode() not in answered.head + answered.body
    assert len(site.replica.requests) == before
    assert SECRET not in site.log_text()


@pytest.mark.parametrize("name", BAD_CHUNKS)
def test_a_body_that_breaks_its_rules_under_way_ends_the_request(name: str, site: Site) -> None:
    """The head was good, so the replica has it by now; it must not take the body for whole."""
    before = len(site.replica.requests)
    data = BAD_CHUNKS[name]
    with site.balancer.client() as client:
        client.send(CHUNKED + b"1\r\nx\r\n")
        site.replica.wait_for(lambda: len(site.replica.requests) > before)
        client.send(data.removeprefix(CHUNKED))
        answered = refused(client)
    assert answered.status == 400
    assert SECRET.encode() not in answered.head + answered.body
    record = site.replica.requests[before]
    site.replica.wait_for(lambda: record.peer_closed_at)
    assert not record.body_complete
    assert len(site.replica.requests) == before + 1
    site.balancer.wait_for(lambda: not site.balancer.balancer.plane.proxy.running)
    assert site.balancer.metric("replica_set_changes_total", change="ejected") == 0


def test_a_bad_body_that_comes_with_its_head_waits_for_no_replica(
    start_balancer: StartBalancer,
) -> None:
    balancer = start_balancer(no_replica_wait="10s")
    with balancer.client(timeout=3.0) as client:
        client.send(BAD_CHUNKS["chunk b'5 5\\r\\nhello\\r\\n'"])
        assert refused(client).status == 400
    assert balancer.metric("requests_total") == 1


def test_requests_ahead_of_a_bad_one_are_served_and_those_behind_it_are_not(site: Site) -> None:
    before = len(site.replica.requests)
    with site.balancer.client() as client:
        assert client.ask(request()).status == 200
        client.send(request("POST", body=b"x") + BAD_FRAMING["length and coding"] + SMUGGLED)
        assert client.answer().status == 200
        refused(client)
    assert len(site.replica.requests) == before + 2


def test_the_detail_names_the_cause(site: Site) -> None:
    causes = {
        "length and coding": "transfer-encoding can't be present with content-length",
        "same length twice": "duplicate content-length",
        "length 2**64-1": "out of all proportion",
        "two Hosts": "duplicate 'host' header",
        "no Host": "missing 'host' header",
        "Host b's3cret a'": "Host is not valid",
        "TLS": "https traffic on an http port",
        "HTTP/2 preface": "http/2 is not spoken here",
        "HTTP/2.0": "only HTTP/1.0 and HTTP/1.1",
        "unknown method": "invalid method",
        "CONNECT": "forward prox",
        "coding b' gzip, chunked'": "Transfer-Encoding other than chunked",
        "coding in 1.0": "Transfer-Encoding in an HTTP/1.0 request",
    }
    for name, cause in causes.items():
        with site.balancer.client() as client:
            client.send(ALL_BAD[name])
            assert cause in refused(client).detail


BOMBS = {
    "many headers": (GET + b"A: b\r\n" * 513 + b"\r\n", 431),
    "long value": (GET + b"A: " + b"s3cret" * 12_000 + b"\r\n\r\n", 431),
    "long name": (GET + b"s3cret" * 12_000 + b": b\r\n\r\n", 431),
    "long target": (b"GET /" + b"s3cret" * 12_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
    "endless value": (GET + b"A: " + b"s3cret" * 2_000_000, 431),
    "endless name": (GET + b"s3cret" * 2_000_000, 431),
    "endless target": (b"GET /" + b"s3cret" * 2_000_000, 414),
    "endless headers": (GET + b"A: " + (b"s3cret" * 10_000 + b"\r\nA: ") * 100, 431),
    "many trailers": (CHUNKED + b"0\r\n" + b"A: b\r\n" * 1000 + b"\r\n", 431),
    "endless method": (b"S3CRET" * 200_000, 400),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_cut_at_its_limit(name: str, site: Site) -> None:
    before = len(site.replica.requests)
    rejected = site.balancer.metric("rejected_requests_total")
    data, status = BOMBS[name]
    with site.balancer.client() as client:
        client.send(data)
        answered = refused(client)
    assert answered.status == status
    assert SECRET.encode() not in answered.head + answered.body
    assert_unharmed(site, before, rejected)


def test_512_headers_and_a_head_of_200_kib_are_not_too_much(site: Site) -> None:
    many = [(f"A{number}", "x" * 300) for number in range(511)]
    with site.balancer.client() as client:
        assert client.ask(request(headers=many)).status == 200
        large = [(f"A{number}", "x" * 50_000) for number in range(4)]
        assert client.ask(request(headers=large)).status == 200


# --- from clients: too slow, too many -----------------------------------------------------------


def test_a_head_that_stops_halfway_is_cut_in_time(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    balancer = start_balancer(a, header_timeout="1s", keepalive_timeout="10s")
    for start in (b"G", GET, GET + b"A: b\r\n", GET + b"\r"):
        with balancer.client() as client:
            started = time.monotonic()
            client.send(start)
            assert refused(client).status == 408
            assert 0.9 < time.monotonic() - started < 2.5
    assert not a.requests
    assert balancer.metric("rejected_requests_total") == 4


def test_a_head_that_drips_is_cut_in_time(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    balancer = start_balancer(a, header_timeout="1s", keepalive_timeout="10s")
    with balancer.client() as client:
        assert client.ask(request()).status == 200  # the second head on a connection, too
        started = time.monotonic()
        done = threading.Event()

        def drip() -> None:
            for byte in GET + b"A: " + b"x" * 1000:
                if done.wait(0.05):
                    return
                client.send(bytes([byte]))

        sender = threading.Thread(target=drip)
        sender.start()
        answered = client.answer()
        done.set()
        sender.join()
        assert answered.status == 408
        assert time.monotonic() - started < 2.5
        assert client.ended()
    assert len(a.requests) == 1


def test_a_head_that_begins_in_the_segment_of_a_body_is_one_too(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    balancer = start_balancer(replica_factory(), header_timeout="500ms", keepalive_timeout="10s")
    with balancer.client(timeout=5.0) as client:
        assert client.ask(request("POST", body=b"x") + GET).status == 200
        assert refused(client).status == 408


def test_idle_connections_are_closed(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    balancer = start_balancer(replica_factory(), header_timeout="10s", keepalive_timeout="1s")
    with balancer.client() as fresh, balancer.client() as used:
        assert used.ask(request()).status == 200
        started = time.monotonic()
        assert fresh.ended()
        assert used.ended()
        assert time.monotonic() - started < 2.5
    balancer.wait_for(lambda: not len(balancer.balancer.plane.server))


def test_a_request_that_takes_long_is_not_idle(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    a.behave(answer(b"late", delay=1.5))
    balancer = start_balancer(a, header_timeout="200ms", keepalive_timeout="200ms")
    assert balancer.get().body == b"late"
    with balancer.client() as client:  # nor is a body that takes long a head
        client.send(request("POST", headers={"Content-Length": "2"}) + b"a")
        a.wait_for(lambda: len(a.requests) == 2)
        time.sleep(1.2)
        assert client.ask(b"b").status == 200


def test_connections_beyond_the_limit_are_told_so(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    balancer = start_balancer(a, max_connections="3")
    with ExitStack() as stack:
        clients = [stack.enter_context(balancer.client()) for _ in range(3)]
        for client in clients:
            assert client.ask(request()).status == 200
        for _ in range(3):
            with balancer.client() as too_many:
                too_many.send(request("POST", body=b"x" * 100_000))
                told = refused(too_many)
                assert told.status == 503
                assert told.values(b"retry-after") == [b"1"]
        for client in clients:
            assert client.ask(request()).status == 200
        assert balancer.metric("rejected_requests_total", reason="overload") == 3
    balancer.wait_for(lambda: not len(balancer.balancer.plane.server))
    assert balancer.get().status == 200
    assert len(a.requests) == 7


def test_a_connection_beyond_the_limit_is_ended_soon(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    balancer = start_balancer(replica_factory(), max_connections="1")
    with balancer.client() as client, balancer.client() as too_many:
        assert client.ask(request()).status == 200
        assert too_many.answer().status == 503
        started = time.monotonic()
        assert too_many.sock.recv(1) == b""
        with pytest.raises(ConnectionError):  # our end is open; theirs must not be for ever
            keep_sending(too_many, seconds=3.0)
        assert time.monotonic() - started < 2.5


def keep_sending(client: RawClient, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        client.send(b"x")
        time.sleep(0.05)


# --- own answers --------------------------------------------------------------------------------


def test_a_connection_outlives_our_own_answers(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    a.refuse()
    balancer = start_balancer(a, no_replica_wait="0")
    with balancer.client() as client:
        for body in (b"", b"x" * 1000, b"x" * 30_000):
            answered = client.ask(request("POST", body=body))
            assert answered.status == 503
            assert answered.values(b"retry-after")
            assert not answered.values(b"connection")
            assert json.loads(answered.body)["detail"].startswith("No ready replicas.")
        headless = client.ask(request("HEAD"), head_only=True)
        assert (headless.status, headless.values(b"content-length")) == (503, [b"0"])
        old = client.ask(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert old.status == 503
        assert old.values(b"connection") == [b"close"]
        assert client.ended()


def test_our_own_answer_reaches_a_client_that_is_still_sending(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    a.refuse()
    balancer = start_balancer(a, no_replica_wait="0")
    head = request("POST", headers={"Content-Length": str(20 * KIB * KIB)})
    with balancer.client() as client:
        client.send(head + b"x" * (20 * KIB * KIB))
        answered = refused(client)
        assert answered.status == 503
    with balancer.client() as client:
        client.send(head + b"x")
        assert refused(client).status == 503


def test_a_replicas_early_answer_says_that_the_connection_ends(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    a.behave(early(413))
    balancer = start_balancer(a)
    with balancer.client() as client:
        client.send(request("POST", headers={"Content-Length": "10000000"}) + b"x" * 100_000)
        assert client.answer().status == 413
        assert client.ended()


# --- from replicas ------------------------------------------------------------------------------

OK = b"HTTP/1.1 200 OK\r\n"
NO_HTTP = {
    "SSH": b"SSH-2.0-s3cret\r\n",
    "HTTP/0.9": b"<html>s3cret</html>",
    "garbage": b"\x00s3cret\xff\r\n\r\n",
    "a request": b"GET /s3cret HTTP/1.1\r\nHost: s3cret\r\n\r\n",
    "TLS": b"\x15\x03\x01\x00\x02\x02\x46",
    "ICY": b"ICY 200 OK\r\n\r\ns3cret",
    "HTTP/1.2": b"HTTP/1.2 200 s3cret\r\nContent-Length: 0\r\n\r\n",
    "status 99": b"HTTP/1.1 99 s3cret\r\nContent-Length: 0\r\n\r\n",
    "status 000": b"HTTP/1.1 000 s3cret\r\nContent-Length: 0\r\n\r\n",
    "status 1000": b"HTTP/1.1 1000 s3cret\r\nContent-Length: 0\r\n\r\n",
    "status -1": b"HTTP/1.1 -10 s3cret\r\nContent-Length: 0\r\n\r\n",
    "101 unasked": b"HTTP/1.1 101 s3cret\r\nUpgrade: s3cret\r\nConnection: upgrade\r\n\r\ns3cret",
    "CL and TE": OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + LAST,
    "TE and CL": OK + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n" + LAST,
    "two CLs": OK + b"Content-Length: 6\r\nContent-Length: 7\r\n\r\ns3cret",
    "same CL twice": OK + b"Content-Length: 6\r\nContent-Length: 6\r\n\r\ns3cret",
    "CL list": OK + b"Content-Length: 6, 6\r\n\r\ns3cret",
    "CL -1": OK + b"Content-Length: -1\r\n\r\ns3cret",
    "CL +6": OK + b"Content-Length: +6\r\n\r\ns3cret",
    "CL empty": OK + b"Content-Length:\r\n\r\ns3cret",
    "CL 10**30": OK + b"Content-Length: 1" + b"0" * 30 + b"\r\n\r\ns3cret",
    "CL 2**64-1": OK + b"Content-Length: 18446744073709551615\r\n\r\ns3cret",
    "CL 2**63": OK + b"Content-Length: 9223372036854775808\r\n\r\ns3cret",
    "TE gzip": OK + b"Transfer-Encoding: gzip\r\n\r\ns3cret",
    "TE gzip, chunked": OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n6\r\ns3cret\r\n" + LAST,
    "TE chunked, gzip": OK + b"Transfer-Encoding: chunked, gzip\r\n\r\n6\r\ns3cret\r\n" + LAST,
    "TE chunked,": OK + b"Transfer-Encoding: chunked,\r\n\r\n6\r\ns3cret\r\n" + LAST,
    "TE xchunked": OK + b"Transfer-Encoding: xchunked\r\n\r\n6\r\ns3cret\r\n" + LAST,
    "TE identity": OK + b"Transfer-Encoding: identity\r\n\r\ns3cret",
    "TE empty": OK + b"Transfer-Encoding:\r\n\r\ns3cret",
    "TE twice": OK + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n" + LAST,
    "bare CR in a value": OK + b"A: s3cret\rSet-Cookie: s3cret\r\nContent-Length: 0\r\n\r\n",
    "bare CR in the reason": b"HTTP/1.1 200 a\rb: s3cret\r\nContent-Length: 0\r\n\r\n",
    "NUL in the reason": b"HTTP/1.1 200 s3cret\0\r\nContent-Length: 0\r\n\r\n",
    "NUL in a value": OK + b"A: s3cret\0\r\nContent-Length: 0\r\n\r\n",
    "space before colon": OK + b"s3cret : a\r\nContent-Length: 0\r\n\r\n",
    "space behind length": OK + b"Content-Length : 6\r\n\r\ns3cret",
    "space behind coding": OK + b"Transfer-Encoding : chunked\r\n\r\n6\r\ns3cret\r\n" + LAST,
    "tab behind connection": OK + b"Connection\t: close\r\nContent-Length: 0\r\n\r\n",
    "no colon": OK + b"s3cret\r\nContent-Length: 0\r\n\r\n",
    "no name": OK + b": s3cret\r\nContent-Length: 0\r\n\r\n",
    "cut in the head": OK + b"A: s3cret\r\n",
    "cut in the status line": b"HTTP/1.1 2",
    "only an interim answer": b"HTTP/1.1 100 Continue\r\n\r\n",
    "long header": OK + b"A: " + b"s3cret" * 12_000 + b"\r\n\r\n",
    "many headers": OK + b"s3cret: a\r\n" * 513 + b"\r\n",
    **{
        f"chunk {size!r}": OK + b"Transfer-Encoding: chunked\r\n\r\n" + size + b"s3cret\r\n" + LAST
        for size in (
            b"6 6\r\n",
            b"0x6\r\n",
            b"-6\r\n",
            b"+6\r\n",
            b"10000000000000006\r\n",
            b"\r\n",
        )
    },
}


@pytest.mark.parametrize("name", NO_HTTP)
def test_nothing_of_an_answer_that_is_no_http_reaches_the_client(name: str, site: Site) -> None:
    """nginx passes on the bytes of whatever answers."""
    before = len(site.replica.requests)
    site.replica.behave(raw(NO_HTTP[name], close=True))
    with site.balancer.client() as client:
        answered = client.ask(request())
        assert answered.status == 502
        assert SECRET.encode() not in answered.head + answered.body
        assert str(site.replica.port) in answered.detail
        assert client.ask(request()).status == 200
    assert len(site.replica.requests) == before + 2, "what was answered must not be sent again"
    assert SECRET not in site.log_text()
    assert site.balancer.in_flight() == 0


@pytest.mark.parametrize("size", [b"6 6\r\n", b"0x6\r\n", b"-6\r\n", b"10000000000000006\r\n"])
def test_a_stream_that_breaks_its_rules_ends_with_a_reset(size: bytes, site: Site) -> None:
    """No client may take what came until then for the whole."""
    seen = threading.Event()

    async def break_it(exchange: Exchange) -> None:
        await exchange.send(OK + b"Transfer-Encoding: chunked\r\n\r\n4\r\ngood\r\n")
        await exchange.wait_for(seen)
        await exchange.send(size + b"s3cret\r\n" + LAST)
        exchange.close()

    site.replica.behave(break_it)
    with site.balancer.client() as client:
        client.send(request())
        head = client.read_until(b"\r\n\r\n")
        assert b"chunked" in head
        assert client.chunk() == b"good"
        seen.set()
        with pytest.raises(Closed) as caught:
            client.chunk()
    assert caught.value.reset
    assert caught.value.received == b""


def test_bytes_after_an_answer_are_nobodys_answer(site: Site) -> None:
    """A second answer on the heels of the first would be given to the next client."""
    seen = threading.Event()

    async def say_more(exchange: Exchange) -> None:
        await exchange.send(response(200, b"first"))
        await exchange.wait_for(seen)
        await exchange.send(response(200, b"s3cret"))
        await exchange.wait(None)

    site.replica.behave(say_more, raw(response(200, b"first") + response(200, b"s3cret")))
    with site.balancer.client() as client:
        assert client.ask(request()).body == b"first"
        record = site.replica.requests[-1]
        seen.set()
        site.replica.wait_for(lambda: record.peer_closed_at, timeout=2.0)
        assert client.ask(request()).body == b"first"
        assert client.ask(request()).body == b"replica"


def test_interim_answers_without_end_meet_the_wall(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()

    async def dither(exchange: Exchange) -> None:
        while True:
            await exchange.send(b"HTTP/1.1 100 Continue\r\n\r\n")
            await exchange.wait(0.05)

    a.behave_always(dither)
    balancer = start_balancer(a, total_timeout="1s")
    assert balancer.get().status == 504


def test_a_replica_that_sends_its_head_byte_by_byte_is_served(site: Site) -> None:
    whole = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nA: b\r\n\r\n" + chunked(b"ab", b"c")

    async def drip(exchange: Exchange) -> None:
        for position in range(len(whole)):
            await exchange.send(whole[position : position + 1])
            await exchange.wait(0.001)

    site.replica.behave(drip)
    answered = site.balancer.get()
    assert answered.values(b"a") == [b"b"]
    assert answered.body == b"abc"


def test_a_client_that_leaves_in_its_head_or_body_is_no_failure(site: Site) -> None:
    before = len(site.replica.requests)
    with site.balancer.client() as client:
        client.send(GET)
    site.replica.behave(stall())
    with site.balancer.client() as client:
        client.send(request("POST", headers={"Content-Length": "5"}) + b"a")
        site.replica.wait_for(lambda: len(site.replica.requests) > before)
    site.balancer.wait_for(lambda: not len(site.balancer.balancer.plane.server))
    assert site.balancer.in_flight() == 0
    assert site.balancer.get().status == 200


def test_a_flood_of_interim_answers_is_an_answer_of_ours(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    """Passed on to a client that does not read, it would fill our memory."""
    a = replica_factory()
    interim = b"HTTP/1.1 103 Early Hints\r\nLink: " + b"a" * 1000 + b"\r\n\r\n"
    a.behave_always(raw(interim * 5000))
    balancer = start_balancer(a)
    with balancer.client() as client:
        client.send(request())
        statuses = [client.answer().status]
        while statuses[-1] == 103:
            statuses.append(client.answer().status)
    assert statuses[-1] == 502
    assert len(statuses) <= 102
    assert balancer.metric("upstream_errors_total", reason="protocol") == 1


def test_an_endless_head_of_an_answer_is_cut(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    lines = b"".join(b"X-%d: %b\r\n" % (number, b"a" * 60_000) for number in range(6))
    a.behave_always(raw(b"HTTP/1.1 200 OK\r\n" + lines))
    assert start_balancer(a).get().status == 502


@pytest.mark.parametrize("version", [b"HTTP/2.0", b"HTTP/0.9"])
def test_an_answer_of_another_version_is_none(
    version: bytes, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    a.behave_always(raw(version + b" 200 OK\r\nContent-Length: 0\r\n\r\n"))
    assert start_balancer(a).get().status == 502


def late_body(head: bytes, body: bytes, gate: threading.Event) -> Behaviour:
    """A head that has no body by the rules, and then one all the same."""

    async def behave(exchange: Exchange) -> None:
        await exchange.send(head)
        await exchange.wait_for(gate)
        await exchange.send(body)

    return behave


@pytest.mark.parametrize(
    ("method", "head"),
    [
        ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 44\r\n\r\n"),
        ("HEAD", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"),
        ("GET", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 44\r\n\r\n"),
    ],
)
def test_a_body_behind_an_answer_without_one_never_goes_to_another_client(
    method: str, head: bytes, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    gate = threading.Event()
    poison = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nPOISON"
    a.behave(late_body(head, poison, gate), answer(b"mine"))
    balancer = start_balancer(a)
    with balancer.client() as first, balancer.client() as second:
        first.ask(request(method), head_only=True)
        second.send(request(target="/victim"))
        gate.set()
        assert second.answer().body == b"mine"


@pytest.mark.parametrize(
    ("method", "whole"),
    [
        ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbody"),
        ("GET", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 4\r\n\r\nbody"),
        ("GET", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokXX"),
    ],
)
def test_stray_bytes_behind_an_answer_do_not_spoil_it(
    method: str, whole: bytes, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    a.behave(raw(whole), answer(b"next"))
    balancer = start_balancer(a)
    with balancer.client() as client:
        head_only = method == "HEAD"
        told = client.ask(request(method), head_only=head_only)
        assert told.head.startswith(whole[:12])
        assert told.body == (b"ok" if b"okXX" in whole else b"")
        assert client.ask(request()).body == b"next"
    assert a.requests[1].number_on_connection == 1, "the spoilt connection was used again"


def test_line_ends_in_chunk_data_end_nothing(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    balancer = start_balancer(a)
    data = b"\r\n0\r\n\r\nGET / HTTP/1.1\r\n\r\n" * 1000
    head = request("POST", headers={"Transfer-Encoding": "chunked"})
    with balancer.client() as client:
        client.send(head + chunked(data, b"x", data) + request(target="/next"))
        assert client.answer().status == 200
        assert client.answer().status == 200
    assert bytes(a.requests[0].body) == data + b"x" + data
    assert [seen.target for seen in a.requests] == [b"/", b"/next"]


def test_an_empty_line_behind_a_body_begins_no_head(
    replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    """RFC 9112, section 2.2."""
    balancer = start_balancer(replica_factory(), header_timeout="500ms")
    with balancer.client() as client:
        assert client.ask(request("POST", body=b"abc") + b"\r\n").status == 200
        time.sleep(1.5)  # three times the limit of a half-sent head
        assert client.ask(request()).status == 200
