"""Every request and every answer crosses unharmed: byte for byte, on raw sockets, both ways."""

from __future__ import annotations

import gzip
import hashlib
import re
import subprocess
import threading
import time

import pytest

from controller_client.fakes.http import chunk, response, response_head
from controller_client.testing import (
    Exchange,
    FakeController,
    ReplicaFactory,
    RequestRecord,
    ScriptedReplica,
    answer,
    raw,
    stall,
    stream,
)
from tests.net.conftest import StartBalancer
from tests.net.harness import Answer, RawClient, RunningBalancer, chunked, request

KIB = 1024
# What a request gains on its way, after all that it had.
ADDED = (
    rb"X-Forwarded-For: 127\.0\.0\.1\r\n"
    rb"X-Forwarded-Proto: http\r\n"
    rb"X-Forwarded-Host: x\r\n"
    rb"X-Request-Id: [0-9a-f]{32}\r\n"
)
# All that llhttp knows for HTTP, CONNECT left out.
METHODS = (
    *("DELETE", "GET", "HEAD", "POST", "PUT", "OPTIONS", "TRACE", "PATCH", "QUERY", "SEARCH"),
    *("COPY", "LOCK", "MKCOL", "MOVE", "PROPFIND", "PROPPATCH", "UNLOCK", "BIND", "REBIND"),
    *("UNBIND", "ACL", "REPORT", "MKACTIVITY", "CHECKOUT", "MERGE", "MKCALENDAR", "LINK"),
    *("UNLINK", "M-SEARCH", "NOTIFY", "SUBSCRIBE", "UNSUBSCRIBE", "PURGE", "SOURCE"),
)


@pytest.fixture
def a(replica_factory: ReplicaFactory) -> ScriptedReplica:
    return replica_factory()


@pytest.fixture
def balancer(a: ScriptedReplica, start_balancer: StartBalancer) -> RunningBalancer:
    return start_balancer(a)


def ask(balancer: RunningBalancer, data: bytes, *, head_only: bool = False) -> Answer:
    with balancer.client() as client:
        return client.ask(data, head_only=head_only)


def request_line(record: RequestRecord) -> bytes:
    return record.raw_head.partition(b"\r\n")[0]


def lines_of(record: RequestRecord) -> list[bytes]:
    """The header lines as they arrived, those that are always added left out."""
    lines = record.raw_head.split(b"\r\n")[1:-2]
    return [line for line in lines if not line.startswith((b"X-Forwarded-", b"X-Request-Id"))]


# --- the request --------------------------------------------------------------------------------


