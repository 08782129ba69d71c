"""What crosses the proxy and what does not, byte for byte."""

import string
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lb.headers import (
    HOP_BY_HOP,
    Fields,
    RawHeaders,
    has_no_body,
    interim_head,
    own_answer,
    request_head,
    request_id_of,
    response_head,
    upgrade_protocol,
)

HOP_BY_HOP_LINES: RawHeaders = [
    (b"Connection", b"close"),
    (b"Keep-Alive", b"timeout=5"),
    (b"Proxy-Authenticate", b"Basic"),
    (b"Proxy-Authorization", b"Basic eDp5"),
    (b"Proxy-Connection", b"keep-alive"),
    (b"TE", b"trailers"),
    (b"Trailer", b"Digest"),
    (b"Transfer-Encoding", b"chunked"),
    (b"Upgrade", b"h2c"),
]
# What a request always gains, with the arguments of `request`.
GAINED = (
    b"X-Forwarded-For: 10.0.0.9",
    b"X-Forwarded-Proto: http",
    b"X-Forwarded-Host: api.example",
    b"X-Request-Id: made-by-us",
)


def request(
    *headers: tuple[bytes, bytes],
    method: bytes = b"GET",
    target: bytes = b"/v1/models",
    request_id: bytes = b"made-by-us",
    scheme: bytes = b"http",
    chunked: bool = False,
    upgrade: bytes | None = None,
) -> bytes:
    return request_head(
        method,
        target,
        Fields(headers),
        host=b"api.example",
        client=b"10.0.0.9",
        scheme=scheme,
        request_id=request_id,
        chunked=chunked,
        upgrade=upgrade,
    )


def lines_of(head: bytes) -> list[bytes]:
    """The header lines of a head, without its first line; it ends as heads end."""
    assert head.endswith(b"\r\n\r\n")
    return head[:-4].split(b"\r\n")[1:]


HOST = (b"Host", b"api.example")


# --- requests: what stays -----------------------------------------------------------------------


def test_a_request_head_byte_for_byte() -> None:
    head = request(
        (b"hOsT", b"api.example"),
        (b"Accept", b"text/event-stream"),
        (b"authorization", b"Bearer t\xc3\xb6ken"),
        (b"Content-Length", b"17"),
        (b"Accept", b"*/*"),
        method=b"POST",
        target=b"/v1//chat/../a%2Fb%3Av1?x=a%2Bb+c&&e",
    )
    assert head == (
        b"POST /v1//chat/../a%2Fb%3Av1?x=a%2Bb+c&&e HTTP/1.1\r\n"
        b"hOsT: api.example\r\n"
        b"Accept: text/event-stream\r\n"
        b"authorization: Bearer t\xc3\xb6ken\r\n"
        b"Content-Length: 17\r\n"
        b"Accept: */*\r\n"
        b"X-Forwarded-For: 10.0.0.9\r\n"
        b"X-Forwarded-Proto: http\r\n"
        b"X-Forwarded-Host: api.example\r\n"
        b"X-Request-Id: made-by-us\r\n"
        b"\r\n"
    )


def test_a_request_gains_nothing_else() -> None:
    assert lines_of(request(HOST)) == [b"Host: api.example", *GAINED]


TOKEN = st.text(string.ascii_letters + string.digits + "!#$%&'*+-.^_`|~", min_size=1, max_size=8)
NAMES = TOKEN.map(str.encode).filter(
    lambda name: (
        name.lower() not in HOP_BY_HOP | {b"host", b"expect"} and not name.lower().startswith(b"x-")
    )
)
VALUES = st.binary(max_size=20).filter(lambda value: not set(value) & set(b"\r\n\0"))
PAIRS = st.lists(st.tuples(NAMES, VALUES), max_size=8)


@given(PAIRS)
def test_end_to_end_headers_keep_order_case_repetition_and_bytes(
    pairs: list[tuple[bytes, bytes]],
) -> None:
    lines = [name + b": " + value for name, value in pairs]
    assert lines_of(request(HOST, *pairs)) == [b"Host: api.example", *lines, *GAINED]
    assert lines_of(response_head(200, b"OK", Fields(pairs), request_id=b"r")) == [
        *lines,
        b"X-Request-Id: r",
    ]
    assert lines_of(interim_head(103, b"Early Hints", Fields(pairs))) == lines


