"""aiohttp's HTTP/1.1 parsers, set up for a proxy: nothing unpacked, wide limits, faults in safe words.

The only module that makes them, and that knows their words for a fault.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from aiohttp import StreamReader
from aiohttp.http import (
    HttpProcessingError,
    HttpRequestParser,
    HttpResponseParser,
    HttpVersion10,
    HttpVersion11,
    RawResponseMessage,
)
from aiohttp.http_exceptions import (
    BadHttpMessage,
    BadHttpMethod,
    InvalidHeader,
    InvalidURLError,
    LineTooLong,
)

from lb.headers import Fields

# A request target and a header line may be this long each...
MAX_TARGET_BYTES = 64 * 1024
MAX_HEADER_BYTES = 64 * 1024
# ...and a whole head this long, in this many lines.
MAX_HEAD_BYTES = 256 * 1024
MAX_HEADERS = 512
END_OF_HEAD = b"\r\n\r\n"
# An answer's lines may end without a CR. At most so many bytes of its end can have come before the rest.
END_OF_ANSWER_HEAD = re.compile(rb"\n\r?\n")
CARRIED = 2
# More digits than any length has. The parsers take 2**64 - 1 for no length at all, which the other
# side does not: it would wait for that body, or take the messages that follow for a part of it.
MAX_LENGTH_DIGITS = 18
# A body stream holds its socket at twice this many unread bytes.
READ_LIMIT = 64 * 1024

_LIMITS: dict[str, Any] = {
    "limit": READ_LIMIT,
    "max_line_size": MAX_TARGET_BYTES,
    # Less by what stands between name and value, which the parser does not count.
    "max_field_size": MAX_HEADER_BYTES - len(": "),
    "max_headers": MAX_HEADERS,
    "auto_decompress": False,
}

_METHOD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+ ")


def request_parser(protocol: Any) -> Any:
    """A parser for the requests of one client connection."""
    return HttpRequestParser(protocol, asyncio.get_running_loop(), **_LIMITS)


def response_head_parser(protocol: Any) -> Any:
    """A parser for the heads of one replica's answers; their bodies are not for it."""
    loop = asyncio.get_running_loop()
    return HttpResponseParser(protocol, loop, response_with_body=False, **_LIMITS)


def chunk_parser(protocol: Any) -> tuple[Any, StreamReader]:
    """A parser for one chunked body of an answer, and the stream that it fills."""
    parser = HttpResponseParser(protocol, asyncio.get_running_loop(), **_LIMITS)
    ((_, stream),), _, _ = parser.feed_data(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    return parser, stream


def is_absurd(length: bytes) -> bool:
    """Is this Content-Length, which the parser took, beyond all that can be sent?"""
    return len(length.lstrip(b"0")) > MAX_LENGTH_DIGITS


def check_answer(message: RawResponseMessage, fields: Fields) -> None:
    """Refuse what the parser takes from a replica, but must not be passed on.

    Raises HttpProcessingError.
    """
    if message.version not in (HttpVersion11, HttpVersion10):
        raise BadHttpMessage("neither HTTP/1.0 nor HTTP/1.1")
    if message.code < 100:
        raise BadHttpMessage("a status below 100")
    if "\0" in message.reason:
        raise BadHttpMessage("a NUL in the status line")
    names = b"".join(fields.names)
    if b" " in names or b"\t" in names:
        # Taken for the framing, it would be passed on beside our own.
        raise BadHttpMessage("a header name that ends with a space")
    length = fields.first.get(b"content-length")
    if length is not None and is_absurd(length):
        raise BadHttpMessage("a Content-Length out of all proportion")
    if b"transfer-encoding" in fields.first and not fields.is_chunked_alone():
        # The header is not passed on: the client would take what is still coded for the content.
        raise BadHttpMessage("a Transfer-Encoding other than chunked")


def fault_of(error: HttpProcessingError) -> str:
    """What the parser found, without the bytes that it quotes: they may be anybody's secret."""
    if isinstance(error, LineTooLong):
        if _is_target(error):
            return f"the first line is longer than {MAX_TARGET_BYTES} bytes"
        return f"a header line is longer than {MAX_HEADER_BYTES} bytes"
    if isinstance(error, InvalidHeader):
        return "a header is not valid"
    if isinstance(error, InvalidURLError):
        return "the request target is not valid"
    if error.message.startswith("Pause on PRI"):
        return "http/2 is not spoken here"
    return error.message.split("\n", 1)[0].rstrip(":.").lower()


def status_of(error: HttpProcessingError, data: bytes) -> int:
    """The status for what the parser found in this part of a request."""
    if isinstance(error, LineTooLong):
        return 414 if _is_target(error) else 431
    if error.message.startswith("Too many headers"):
        return 431
    # RFC 9110, section 9.1: what could be a method is not implemented; the parser's table is fixed.
    if isinstance(error, BadHttpMethod) and _METHOD.match(data):
        return 501
    return 400


def _is_target(error: LineTooLong) -> bool:
    # Only the limit that was met tells the two apart.
    return bool(error.args[1] == MAX_TARGET_BYTES)