def test_a_request_gains_four_headers_and_nothing_else(
    a: ScriptedReplica, balancer: RunningBalancer
) -> None:
    """aiohttp issue 457, linkerd issue 402: nothing is invented, and no body gets a framing."""
    assert ask(balancer, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n").status == 200
    expected = rb"GET /v1/models HTTP/1\.1\r\nHost: x\r\n" + ADDED + rb"\r\n"
    assert re.fullmatch(expected, a.requests[0].raw_head)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_of_the_parser_goes_through(
    method: str, a: ScriptedReplica, balancer: RunningBalancer
) -> None:
    assert ask(balancer, request(method), head_only=method == "HEAD").status == 200
    assert request_line(a.requests[0]) == f"{method} / HTTP/1.1".encode()
    assert lines_of(a.requests[0]) == [b"Host: x"]


def test_a_method_that_the_parser_does_not_know_is_not_implemented(
    a: ScriptedReplica, balancer: RunningBalancer
) -> None:
    """RFC 9110, section 9.1, has 501 for it: the parser's table is fixed."""
    refused = ask(balancer, request("BASELINE-CONTROL"))
    assert refused.status == 501
    assert "method" in refused.detail
    assert not a.requests


@pytest.mark.parametrize(
    "target",
    [
        "/m/org%2Fmodel%3Av1?x=a%2Bb+c&&e",
        "//",
        "//host/path",
        "//[/",
        "/a//b",
        "/a/../b",
        "/./a/.",
        "/../..",
        "/%2e%2e/%2E",
        "/?",
        "/a?",
        "/a?b?c",
        "/a?=&&=",
        "/a#b",
        "/a?b#c",
        "/%",
        "/%zz",
        '/"<>\\^`{|}',
        "/a;b=c,d",
        "/~!$&'()*+@:",
        "/http://elsewhere/",
        "/?next=http://elsewhere/",
    ],
)
def test_the_target_arrives_as_it_was_sent(
    target: str, a: ScriptedReplica, balancer: RunningBalancer
) -> None:
    """aiohttp issue 2188."""
    assert ask(balancer, request(target=target)).status == 200
    assert a.requests[0].target == target.encode()


@pytest.mark.parametrize(
    ("line", "target", "host"),
    [
        ("GET http://other:81/p?q", b"/p?q", b"other:81"),
        ("GET http://other", b"/", b"other"),
        ("GET http://other?q", b"/?q", b"other"),
        ("GET http://other?x=a/b", b"/?x=a/b", b"other"),
        ("GET http://other?u=http://z/admin", b"/?u=http://z/admin", b"other"),
        ("GET http://other/", b"/", b"other"),
        ("GET http://other//a/../%2F", b"//a/../%2F", b"other"),
        ("GET HTTPS://Other/P", b"/P", b"Other"),
        ("GET http://user:password@other/p", b"/p", b"other"),
        ("GET http://[::1]:81/p", b"/p", b"[::1]:81"),
        ("OPTIONS http://other/p", b"/p", b"other"),
        ("OPTIONS http://other", b"*", b"other"),  # RFC 9112, section 3.2.4
        ("OPTIONS *", b"*", b"x"),
    ],
)
def test_an_absolute_target_gives_the_host_but_not_where_we_connect(
    line: str, target: bytes, host: bytes, a: ScriptedReplica, balancer: RunningBalancer
) -> None:
    assert ask(balancer, f"{line} HTTP/1.1\r\nA: 1\r\nHost: x\r\n\r\n".encode()).status == 200
    assert a.requests[0].target == target
    assert lines_of(a.requests[0]) == [b"A: 1", b"Host: " + host]
    assert a.requests[0].values(b"x-forwarded-host") == [host]


def test_no_target_makes_a_forward_proxy_of_us(
    a: ScriptedReplica, replica_factory: ReplicaFactory, balancer: RunningBalancer
) -> None:
    """A host that can be reached, but is no replica of the service, must not be."""
    stranger = replica_factory("stranger")
    place = f"127.0.0.1:{stranger.port}"
    named = ask(balancer, request(target=f"http://{place}/", headers={"A": "1"}))
    assert (named.status, named.body) == (200, b"replica")
    for line in (f"CONNECT {place}", f"GET {place}", f"OPTIONS {place}"):
        refused = ask(balancer, f"{line} HTTP/1.1\r\nHost: {place}\r\n\r\n".encode())
        assert refused.status in (400, 405)
        assert refused.values(b"connection") == [b"close"]
    assert stranger.connections == 0
    assert len(a.requests) == 1


def test_headers_keep_order_case_repetition_and_bytes(
    a: ScriptedReplica, balancer: RunningBalancer
) -> None:
    lines = [
        b"zeta: 1",
        b"Host: Example.COM:8080",
        b"ALPHA: 2",
        b"aCCept: */*",
        b"Cookie: a=1",
        b"X-Twice: one",
        b"x-twice: two",
        b"X-Twice: one",
        b"Cookie: b=2",
        b"X-Latin: \xe9\xff\x80",
        b"X-Utf8: \xe2\x82\xac",
        b"X-Empty: ",
        b"X-Inner: a  b\tc",
        b"!#$%&'*+-.^_`|~9: odd",
        b'If-Match: "a", W/"b"',
        b"Via: 1.1 before",
        b"Forwarded: for=1.2.3.4",
        b"Authorization: Bearer key==",
    ]
    assert ask(balancer, b"\r\n".join([b"GET / HTTP/1.1", *lines, b"\r\n"])).status == 200
    assert lines_of(a.requests[0]) == lines


def test_a_body_keeps_its_framing_and_its_bytes(
    a: ScriptedReplica, balancer: RunningBalancer
) -> None:
    body = bytes(range(256)) * 40
    with balancer.client() as client:
        assert client.ask(request("POST", body=body)).status == 200
        assert client.ask(request("POST", headers={"Content-Length": "0"})).status == 200
        assert client.ask(request("POST")).status == 200
        coded = request("PUT", headers={"A": "1", "Transfer-Encoding": "CHUNKED", "B": "2"})
        assert client.ask(coded + chunked(body[:7], body[7:])).status == 200
        assert client.ask(request("GET", body=b"with a body")).status == 200
    assert [record.body for record in a.requests] == [body, b"", b"", body, b"with a body"]
    assert [lines_of(record)[1:] for record in a.requests] == [
        [b"Content-Length: 10240"],
        [b"Content-Length: 0"],
        [],
        [b"A: 1", b"B: 2", b"Transfer-Encoding: chunked"],  # between neighbours: framed anew
        [b"Content-Length: 11"],
    ]


def test_chunk_extensions_and_trailers_are_dropped_by_rule_on_the_way_in(
    a: ScriptedReplica, balancer: RunningBalancer
) -> None:
    """RFC 9112, section 7.1.1, RFC 9110, section 6.5.1; a trailer must not turn into a header."""
    arrived = []

    async def take_raw(exchange: Exchange) -> None:
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += await exchange.receive()
        arrived.append(data)
        exchange.close()
        await exchange.send(response(200, b"", [(b"Connection", b"close")]))

    a.behave(take_raw)
    head = request("POST", headers={"Transfer-Encoding": "chunked", "Trailer": "X-Sum"})
    body = b'5;a=b;c="d e"\r\nhello\r\n0\r\nX-Sum: 1\r\nX-Other: 2\r\n\r\n'
    assert ask(balancer, head + body).status == 200
    assert arrived == [b"5\r\nhello\r\n0\r\n\r\n"]
    assert lines_of(a.requests[0]) == [b"Host: x", b"Transfer-Encoding: chunked"]


@pytest.mark.parametrize("first_piece", range(1, 25))
def test_a_trailer_is_no_header_of_the_next_request(
    first_piece: int, a: ScriptedReplica, balancer: RunningBalancer
) -> None:
    """The parser keeps it, and puts it there, however the bytes are cut."""
    head = request("POST", headers={"Transfer-Encoding": "chunked"})
    body = b"1\r\nx\r\n0\r\nX-User: s\r\n\r\n"
    upload = request("POST", body=b"POST / HTTP/1.1\r\n\r\n")
    data = head + body + request() + upload + head + body + request("POST", body=b"y")
    with balancer.client() as client:
        client.send(data[: len(head) + first_piece])
        a.wait_for(lambda: a.requests)
        client.send(data[len(head) + first_piece :])
        assert [client.answer().status for _ in range(5)] == [200] * 5
        assert client.ask(request()).status == 200
    assert [bytes(record.body) for record in a.requests] == [
        *(b"x", b"", b"POST / HTTP/1.1\r\n\r\n", b"x", b"y", b""),
    ]
    assert not any(record.values(b"x-user") for record in a.requests)


def test_hop_by_hop_headers_do_not_reach_the_replica(
    a: ScriptedReplica, balancer: RunningBalancer
) -> None:
    """capsem issue 119; nginx, HAProxy and Envoy pass on what Connection names."""
    hops = {
        "Connection": "X-Hop, keep-alive ,TE",
        "X-Hop": "s",
        "X-Kept": "1",
        "connection": "x-other,\tX-Hop",
        "X-OTHER": "s",
        "x-hop": "s",
        "TE": "trailers",
        "Keep-Alive": "5",
        "Proxy-Connection": "keep-alive",
        "Proxy-Authorization": "Basic s",
        "Trailer": "X-Sum",
        "Upgrade": "foo",
        "Content-Length": "4",
    }
    assert ask(balancer, request("POST", headers=hops) + b"body").status == 200
    assert lines_of(a.requests[0]) == [b"Host: x", b"X-Kept: 1", b"Content-Length: 4"]
    assert a.requests[0].body == b"body"


def test_connection_cannot_name_the_framing_or_the_target_away(
    a: ScriptedReplica, balancer: RunningBalancer
) -> None:
    named = {"Connection": "Host, Content-Length, X-Forwarded-For, X-Request-Id, close"}
    assert ask(balancer, request("POST", headers=named, body=b"body")).status == 200
    assert lines_of(a.requests[0]) == [b"Host: x", b"Content-Length: 4"]
    assert a.requests[0].values(b"x-forwarded-for") == [b"127.0.0.1"]
    assert a.requests[0].body == b"body"


def test_forwarded_headers_tell_of_the_client(
    a: ScriptedReplica, balancer: RunningBalancer
) -> None:
    before = [
        ("X-Forwarded-For", "1.1.1.1"),
        ("A", "1"),
        ("x-forwarded-for", "2.2.2.2, 3.3.3.3"),
        ("X-Forwarded-Proto", "https"),
        ("X-Forwarded-Host", "front"),
        ("X-Request-Id", "ok-1.2:3@4+5=/6_7"),
    ]
    assert ask(balancer, request(headers=before)).values(b"x-request-id") == [b"ok-1.2:3@4+5=/6_7"]
    assert a.requests[0].headers == [
        (b"Host", b"x"),
        (b"X-Forwarded-For", b"1.1.1.1"),
        (b"A", b"1"),
        (b"x-forwarded-for", b"2.2.2.2, 3.3.3.3, 127.0.0.1"),
        (b"X-Forwarded-Proto", b"https"),
        (b"X-Forwarded-Host", b"front"),
        (b"X-Request-Id", b"ok-1.2:3@4+5=/6_7"),
    ]


@pytest.mark.parametrize("unsafe", ["", "a b", "a\tb", "x" * 129, '"{}"', "a,b", "\xe9"])
def test_an_unsafe_request_id_is_replaced(
    unsafe: str, a: ScriptedReplica, balancer: RunningBalancer
) -> None:
    answered = ask(balancer, request(headers={"x-request-id": unsafe}))
    (made,) = a.requests[0].values(b"x-request-id")
    assert re.fullmatch(rb"[0-9a-f]{32}", made)
    assert answered.values(b"x-request-id") == [made]
    assert balancer.log.wait_for("request.finished")[0]["request_id"] == made.decode()


def test_a_client_may_come_over_ipv6(a: ScriptedReplica, start_balancer: StartBalancer) -> None:
    balancer = start_balancer(a, host="::1")
    assert balancer.address[0] == "[::1]"
    with RawClient(("::1", balancer.address[1])) as client:
        assert client.ask(request()).status == 200
    assert a.requests[0].values(b"x-forwarded-for") == [b"::1"]


@pytest.mark.parametrize(
    ("sent", "arrives"),
    [
        (b"GET / HTTP/1.0\r\n\r\n", b"Host: "),
        (b"GET / HTTP/1.0\r\nHost: x\r\n\r\n", b"Host: x"),
        (b"GET / HTTP/1.1\r\nHost:\r\n\r\n", b"Host: "),
    ],
)
def test_a_missing_host_arrives_as_an_empty_one(
    sent: bytes, arrives: bytes, a: ScriptedReplica, balancer: RunningBalancer
) -> None:
    """RFC 9112, section 3.2: HTTP/1.1 towards the replica needs one."""
    assert ask(balancer, sent).status == 200
    assert lines_of(a.requests[0]) == [arrives]


# --- Expect -------------------------------------------------------------------------------------


@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_expect_is_answered_here_and_not_sent_on(
    framing: str, a: ScriptedReplica, balancer: RunningBalancer
) -> None:
    """fluxzy pull request 625: client, proxy and replica wait for each other."""
    coded = framing == "chunked"
    size = {"Transfer-Encoding": "chunked"} if coded else {"Content-Length": "5"}
    with balancer.client(timeout=3.0) as client:
        client.send(request("POST", headers={"Expect": "100-Continue", **size}))
        interim = client.answer()
        assert (interim.status, interim.headers) == (100, [])
        assert client.ask(chunked(b"hello") if coded else b"hello").status == 200
        assert client.ask(request()).status == 200
    assert a.requests[0].body == b"hello"
    assert not a.requests[0].values(b"expect")


def test_a_client_that_does_not_wait_for_100_gets_none(
    a: ScriptedReplica, balancer: RunningBalancer
) -> None:
    """RFC 9110, section 10.1.1: it may be left out where the body is here already."""
    answered = ask(balancer, request("POST", headers={"Expect": "100-continue"}, body=b"hello"))
    assert answered.status == 200
    assert a.requests[0].body == b"hello"


def test_an_early_refusal_comes_instead_of_100(
    a: ScriptedReplica, balancer: RunningBalancer
) -> None:
    """A replica that refuses by the head alone spares the client the body."""

    async def refuse(exchange: Exchange) -> None:
        await exchange.send(response(401, b"no", [(b"Connection", b"close")]))
        await exchange.finish()

    a.behave(refuse)
    head = request("POST", headers={"Expect": "100-continue", "Content-Length": "5"})
    with balancer.client() as client:
        client.send(head)
        answered = client.answer()
        while answered.status == 100:  # ours may be on its way by then
            answered = client.answer()
        assert (answered.status, answered.body) == (401, b"no")


def test_curl_uploads_at_once_with_expect(a: ScriptedReplica, balancer: RunningBalancer) -> None:
    body = b"x" * (2 * 1024 * KIB)
    host, port = balancer.address
    started = time.monotonic()
    done = subprocess.run(
        [
            *("curl", "-sS", "--data-binary", "@-", "-H", "Expect: 100-continue"),
            *("--expect100-timeout", "20", f"http://{host}:{port}/"),
        ],
        input=body,
        stdout=subprocess.PIPE,
        timeout=20,
        check=True,
    )
    assert time.monotonic() - started < 5.0, "curl waits 20 s for a 100"
    assert done.stdout == b"replica"
    assert a.requests[0].body_sha256 == hashlib.sha256(body).hexdigest()
    assert not a.requests[0].values(b"expect")


def test_an_expectation_that_is_unknown_cannot_be_met(
    a: ScriptedReplica, balancer: RunningBalancer
) -> None:
    assert ask(balancer, request(headers={"Expect": "a-miracle"})).status == 417
    assert not a.requests


# --- the answer ---------------------------------------------------------------------------------


def test_an_answer_gains_the_request_id_and_nothing_else(
    a: ScriptedReplica, balancer: RunningBalancer
) -> None:
    """backend.ai issue 13193: no header is lost for another of its name."""
    lines = [
        b"Server: it",
        b"set-cookie: a=1; Path=/",
        b"Set-Cookie: b=2",
        b"Via: 1.1 one",
        b"SET-COOKIE: a=1; Path=/",
        b"Via: 1.0 two",
        b"X-Latin: \xe9\xff",
        b"X-Empty: ",
        b"Server: twice",
        b"Content-Length: 2",
        b"Date: today",
    ]
    a.behave(raw(b"\r\n".join([b"HTTP/1.1 299 So \xe9 it is", *lines, b"", b"ok"])))
    answered = ask(balancer, request(headers={"X-Request-Id": "me"}))
    expected = [b"HTTP/1.1 299 So \xe9 it is", *lines, b"X-Request-Id: me", b"\r\n"]
    assert answered.head == b"\r\n".join(expected)
    assert answered.body == b"ok"


def test_hop_by_hop_headers_do_not_reach_the_client(
    a: ScriptedReplica, balancer: RunningBalancer
) -> None:
    hops = [
        (b"X-Hop", b"s"),
        (b"Connection", b"x-hop, keep-alive"),
        (b"X-Kept", b"1"),
        (b"connection", b"X-Other"),
        (b"x-other", b"s"),
        (b"Keep-Alive", b"timeout=5"),
        (b"Proxy-Authenticate", b"Basic"),
        (b"Proxy-Connection", b"keep-alive"),
        (b"Trailer", b"X-Sum"),
        (b"Upgrade", b"h2c"),
        (b"X-Request-Id", b"its own"),
    ]
    a.behave(answer(b"ok", headers=hops))
    answered = ask(balancer, request())
    assert answered.headers == [
        (b"X-Kept", b"1"),
        (b"X-Request-Id", b"its own"),
        (b"Content-Length", b"2"),
    ]


def test_chunk_extensions_and_trailers_are_dropped_by_rule_on_the_way_back(
    a: ScriptedReplica, balancer: RunningBalancer
) -> None:
    head = response_head(200, [(b"Transfer-Encoding", b"chunked"), (b"Trailer", b"X-Sum")])
    a.behave(raw(head + b"5;a=b\r\nhello\r\n0\r\nX-Sum: 1\r\nSet-Cookie: s\r\n\r\n"))
    with balancer.client() as client:
        answered = client.ask(request())
        assert answered.raw_body == b"5\r\nhello\r\n0\r\n\r\n"
        assert not answered.values(b"trailer")
        assert client.ask(request()).status == 200


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd", "deflate", "unknown"])
def test_a_coded_body_is_not_unpacked(
    encoding: str, a: ScriptedReplica, balancer: RunningBalancer
) -> None:
    """aiohttp issue 4462."""
    packed = gzip.compress(b"text" * 1000)
    a.behave_always(answer(packed, headers=[(b"Content-Encoding", encoding.encode())]))
    answered = ask(balancer, request("POST", headers={"Content-Encoding": encoding}, body=packed))
    assert answered.body == packed
    assert answered.values(b"content-length") == [str(len(packed)).encode()]
    assert answered.values(b"content-encoding") == [encoding.encode()]
    assert a.requests[0].body == packed


def test_a_redirect_is_the_clients(
    a: ScriptedReplica, replica_factory: ReplicaFactory, balancer: RunningBalancer
) -> None:
    stranger = replica_factory("stranger")
    location = f"{stranger.url}/login".encode()
    a.behave_always(answer(b"", status=307, headers=[(b"Location", location)]))
    answered = ask(balancer, request("POST", body=b"x"))
    assert (answered.status, answered.values(b"location")) == (307, [location])
    assert len(a.requests) == 1
    assert stranger.connections == 0


def test_there_is_no_cookie_jar(
    a: ScriptedReplica, fake_controller: FakeController, start_balancer: StartBalancer
) -> None:
    """litellm pull request 36149: seen only with a host name, for no cookie sticks to an address."""
    a.behave_always(answer(b"ok", headers=[(b"Set-Cookie", b"tenant=one; Path=/")]))
    balancer = start_balancer()
    fake_controller.set_ready([f"http://localhost:{a.port}"])
    balancer.wait_for_replicas(1)
    for _ in range(3):
        assert ask(balancer, request()).values(b"set-cookie") == [b"tenant=one; Path=/"]
    assert [record.values(b"cookie") for record in a.requests] == [[], [], []]


@pytest.mark.parametrize("size", [9 * KIB, 60 * KIB])
def test_long_lines_go_through(size: int, a: ScriptedReplica, balancer: RunningBalancer) -> None:
    """matlab-proxy issue 94: cookies, tokens and long URLs."""
    text = "x" * size
    a.behave(answer(b"ok", headers=[(b"X-Long", text.encode())]))
    answered = ask(balancer, request(target=f"/?{text}", headers={"Authorization": text}))
    assert answered.values(b"x-long") == [text.encode()]
    assert a.requests[0].target == f"/?{text}".encode()
    assert a.requests[0].values(b"authorization") == [text.encode()]


@pytest.mark.parametrize("over", [False, True])
def test_the_limit_of_a_line_is_64_kib(
    over: bool, a: ScriptedReplica, balancer: RunningBalancer
) -> None:
    line = "x" * (64 * KIB - (0 if over else len("A: ")))
    a.behave(answer(b"ok", headers=[(b"A", line.encode())]))
    answered = ask(balancer, request())
    assert answered.status == (502 if over else 200)
    if over:
        assert f"longer than {64 * KIB} bytes" in answered.detail
    before = len(a.requests)
    target = "/" + "x" * (64 * KIB - 1 + over)
    assert ask(balancer, request(target=target)).status == (414 if over else 200)
    assert ask(balancer, request(headers={"A": line})).status == (431 if over else 200)
    assert len(a.requests) == before + (0 if over else 2)


def test_one_line_of_2_mib_in_a_stream(a: ScriptedReplica, balancer: RunningBalancer) -> None:
    """sglang pull request 7301."""
    line = b"data: " + b"0123456789abcdef" * (128 * KIB) + b"\n\n"
    a.behave(stream([line]))
    assert ask(balancer, request()).body == line


@pytest.mark.parametrize(
    ("method", "head", "kept"),
    [
        ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", [b"1000"]),
        ("HEAD", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", []),
        ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", [b"0"]),
        ("GET", b"HTTP/1.1 204 No Content\r\n\r\n", []),
        ("POST", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 1000\r\n\r\n", [b"1000"]),
        ("GET", b"HTTP/1.1 304 Not Modified\r\nTransfer-Encoding: chunked\r\n\r\n", []),
        ("GET", b"HTTP/1.1 304 Not Modified\r\n\r\n", []),
    ],
)
def test_an_answer_without_a_body_ends_with_its_head(
    method: str, head: bytes, kept: list[bytes], a: ScriptedReplica, balancer: RunningBalancer
) -> None:
    a.behave(raw(head))
    with balancer.client(timeout=5.0) as client:
        answered = client.ask(request(method), head_only=True)
        assert answered.head.startswith(head.partition(b"\r\n")[0])
        assert answered.values(b"content-length") == kept
        assert not answered.values(b"transfer-encoding")
        assert client.ask(request()).body == b"replica"
    # A replica that announces a body may yet send it, so its connection is not used again.
    announced = b"Length: 1000" in head or b"Transfer-Encoding" in head
    assert [record.number_on_connection for record in a.requests] == [1, 1 if announced else 2]


@pytest.mark.parametrize("status", [200, 205, 404, 500, 599, 600, 999])
def test_an_empty_body_and_any_status(
    status: int, a: ScriptedReplica, balancer: RunningBalancer
) -> None:
    a.behave(raw(b"HTTP/1.1 %d\r\nContent-Length: 0\r\n\r\n" % status))
    with balancer.client() as client:
        answered = client.ask(request())
        assert answered.head.startswith(b"HTTP/1.1 %d \r\n" % status)
        assert answered.values(b"content-length") == [b"0"]
        assert client.ask(request()).status == 200


def test_interim_answers_are_passed_on(a: ScriptedReplica, balancer: RunningBalancer) -> None:
    """RFC 9110, section 15.2; a 100 has nobody to go to, for Expect is answered here."""
    hints = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\nlink: </b>\r\nKeep-Alive: 1\r\n\r\n"
    go_on = b"HTTP/1.1 100 Continue\r\n\r\n"
    progress = b"HTTP/1.1 102 \r\n\r\n"
    a.behave_always(raw(go_on + hints + progress + response(200, b"ok")))
    with balancer.client() as client:
        first = client.ask(request())
        assert (first.status, first.headers) == (103, [(b"Link", b"</a>"), (b"link", b"</b>")])
        assert client.answer().status == 102
        assert client.answer().body == b"ok"
    old = ask(balancer, b"GET / HTTP/1.0\r\nHost: x\r\n\r\n")
    assert (old.status, old.body) == (200, b"ok")


def test_interim_answers_are_passed_on_at_once(
    a: ScriptedReplica, balancer: RunningBalancer
) -> None:
    seen = threading.Event()

    async def hint(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 103 Early Hints\r\n\r\n")
        await exchange.wait_for(seen)
        await exchange.send(response(200, b"ok"))

    a.behave(hint)
    with balancer.client() as client:
        assert client.ask(request()).status == 103
        seen.set()
        assert client.answer().status == 200


def test_a_body_without_length_ends_with_the_connection(
    a: ScriptedReplica, balancer: RunningBalancer
) -> None:
    a.behave_always(raw(b"HTTP/1.0 200 OK\r\nA: 1\r\n\r\nall of it", close=True))
    with balancer.client() as client:
        answered = client.ask(request())
        assert answered.raw_body == b"9\r\nall of it\r\n0\r\n\r\n"
        assert client.ask(request()).body == b"all of it"


# --- HTTP/1.0 clients ---------------------------------------------------------------------------


def test_an_http_10_client_gets_no_chunks(a: ScriptedReplica, balancer: RunningBalancer) -> None:
    """HAProxy sends chunks to those who do not know them."""
    a.behave_always(stream([b"one", b"two"]))
    for extra in (b"", b"Connection: keep-alive\r\n"):
        with balancer.client() as client:
            answered = client.ask(b"GET / HTTP/1.0\r\nHost: x\r\n" + extra + b"\r\n")
        assert answered.body == b"onetwo"
        assert not answered.values(b"transfer-encoding")
        assert answered.values(b"connection") == [b"close"]


def test_an_http_10_client_is_kept_only_if_it_asks(
    a: ScriptedReplica, balancer: RunningBalancer
) -> None:
    with balancer.client() as client:
        for _ in range(2):
            kept = client.ask(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            assert kept.values(b"connection") == [b"keep-alive"]
            assert kept.body == b"replica"
        assert client.ask(b"GET / HTTP/1.0\r\n\r\n").values(b"connection") == [b"close"]
        assert client.ended()
    assert all(request_line(record).endswith(b"HTTP/1.1") for record in a.requests)
    assert not any(record.values(b"connection") for record in a.requests)


def test_an_http_10_client_has_no_expectations(
    a: ScriptedReplica, balancer: RunningBalancer
) -> None:
    """RFC 9110, section 10.1.1: its Expect is to be ignored, so it is sent no 100."""
    head = b"POST / HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n"
    with balancer.client() as client:
        client.send(head)
        a.wait_for(lambda: a.requests)
        assert client.ask(b"hello").status == 200


# --- the client's connection --------------------------------------------------------------------


async def echo(exchange: Exchange) -> None:
    """Answer with the target and the body, framed in a way that depends on the target."""
    await exchange.read_body()
    record = exchange.record
    body = record.target + b" " + bytes(record.body)
    if record.target.endswith(b"0"):
        head = response_head(200, [(b"Transfer-Encoding", b"chunked")])
        await exchange.send(head + chunk(body) + chunk(b""))
    else:
        await exchange.send(response(200, body))


@pytest.mark.parametrize("ahead", [1, 100_000], ids=["few", "many"])
def test_nothing_is_answered_behind_an_answer_that_says_close(
    ahead: int, a: ScriptedReplica, balancer: RunningBalancer
) -> None:
    """And what was sent ahead in vain must not turn the end into an RST, which may destroy it."""
    data = request(headers={"Connection": "close"}) + request() * ahead
    with balancer.client() as client:
        sender = threading.Thread(target=client.send, args=(data,))
        sender.start()
        answered = client.answer()
        assert (answered.status, answered.values(b"connection")) == (200, [b"close"])
        assert client.ended()
        sender.join()
        for _ in range(3):  # still taken: an RST would fail the second of these
            client.send(request())
            time.sleep(0.05)
    assert len(a.requests) == 1


@pytest.mark.parametrize("piece", [1 << 20, 1000, 7])
def test_pipelined_requests_are_answered_in_order(
    piece: int, a: ScriptedReplica, balancer: RunningBalancer
) -> None:
    a.behave_always(echo)
    coded = request("POST", "/x", {"Transfer-Encoding": "chunked"}) + chunked(b"a", b"b" * 999)
    data, expected = b"", []
    for number in range(40):
        target, body = f"/{number}", b"%d" % number * (number % 3)
        data += request("POST" if body else "GET", target, body=body) + coded
        expected += [target.encode() + b" " + body, b"/x a" + b"b" * 999]
    with balancer.client() as client:
        for start in range(0, len(data), piece):
            client.send(data[start : start + piece])
        assert [client.answer().body for _ in expected] == expected
    assert balancer.in_flight() == 0


def test_requests_sent_ahead_do_not_pile_up(a: ScriptedReplica, balancer: RunningBalancer) -> None:
    """Each with a body, whose end has the socket read on: what waits stays bounded all the same."""
    a.behave_always(echo)
    data = b"".join(request("POST", f"/{number}", body=b"x") for number in range(60_000))
    sender: threading.Thread
    most = 0
    with balancer.client() as client:
        sender = threading.Thread(target=client.send, args=(data,))
        sender.start()
        for number in range(1000):
            assert client.answer().body == b"/%d x" % number
            if number % 50 == 0:
                waiting = balancer.call(
                    lambda: [len(c._requests) for c in balancer.balancer.plane.server._connections]
                )
                most = max(most, *waiting)
        client.sock.shutdown(2)
        sender.join()
    whole_reads = 2 * 256 * KIB // len(request("POST", "/1", body=b"x"))
    assert most < whole_reads, f"{most} requests were taken in ahead"


@pytest.mark.parametrize("protocol", ["foo", "h2c", "TLS/1.0", "h2c, websocket"])
def test_requests_after_an_upgrade_that_came_to_nothing(
    protocol: str, a: ScriptedReplica, balancer: RunningBalancer
) -> None:
    """The parser would drop what follows one in the same segment."""
    upgrade = request(headers={"Connection": "Upgrade", "Upgrade": protocol})
    with balancer.client(timeout=5.0) as client:
        client.send(upgrade + request("POST", "/next", body=b"GET /smuggled HTTP/1.1\r\n\r\n"))
        assert client.answer().status == 200
        assert client.answer().status == 200
        assert client.ask(upgrade).status == 200
    assert [record.target for record in a.requests] == [b"/", b"/next", b"/"]


def test_requests_after_a_websocket_that_was_refused(
    a: ScriptedReplica, balancer: RunningBalancer
) -> None:
    upgrade = request(target="/ws", headers={"Connection": "Upgrade", "Upgrade": "WebSocket"})
    with balancer.client(timeout=5.0) as client:
        client.send(upgrade + request("POST", "/next", body=b"x"))
        assert client.answer().status == 200
        assert client.answer().status == 200
        assert client.ask(upgrade).status == 200
        assert client.ask(request()).status == 200
    assert [record.target for record in a.requests] == [b"/ws", b"/next", b"/ws", b"/"]


def test_what_a_client_sends_ahead_of_a_101_is_held_back(
    a: ScriptedReplica, balancer: RunningBalancer
) -> None:
    """It waits in the kernel, not in our memory."""
    upgrade = request(target="/ws", headers={"Connection": "Upgrade", "Upgrade": "websocket"})
    a.behave(stall())
    with balancer.client(timeout=0.5) as client:
        client.send(upgrade)
        a.wait_for(lambda: a.requests)
        with pytest.raises(TimeoutError):
            client.send(b"x" * (64 * 1024 * KIB))
        waiting = balancer.call(
            lambda: [
                len(c.after_upgrade or b"") for c in balancer.balancer.plane.server._connections
            ]
        )
        assert max(waiting) < 1024 * KIB
