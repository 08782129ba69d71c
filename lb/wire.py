"""aiohttp's HTTP/1.1 parsers, set up for a proxy: nothing unpacked, wide limits, faults in safe words.

The only module that knows their signatures.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp.http import HttpProcessingError, HttpRequestParser, HttpResponseParser
from aiohttp.http_exceptions import InvalidHeader, InvalidURLError, LineTooLong

# A header line or a request target may be this long (faults.md asks for 64 KiB)...
MAX_LINE_BYTES = 64 * 1024
# ...and a whole head this long, in this many lines.
MAX_HEAD_BYTES = 256 * 1024
MAX_HEADERS = 512
# A body stream holds its socket at twice this many unread bytes.
READ_LIMIT = 64 * 1024

_LIMITS: dict[str, Any] = {
    "limit": READ_LIMIT,
    "max_line_size": MAX_LINE_BYTES,
    "max_field_size": MAX_LINE_BYTES,
    "max_headers": MAX_HEADERS,
    "auto_decompress": False,
}


def request_parser(protocol: Any) -> Any:
    """A parser for the requests of one client connection."""
    return HttpRequestParser(protocol, asyncio.get_running_loop(), **_LIMITS)


def response_parser(protocol: Any, method: str) -> Any:
    """A parser for the answer to one request of this method."""
    return HttpResponseParser(
        protocol,
        asyncio.get_running_loop(),
        response_with_body=method != "HEAD",
        read_until_eof=True,
        **_LIMITS,
    )


def fault_of(error: HttpProcessingError) -> str:
    """What the parser found, without the bytes that it quotes: they may be anybody's secret."""
    if isinstance(error, LineTooLong):
        return f"a line is longer than {MAX_LINE_BYTES} bytes"
    if isinstance(error, InvalidHeader):
        return "a header is not valid"
    if isinstance(error, InvalidURLError):
        return "the request target is not valid"
    return error.message.split("\n", 1)[0].rstrip(":.").lower()