# --- requests: what goes ------------------------------------------------------------------------


def test_the_hop_by_hop_headers_are_these() -> None:
    assert {name.lower() for name, _ in HOP_BY_HOP_LINES} == HOP_BY_HOP


@pytest.mark.parametrize("line", HOP_BY_HOP_LINES, ids=lambda line: line[0].decode())
@pytest.mark.parametrize("change", [bytes.lower, bytes.upper, bytes.title])
def test_a_hop_by_hop_header_never_crosses(
    line: tuple[bytes, bytes], change: Callable[[bytes], bytes]
) -> None:
    sent = (change(line[0]), line[1])
    assert lines_of(request(HOST, sent)) == [b"Host: api.example", *GAINED]
    assert lines_of(response_head(200, b"OK", Fields([sent]), request_id=b"r")) == [
        b"X-Request-Id: r"
    ]
    assert lines_of(interim_head(103, b"Early Hints", Fields([sent]))) == []


def test_expect_is_answered_here_and_not_sent_on() -> None:
    assert lines_of(request(HOST, (b"Expect", b"100-continue"))) == [b"Host: api.example", *GAINED]


def test_expect_means_nothing_in_an_answer_and_stays() -> None:
    head = response_head(200, b"OK", Fields([(b"Expect", b"x")]), request_id=b"r")
    assert lines_of(head) == [b"Expect: x", b"X-Request-Id: r"]


NAMED: RawHeaders = [
    (b"connection", b"close, X-Hop"),
    (b"x-hop", b"1"),
    (b"X-Kept", b"2"),
    (b"Connection", b" ,X-OTHER-hop ,"),
    (b"X-Other-Hop", b"3"),
    (b"X-HOP", b"4"),
]


def test_what_connection_names_goes_from_a_request() -> None:
    assert lines_of(request(HOST, *NAMED)) == [b"Host: api.example", b"X-Kept: 2", *GAINED]


def test_what_connection_names_goes_from_an_answer() -> None:
    head = response_head(200, b"OK", Fields(NAMED), request_id=b"r")
    assert lines_of(head) == [b"X-Kept: 2", b"X-Request-Id: r"]
    assert lines_of(interim_head(103, b"Early Hints", Fields(NAMED))) == [b"X-Kept: 2"]


def test_connection_cannot_cut_out_the_framing_or_the_target() -> None:
    named = (b"Connection", b"Host, Content-Length, close")
    length = (b"Content-Length", b"5")
    assert lines_of(request(HOST, named, length)) == [
        b"Host: api.example",
        b"Content-Length: 5",
        *GAINED,
    ]
    head = response_head(200, b"OK", Fields([named, length]), request_id=b"r")
    assert lines_of(head) == [b"Content-Length: 5", b"X-Request-Id: r"]


def test_connection_cannot_cut_out_what_we_tell_the_replica() -> None:
    named = b"X-Forwarded-For, X-Forwarded-Proto, X-Forwarded-Host, X-Request-Id"
    head = request(
        HOST,
        (b"Connection", named),
        (b"X-Forwarded-For", b"1.1.1.1"),
        (b"X-Forwarded-Proto", b"gopher"),
        (b"X-Forwarded-Host", b"evil.example"),
        (b"X-Request-Id", b"made-by-us"),
    )
    assert lines_of(head) == [b"Host: api.example", *GAINED]


# --- requests: Host and what says who asked -----------------------------------------------------


def test_an_http10_request_without_host_is_given_one_in_front() -> None:
    assert request((b"Accept", b"*/*")) == (
        b"GET /v1/models HTTP/1.1\r\n"
        b"Host: api.example\r\n"
        b"Accept: */*\r\n"
        b"X-Forwarded-For: 10.0.0.9\r\n"
        b"X-Forwarded-Proto: http\r\n"
        b"X-Forwarded-Host: api.example\r\n"
        b"X-Request-Id: made-by-us\r\n"
        b"\r\n"
    )


