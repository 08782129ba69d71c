"""Just enough of HTTP/1.1 to be a server, with every byte of a request kept as it came."""

import re
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from http import HTTPStatus

from controller_client.fakes.server import Connection

MAX_HEAD_BYTES = 1024 * 1024
REQUEST_LINE = re.compile(rb"([!-~]+) ([!-~\x80-\xff]+) (HTTP/1\.[01])")
FIELD_LINE = re.compile(rb"([!#-'*+.^_`|~0-9A-Za-z-]+):([^\0\r\n]*)")
CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;.*)?\r\n")

Headers = Iterable[tuple[bytes, bytes]]


class BadRequestError(Exception):
    """What came is no HTTP/1.1 request."""


@dataclass(frozen=True)
class RequestHead:
    """The head of one request: `raw` as it came, the rest cut out of it, unchanged."""

    raw: bytes
    method: str
    target: bytes
    version: bytes
    headers: list[tuple[bytes, bytes]]

    def values(self, name: bytes) -> list[bytes]:
        """Return the values of every header with this name, in order."""
        return [value for key, value in self.headers if key.lower() == name.lower()]

    @property
    def wants_close(self) -> bool:
        tokens = b",".join(self.values(b"connection")).lower().replace(b" ", b"").split(b",")
        return b"close" in tokens or (self.version == b"HTTP/1.0" and b"keep-alive" not in tokens)


async def read_head(connection: Connection) -> RequestHead:
    """Read the head of the next request.

    Raises PeerClosedError at the end of the connection and BadRequestError for what is none.
    """
    raw = await _receive_until(connection, b"\r\n\r\n")
    first, *lines = raw[: -len(b"\r\n\r\n")].split(b"\r\n")
    request = REQUEST_LINE.fullmatch(first)
    fields = [FIELD_LINE.fullmatch(line) for line in lines]
    if request is None or None in fields:
        raise BadRequestError(f"a malformed head: {raw[:200]!r}")
    return RequestHead(
        raw=raw,
        method=request[1].decode("ascii"),
        target=request[2],
        version=request[3],
        headers=[(field[1], field[2].strip(b" \t")) for field in fields if field],
    )


async def read_body(connection: Connection, head: RequestHead) -> AsyncIterator[bytes]:
    """Give the request's body piece by piece, taken out of its chunks.

    Raises PeerClosedError when it ends early and BadRequestError when its framing is wrong.
    """
    lengths, codings = head.values(b"content-length"), head.values(b"transfer-encoding")
    if codings:
        if [coding.lower() for coding in codings] != [b"chunked"] or lengths:
            raise BadRequestError(f"no single framing of the body: {head.raw[:200]!r}")
        async for piece in _read_chunks(connection):
            yield piece
    elif lengths:
        if len(lengths) > 1 or not lengths[0].isdigit():
            raise BadRequestError(f"no single length of the body: {lengths!r}")
        async for piece in _read_exactly(connection, int(lengths[0])):
            yield piece


async def _read_exactly(connection: Connection, length: int) -> AsyncIterator[bytes]:
    while length:
        piece = await connection.receive(length)
        length -= len(piece)
        yield piece


async def _read_chunks(connection: Connection) -> AsyncIterator[bytes]:
    while size := await _read_chunk_size(connection):
        async for piece in _read_exactly(connection, size):
            yield piece
        if await connection.receive_exactly(2) != b"\r\n":
            raise BadRequestError("a chunk that is longer than its size")
    while await _receive_until(connection, b"\r\n") != b"\r\n":
        pass  # a trailer


async def _read_chunk_size(connection: Connection) -> int:
    line = await _receive_until(connection, b"\r\n")
    size = CHUNK_SIZE.fullmatch(line)
    if size is None:
        raise BadRequestError(f"a malformed chunk size: {line[:100]!r}")
    return int(size[1], 16)


async def _receive_until(connection: Connection, end: bytes) -> bytes:
    try:
        return await connection.receive_until(end, MAX_HEAD_BYTES)
    except ValueError:
        raise BadRequestError(f"a head or line of over {MAX_HEAD_BYTES} bytes") from None


def response_head(status: int, headers: Headers) -> bytes:
    """Return the bytes of a response head."""
    try:
        reason = HTTPStatus(status).phrase
    except ValueError:
        reason = ""
    lines = [f"HTTP/1.1 {status} {reason}".encode("ascii")]
    lines += [name + b": " + value for name, value in headers]
    return b"\r\n".join([*lines, b"", b""])


def response(status: int, body: bytes, headers: Headers = ()) -> bytes:
    """Return the bytes of a response whose length is declared."""
    length = (b"Content-Length", str(len(body)).encode("ascii"))
    return response_head(status, [*headers, length]) + body


def chunk(data: bytes) -> bytes:
    """Return the data as one chunk; empty data is the last chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)
