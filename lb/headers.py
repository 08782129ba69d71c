"""What crosses the proxy and what does not: the heads of requests and responses, as bytes.

Pure. Names keep their case, lines their order and repetition. Only hop-by-hop headers are removed
(RFC 9110, section 7.6.1), and those that `Connection` names. Headers are pairs of raw bytes, as the
parsers give them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from http import HTTPStatus

RawHeaders = Sequence[tuple[bytes, bytes]]

# RFC 9110, section 7.6.1, and the two of RFC 2616, section 13.5.1, that address the next hop only.
# Trailer goes because trailers are dropped: RFC 9110, section 6.5.1, allows it to a proxy that
# cannot know whether the next hop has a use for them. Expect is answered here.
HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
REQUEST_ONLY_HERE = HOP_BY_HOP | {b"expect"}
# A client that names these in Connection would cut the request's framing or its target out of it.
NEVER_NAMED = frozenset({b"host", b"content-length"})

SAFE_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:@+=/-]{1,128}")


def first(headers: RawHeaders, name: bytes) -> bytes | None:
    """The value of the first header of this (lower-case) name."""
    for key, value in headers:
        if key.lower() == name:
            return value
    return None


def has(headers: RawHeaders, name: bytes) -> bool:
    """Is there a header of this (lower-case) name?"""
    return first(headers, name) is not None


def tokens(headers: RawHeaders, name: bytes) -> set[bytes]:
    """All comma-separated tokens, in lower case, of the headers of this (lower-case) name."""
    return {
        token.strip().lower()
        for key, value in headers
        if key.lower() == name
        for token in value.split(b",")
    } - {b""}


def upgrade_protocol(headers: RawHeaders) -> bytes | None:
    """What the client wants to upgrade to, if it asks for that properly (RFC 9110, section 7.8)."""
    wanted = first(headers, b"upgrade")
    return wanted if wanted and b"upgrade" in tokens(headers, b"connection") else None


def request_id_of(headers: RawHeaders) -> bytes | None:
    """The client's X-Request-Id, if it is safe to log and to send on."""
    value = first(headers, b"x-request-id")
    return value if value is not None and SAFE_REQUEST_ID.fullmatch(value) else None


def request_head(
    method: bytes,
    target: bytes,
    headers: RawHeaders,
    *,
    host: bytes,
    client: bytes,
    scheme: bytes,
    request_id: bytes,
    chunked: bool,
    upgrade: bytes | None,
) -> bytes:
    """The request head for a replica.

    `host` is the authority of the request, used where the client sent no Host (HTTP/1.0) or named
    the target in full; `client` is the address that X-Forwarded-For gains.
    """
    lines = [b"%b %b HTTP/1.1" % (method, target)]
    dropped = _dropped(headers, REQUEST_ONLY_HERE)
    forwarded_for = -1
    names = set()
    for name, value in headers:
        key = name.lower()
        if key in dropped or (key == b"x-request-id" and value != request_id):
            continue
        names.add(key)
        if key == b"host":
            value = host  # RFC 9112, section 3.2.2: the authority of the target wins
        elif key == b"x-forwarded-for":
            forwarded_for = len(lines)
        lines.append(b"%b: %b" % (name, value))
    if b"host" not in names:
        lines.insert(1, b"Host: " + host)
        forwarded_for += 1
    if b"x-forwarded-for" in names:
        lines[forwarded_for] += b", " + client
    else:
        lines.append(b"X-Forwarded-For: " + client)
    if b"x-forwarded-proto" not in names:
        lines.append(b"X-Forwarded-Proto: " + scheme)
    if b"x-forwarded-host" not in names:
        lines.append(b"X-Forwarded-Host: " + host)
    if b"x-request-id" not in names:
        lines.append(b"X-Request-Id: " + request_id)
    if chunked:
        lines.append(b"Transfer-Encoding: chunked")
    if upgrade:
        lines += (b"Connection: Upgrade", b"Upgrade: " + upgrade)
    lines.append(b"\r\n")
    return b"\r\n".join(lines)


def response_head(
    status: int,
    reason: bytes,
    headers: RawHeaders,
    *,
    request_id: bytes,
    chunked: bool = False,
    close: bool = False,
    keep_alive: bool = False,
    upgrade: bytes | None = None,
) -> bytes:
    """The response head for the client.

    `close` and `keep_alive` say what becomes of its connection, where the client cannot take it for
    granted (`keep_alive` is for HTTP/1.0).
    """
    lines = [b"HTTP/1.1 %d %b" % (status, reason)]
    dropped = _dropped(headers, HOP_BY_HOP)
    if chunked:
        # Both would contradict each other: RFC 9112, section 6.2.
        dropped = dropped | {b"content-length"}
    kept = [pair for pair in headers if pair[0].lower() not in dropped]
    lines += [b"%b: %b" % pair for pair in kept]
    if not has(kept, b"x-request-id"):
        lines.append(b"X-Request-Id: " + request_id)
    if chunked:
        lines.append(b"Transfer-Encoding: chunked")
    options = [b"Upgrade"] if upgrade else []
    if close:
        options.append(b"close")
    elif keep_alive:
        options.append(b"keep-alive")
    if options:
        lines.append(b"Connection: " + b", ".join(options))
    if upgrade:
        lines.append(b"Upgrade: " + upgrade)
    lines.append(b"\r\n")
    return b"\r\n".join(lines)


def interim_head(status: int, reason: bytes, headers: RawHeaders) -> bytes:
    """The head of a 1xx answer that is passed on (RFC 9110, section 15.2)."""
    dropped = _dropped(headers, HOP_BY_HOP)
    lines = [b"HTTP/1.1 %d %b" % (status, reason)]
    lines += [b"%b: %b" % (name, value) for name, value in headers if name.lower() not in dropped]
    lines.append(b"\r\n")
    return b"\r\n".join(lines)


def own_answer(
    status: int, body: bytes, *, close: bool, extra: Iterable[tuple[bytes, bytes]] = ()
) -> bytes:
    """A whole answer of our own: JSON, with its length."""
    lines = [
        b"HTTP/1.1 %d %b" % (status, HTTPStatus(status).phrase.encode()),
        b"Content-Type: application/json",
        b"Content-Length: %d" % len(body),
    ]
    lines += [b"%b: %b" % pair for pair in extra]
    if close:
        lines.append(b"Connection: close")
    lines += (b"", body)
    return b"\r\n".join(lines)


def has_no_body(method: str, status: int) -> bool:
    """Does a response to this method, of this status, end with its head (RFC 9112, section 6.3)?"""
    return method == "HEAD" or status in (204, 304) or 100 <= status < 200


def _dropped(headers: RawHeaders, always: frozenset[bytes]) -> frozenset[bytes]:
    named = tokens(headers, b"connection")
    return always | (named - NEVER_NAMED) if named else always