def test_the_authority_of_the_target_wins_over_host() -> None:
    head = request((b"Accept", b"*/*"), (b"HOST", b"other.example"))
    assert lines_of(head) == [b"Accept: */*", b"HOST: api.example", *GAINED]


def test_x_forwarded_for_is_appended_to_in_its_place() -> None:
    head = request(HOST, (b"x-forwarded-for", b"1.1.1.1, 2.2.2.2"), (b"Accept", b"*/*"))
    assert lines_of(head) == [
        b"Host: api.example",
        b"x-forwarded-for: 1.1.1.1, 2.2.2.2, 10.0.0.9",
        b"Accept: */*",
        *GAINED[1:],
    ]


def test_of_several_x_forwarded_for_the_last_is_appended_to() -> None:
    head = request((b"X-Forwarded-For", b"1.1.1.1"), HOST, (b"X-Forwarded-For", b"2.2.2.2"))
    assert lines_of(head)[:3] == [
        b"X-Forwarded-For: 1.1.1.1",
        b"Host: api.example",
        b"X-Forwarded-For: 2.2.2.2, 10.0.0.9",
    ]


def test_x_forwarded_for_is_appended_to_in_its_place_without_a_host_too() -> None:
    head = request((b"Accept", b"*/*"), (b"X-Forwarded-For", b"1.1.1.1"))
    assert lines_of(head) == [
        b"Host: api.example",
        b"Accept: */*",
        b"X-Forwarded-For: 1.1.1.1, 10.0.0.9",
        *GAINED[1:],
    ]


def test_x_forwarded_proto_and_host_are_kept_where_they_are_set() -> None:
    head = request(HOST, (b"x-forwarded-proto", b"https"), (b"X-FORWARDED-HOST", b"front.example"))
    assert lines_of(head) == [
        b"Host: api.example",
        b"x-forwarded-proto: https",
        b"X-FORWARDED-HOST: front.example",
        GAINED[0],
        GAINED[3],
    ]


def test_x_forwarded_proto_is_that_of_the_client_connection() -> None:
    assert b"X-Forwarded-Proto: https" in lines_of(request(HOST, scheme=b"https"))


# --- requests: X-Request-Id ---------------------------------------------------------------------


@pytest.mark.parametrize("value", [b"a", b"550e8400-e29b", b"A_z.0:@+=/-", b"x" * 128])
def test_a_safe_request_id_is_kept(value: bytes) -> None:
    headers = [(b"X-REQUEST-ID", value)]
    assert request_id_of(Fields(headers)) == value
    lines = lines_of(request(HOST, *headers, request_id=value))
    assert lines == [b"Host: api.example", b"X-REQUEST-ID: " + value, *GAINED[:3]]


@pytest.mark.parametrize(
    "value", [b"", b"a b", b"a\nb", b"a\n", b"\xc3\xa9", b'"a"', b"a,b", b"x" * 129]
)
def test_an_unsafe_request_id_is_replaced(value: bytes) -> None:
    headers = [(b"X-Request-Id", value)]
    assert request_id_of(Fields(headers)) is None
    assert lines_of(request(HOST, *headers)) == [b"Host: api.example", *GAINED]


def test_of_several_request_ids_the_first_counts_and_others_go() -> None:
    headers = [(b"X-Request-Id", b"one"), (b"X-Request-Id", b"two")]
    assert request_id_of(Fields(headers)) == b"one"
    lines = lines_of(request(HOST, *headers, request_id=b"one"))
    assert lines == [b"Host: api.example", b"X-Request-Id: one", *GAINED[:3]]


def test_there_is_no_request_id_without_the_header() -> None:
    assert request_id_of(Fields([(b"Request-Id", b"a")])) is None


# --- requests: body and upgrade -----------------------------------------------------------------


def test_a_chunked_request_is_sent_on_chunked() -> None:
    head = request(HOST, (b"Transfer-Encoding", b"Chunked"), chunked=True)
    assert lines_of(head) == [b"Host: api.example", *GAINED, b"Transfer-Encoding: chunked"]


