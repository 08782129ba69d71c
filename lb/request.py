"""One client request: what the parser found, made ready for the proxy, or why it is refused."""

from __future__ import annotations

import re
import time

from aiohttp import StreamReader
from aiohttp.http import HttpVersion10, HttpVersion11, RawRequestMessage

from lb.errors import BadRequest
from lb.headers import Fields, upgrade_protocol
from lb.wire import is_absurd

# RFC 3986, section 3.2, without the user: whatever else a Host holds is answered 400 (RFC 9112, 3.2).
HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=%:\[\]-]*")


class Request:
    """One client request; `body` is None where it has none, and `refused` says why it cannot be served."""

    __slots__ = (
        "arrived",
        "body",
        "chunked",
        "expects_continue",
        "fields",
        "host",
        "is_http10",
        "keep_alive",
        "length",
        "method",
        "refused",
        "target",
        "upgrade",
    )

    def __init__(self, message: RawRequestMessage, body: StreamReader) -> None:
        self.arrived = time.monotonic()
        self.method: str = message.method
        self.fields = fields = Fields(message.raw_headers)
        self.is_http10 = message.version == HttpVersion10
        self.keep_alive = not message.should_close
        self.chunked: bool = message.chunked
        self.length = fields.first.get(b"content-length")
        self.body = body if self.chunked or self.length is not None else None
        self.target, self.host = _target_of(message, fields)
        self.refused = _refusal(message, fields, self.host)
        self.expects_continue = b"expect" in fields.first and not self.is_http10
        self.upgrade: bytes | None = None
        if message.upgrade and not self.is_http10 and self.body is None:
            self.upgrade = upgrade_protocol(fields)
            if self.upgrade is not None and self.upgrade.lower() == b"h2c":
                self.upgrade = None  # HTTP/2 is not spoken here; RFC 9113 withdrew this upgrade


def _target_of(message: RawRequestMessage, fields: Fields) -> tuple[bytes, bytes]:
    """The target in origin form, and the authority.

    An absolute target (RFC 9112, section 3.2.2) gives the Host that the replica sees; it never
    says where we connect to.
    """
    target = message.path.encode("utf-8", "surrogateescape")
    host = fields.first.get(b"host") or b""
    if target.startswith(b"/") or target == b"*" or message.method == "CONNECT":
        return target, host
    rest = target.partition(b"://")[2]
    authority = re.split(rb"[/?#]", rest, maxsplit=1)[0]
    path = rest[len(authority) :]
    if not path and message.method == "OPTIONS":
        path = b"*"  # RFC 9112, section 3.2.4
    elif not path.startswith(b"/"):
        path = b"/" + path
    return path, authority.rpartition(b"@")[2]


def _refusal(message: RawRequestMessage, fields: Fields, host: bytes) -> BadRequest | None:
    """Why a request that the parser took is not served all the same."""
    if message.method == "CONNECT":
        return BadRequest("CONNECT is for forward proxies; this is a load balancer", status=405)
    if message.version not in (HttpVersion10, HttpVersion11):
        return BadRequest("only HTTP/1.0 and HTTP/1.1 are spoken here", status=505)
    if not HOST.fullmatch(host):
        return BadRequest("the Host is not valid")
    if b"transfer-encoding" in fields.first:
        if message.version == HttpVersion10:
            # RFC 9112, section 6.1: its framing is to be taken for faulty.
            return BadRequest("Transfer-Encoding in an HTTP/1.0 request")
        if not fields.is_chunked_alone():
            return BadRequest("a Transfer-Encoding other than chunked is not supported", status=501)
    length = fields.first.get(b"content-length")
    if length is not None and is_absurd(length):
        return BadRequest("the Content-Length is out of all proportion", status=413)
    expect = fields.first.get(b"expect")
    if expect is not None and expect.lower() != b"100-continue":
        return BadRequest("an Expect other than 100-continue cannot be met", status=417)
    return None
