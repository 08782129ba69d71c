"""Where a chunked body ends. Pure.

aiohttp's parser does not tell, and what follows the end must not reach it in the same piece.
"""

from __future__ import annotations

import re

_SIZE = re.compile(rb"[0-9A-Fa-f]{1,16}(?=[;\r]|$)")
# Of a line no more is kept than tells its size; a longer extension or trailer is none the shorter.
_KEPT = 17


class ChunkScanner:
    """Follows the framing of one chunked body (RFC 9112, section 7.1), chunk by chunk.

    It judges nothing: the parser, which gets the same bytes, refuses what is malformed.
    """

    def __init__(self) -> None:
        self._skip = 0  # bytes of a chunk, its line end included, that are still to come
        self._line = b""
        self._in_trailers = False
        self._malformed = False

    def end_in(self, data: bytes, start: int) -> int | None:
        """The offset behind the body's last byte, or None if it does not end in `data[start:]`."""
        while start < len(data) and not self._malformed:
            if self._skip:
                step = min(self._skip, len(data) - start)
                self._skip -= step
                start += step
                continue
            newline = data.find(b"\n", start)
            if newline < 0:
                self._line = (self._line + data[start : start + _KEPT])[:_KEPT]
                return None
            line = (self._line + data[start : min(newline, start + _KEPT)])[:_KEPT]
            self._line = b""
            start = newline + 1
            if self._is_last(line):
                return start
        return None

    def _is_last(self, line: bytes) -> bool:
        """Take in one line that is no chunk data; is it the empty one at the end?"""
        if self._in_trailers:
            return line in (b"", b"\r")
        size = _SIZE.match(line)
        if size is None:
            self._malformed = True
        elif value := int(size[0], 16):
            self._skip = value + len(b"\r\n")
        else:
            self._in_trailers = True
        return False