def test_an_upgrade_is_asked_for_anew() -> None:
    head = request(
        HOST,
        (b"Connection", b"keep-alive, Upgrade"),
        (b"Upgrade", b"websocket"),
        (b"Sec-WebSocket-Key", b"a2V5"),
        upgrade=b"websocket",
    )
    assert lines_of(head) == [
        b"Host: api.example",
        b"Sec-WebSocket-Key: a2V5",
        *GAINED,
        b"Connection: Upgrade",
        b"Upgrade: websocket",
    ]


@pytest.mark.parametrize(
    ("headers", "protocol"),
    [
        ([(b"Connection", b"Upgrade"), (b"Upgrade", b"websocket")], b"websocket"),
        ([(b"CONNECTION", b"keep-alive, uPGRADE"), (b"upgrade", b"WebSocket")], b"WebSocket"),
        ([(b"Upgrade", b"websocket")], None),
        ([(b"Connection", b"Upgrade")], None),
        ([(b"Connection", b"Upgrade"), (b"Upgrade", b"")], None),
        ([(b"Connection", b"close"), (b"Upgrade", b"websocket")], None),
        ([], None),
    ],
)
def test_an_upgrade_needs_both_headers(headers: RawHeaders, protocol: bytes | None) -> None:
    assert upgrade_protocol(Fields(headers)) == protocol


# --- answers ------------------------------------------------------------------------------------


def test_a_response_head_byte_for_byte() -> None:
    head = response_head(
        207,
        b"Multi  Status",
        Fields(
            [
                (b"Server", b"uvicorn"),
                (b"set-cookie", b"a=1"),
                (b"Content-Encoding", b"gzip"),
                (b"Set-Cookie", b"b=2"),
                (b"Via", b"1.1 x"),
                (b"Content-Length", b"10"),
            ]
        ),
        request_id=b"made-by-us",
    )
    assert head == (
        b"HTTP/1.1 207 Multi  Status\r\n"
        b"Server: uvicorn\r\n"
        b"set-cookie: a=1\r\n"
        b"Content-Encoding: gzip\r\n"
        b"Set-Cookie: b=2\r\n"
        b"Via: 1.1 x\r\n"
        b"Content-Length: 10\r\n"
        b"X-Request-Id: made-by-us\r\n"
        b"\r\n"
    )


def test_an_answer_may_have_no_reason() -> None:
    assert response_head(200, b"", Fields([]), request_id=b"r").startswith(b"HTTP/1.1 200 \r\n")


def test_the_request_id_of_the_replica_is_kept() -> None:
    head = response_head(200, b"OK", Fields([(b"x-request-id", b"its own")]), request_id=b"ours")
    assert lines_of(head) == [b"x-request-id: its own"]


def test_a_request_id_that_connection_names_is_replaced_by_ours() -> None:
    headers = [(b"Connection", b"X-Request-Id"), (b"X-Request-Id", b"its own")]
    assert lines_of(response_head(200, b"OK", Fields(headers), request_id=b"ours")) == [
        b"X-Request-Id: ours"
    ]


def test_an_answer_without_a_length_is_chunked_where_told() -> None:
    head = response_head(200, b"OK", Fields([]), request_id=b"r", chunked=True)
    assert lines_of(head) == [b"X-Request-Id: r", b"Transfer-Encoding: chunked"]


def test_a_chunked_answer_has_no_length() -> None:
    headers = [(b"content-LENGTH", b"5"), (b"Transfer-Encoding", b"chunked"), (b"X-A", b"1")]
    head = response_head(200, b"OK", Fields(headers), request_id=b"r", chunked=True)
    assert lines_of(head) == [b"X-A: 1", b"X-Request-Id: r", b"Transfer-Encoding: chunked"]


@pytest.mark.parametrize(
    ("close", "keep_alive", "line"),
    [
        (False, False, []),
        (True, False, [b"Connection: close"]),
        (False, True, [b"Connection: keep-alive"]),
        (True, True, [b"Connection: close"]),
    ],
)
def test_an_answer_says_what_becomes_of_the_connection(
    close: bool, keep_alive: bool, line: list[bytes]
) -> None:
    headers = [(b"Connection", b"keep-alive")]  # the replica's: it is about another connection
    head = response_head(
        200, b"OK", Fields(headers), request_id=b"r", close=close, keep_alive=keep_alive
    )
    assert lines_of(head) == [b"X-Request-Id: r", *line]


