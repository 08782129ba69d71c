"""What crosses the proxy and what does not: the heads of requests and responses, as bytes.

Pure. Names keep their case, lines their order and repetition. Only hop-by-hop headers are removed
(RFC 9110, section 7.6.1), and those that `Connection` names. Headers are pairs of raw bytes, as the
parsers give them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from itertools import compress
from operator import itemgetter, not_

RawHeaders = Sequence[tuple[bytes, bytes]]
NAME, VALUE = itemgetter(0), itemgetter(1)

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

# Values of Connection that name no header, as nearly all clients and replicas send.
ORDINARY = frozenset({b"keep-alive", b"close", b"upgrade"})

IS_LENGTH = re.compile(rb"content-length:", re.IGNORECASE)
SAFE_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:@+=/-]{1,128}")


class Fields:
    """The headers of one message. `first`: by lower-case name, the value of the first of that name."""

    __slots__ = ("first", "names", "pairs")

    def __init__(self, pairs: RawHeaders) -> None:
        self.pairs = pairs
        # map, zip and dict do in one call what a loop here would do in twenty steps a header.
        self.names = list(map(bytes.lower, map(NAME, pairs)))
        self.first = dict(zip(self.names, map(VALUE, pairs), strict=True))
        if len(self.first) < len(self.names):
            for name, value in zip(reversed(self.names), map(VALUE, reversed(pairs)), strict=True):
                self.first[name] = value

    def all(self, name: bytes) -> list[bytes]:
        """The values of all headers of this (lower-case) name."""
        return [pair[1] for each, pair in zip(self.names, self.pairs, strict=True) if each == name]

    def is_chunked_alone(self) -> bool:
        """Is `chunked` all that was done to the body for the transfer?"""
        return [coding.lower() for coding in self.all(b"transfer-encoding")] == [b"chunked"]

    def tokens(self, name: bytes) -> set[bytes]:
        """All comma-separated tokens, in lower case, of the headers of this (lower-case) name."""
        return {t.strip().lower() for each in self.all(name) for t in each.split(b",")} - {b""}

    def to_send_on(self, only_here: frozenset[bytes] = HOP_BY_HOP) -> Fields:
        """Those that cross: neither in `only_here` nor named by `Connection` (RFC 9110, 7.6.1)."""
        dropped: set[bytes] | frozenset[bytes] = only_here
        connection = self.first.get(b"connection")
        if connection is not None and not self._is_ordinary(connection):
            dropped = only_here | (self.tokens(b"connection") - NEVER_NAMED)
        if dropped.isdisjoint(self.first):
            return self
        crossing = map(not_, map(dropped.__contains__, self.names))
        return Fields(tuple(compress(self.pairs, crossing)))

    def _is_ordinary(self, connection: bytes) -> bool:
        return connection.lower() in ORDINARY and self.names.count(b"connection") == 1

    def lines(self) -> list[bytes]:
        """As they were, each without its line end."""
        return list(map(b": ".join, self.pairs))


def upgrade_protocol(fields: Fields) -> bytes | None:
    """What the client wants to upgrade to, if it asks for that properly (RFC 9110, section 7.8)."""
    wanted = fields.first.get(b"upgrade")
    return wanted if wanted and b"upgrade" in fields.tokens(b"connection") else None


def request_id_of(fields: Fields) -> bytes | None:
    """The client's X-Request-Id, if it is safe to log and to send on."""
    value = fields.first.get(b"x-request-id")
    return value if value is not None and SAFE_REQUEST_ID.fullmatch(value) else None


def request_head(
    method: bytes,
    target: bytes,
    fields: Fields,
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
    crossing = fields.to_send_on(REQUEST_ONLY_HERE)
    first, lines = crossing.first, crossing.lines()
    if (
        first.get(b"host", host) != host
    ):  # RFC 9112, section 3.2.2: the authority of the target wins
        place = crossing.names.index(b"host")
        lines[place] = b"%b: %b" % (crossing.pairs[place][0], host)
    if b"x-forwarded-for" in first:
        place = len(lines) - 1 - crossing.names[::-1].index(b"x-forwarded-for")
        lines[place] += b", " + client
    else:
        lines.append(b"X-Forwarded-For: " + client)
    if b"x-forwarded-proto" not in first:
        lines.append(b"X-Forwarded-Proto: " + scheme)
    if b"x-forwarded-host" not in first:
        lines.append(b"X-Forwarded-Host: " + host)
    if b"x-request-id" in first:
        lines = [line for line in lines if not _is_other_id(line, request_id)]
    if first.get(b"x-request-id") != request_id:
        lines.append(b"X-Request-Id: " + request_id)
    if chunked:
        lines.append(b"Transfer-Encoding: chunked")
    if upgrade:
        lines += (b"Connection: Upgrade", b"Upgrade: " + upgrade)
    if b"host" not in first:
        lines.insert(0, b"Host: " + host)
    return b"%b %b HTTP/1.1\r\n%b\r\n\r\n" % (method, target, b"\r\n".join(lines))


def _is_other_id(line: bytes, request_id: bytes) -> bool:
    name, _, value = line.partition(b": ")
    return name.lower() == b"x-request-id" and value != request_id


def response_head(
    status: int,
    reason: bytes,
    fields: Fields,
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
    crossing = fields.to_send_on()
    lines = crossing.lines()
    if b"x-request-id" not in crossing.first:
        lines.append(b"X-Request-Id: " + request_id)
    if chunked:
        # Both would contradict each other: RFC 9112, section 6.2.
        if b"content-length" in crossing.first:
            lines = [line for line in lines if not IS_LENGTH.match(line)]
        lines.append(b"Transfer-Encoding: chunked")
    if close or keep_alive or upgrade:
        options = [b"Upgrade"] if upgrade else []
        if close:
            options.append(b"close")
        elif keep_alive:
            options.append(b"keep-alive")
        lines.append(b"Connection: " + b", ".join(options))
    if upgrade:
        lines.append(b"Upgrade: " + upgrade)
    return b"HTTP/1.1 %d %b\r\n%b\r\n\r\n" % (status, reason, b"\r\n".join(lines))


def interim_head(status: int, reason: bytes, fields: Fields) -> bytes:
    """The head of a 1xx answer that is passed on (RFC 9110, section 15.2)."""
    return b"\r\n".join(
        [b"HTTP/1.1 %d %b" % (status, reason), *fields.to_send_on().lines(), b"\r\n"]
    )


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