def test_a_switch_of_protocols_names_the_protocol_and_nothing_else_of_the_connection() -> None:
    headers = [(b"Upgrade", b"websocket"), (b"Connection", b"Upgrade"), (b"Sec-A", b"1")]
    head = response_head(
        101,
        b"Switching Protocols",
        Fields(headers),
        request_id=b"r",
        upgrade=b"websocket",
    )
    assert lines_of(head) == [
        b"Sec-A: 1",
        b"X-Request-Id: r",
        b"Connection: Upgrade",
        b"Upgrade: websocket",
    ]


def test_an_answer_that_asks_for_an_upgrade_may_close_as_well() -> None:
    """RFC 9110, section 15.5.22: a 426 names the protocol."""
    head = response_head(
        426, b"Upgrade Required", Fields([]), request_id=b"r", close=True, upgrade=b"websocket"
    )
    assert lines_of(head) == [
        b"X-Request-Id: r",
        b"Connection: Upgrade, close",
        b"Upgrade: websocket",
    ]


def test_an_interim_head_byte_for_byte() -> None:
    headers = [(b"Link", b"</a>"), (b"Connection", b"close"), (b"link", b"</b>")]
    assert interim_head(103, b"Early Hints", Fields(headers)) == (
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\nlink: </b>\r\n\r\n"
    )


def test_an_answer_of_our_own_byte_for_byte() -> None:
    answer = own_answer(
        503, b'{"detail": "x"}', close=True, extra=[(b"Retry-After", b"2"), (b"X-Request-Id", b"r")]
    )
    assert answer == (
        b"HTTP/1.1 503 Service Unavailable\r\n"
        b"Content-Type: application/json\r\n"
        b"Content-Length: 15\r\n"
        b"Retry-After: 2\r\n"
        b"X-Request-Id: r\r\n"
        b"Connection: close\r\n"
        b"\r\n"
        b'{"detail": "x"}'
    )


def test_an_answer_of_our_own_may_leave_the_connection_open() -> None:
    assert own_answer(400, b"", close=False) == (
        b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: 0\r\n\r\n"
    )


@pytest.mark.parametrize(
    ("method", "status", "bodiless"),
    [
        ("GET", 200, False),
        ("POST", 404, False),
        ("HEAD", 200, True),
        ("HEAD", 500, True),
        ("GET", 204, True),
        ("GET", 304, True),
        ("GET", 100, True),
        ("GET", 101, True),
        ("GET", 199, True),
        ("GET", 205, False),
        ("GET", 303, False),
    ],
)
def test_which_answers_end_with_their_head(method: str, status: int, bodiless: bool) -> None:
    assert has_no_body(method, status) is bodiless


# --- reading headers ----------------------------------------------------------------------------


def test_first_takes_the_first_whatever_its_case() -> None:
    first = Fields([(b"A", b"1"), (b"b", b"2"), (b"B", b"3")]).first
    assert (first.get(b"b"), first.get(b"c")) == (b"2", None)


def test_tokens_come_from_all_lines_in_lower_case_without_empty_ones() -> None:
    headers = [(b"TE", b"Trailers , ,GZIP"), (b"te", b"\tdeflate"), (b"x", b"no")]
    assert Fields(headers).tokens(b"te") == {b"trailers", b"gzip", b"deflate"}
    assert Fields(headers).tokens(b"connection") == set()


@pytest.mark.parametrize(
    ("codings", "alone"),
    [
        ([b"chunked"], True),
        ([b"Chunked"], True),
        ([b"gzip, chunked"], False),
        ([b"gzip"], False),
        ([b"chunked", b"chunked"], False),
    ],
)
def test_chunked_may_be_the_only_coding(codings: list[bytes], alone: bool) -> None:
    fields = Fields([(b"Transfer-Encoding", coding) for coding in codings])
    assert fields.is_chunked_alone() is alone
