"""Where a chunked body ends, in pieces of any size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lb.chunks import ChunkScanner


def end_of(pieces: list[bytes]) -> int | None:
    """The offset of the end in all the pieces together."""
    scanner, before = ChunkScanner(), 0
    for piece in pieces:
        end = scanner.end_in(piece, 0)
        if end is not None:
            return before + end
        before += len(piece)
    return None


@pytest.mark.parametrize(
    "body",
    [
        b"0\r\n\r\n",
        b"000;last=1\r\n\r\n",
        b"5\r\nhello\r\n0\r\n\r\n",
        b"5;name=value\r\nhello\r\n0\r\n\r\n",
        b"A\r\n0123456789\r\na\r\n0123456789\r\n0\r\n\r\n",
        b"7\r\n0\r\n\r\nab\r\n0\r\n\r\n",
        b"0\r\nX-Trailer: 1\r\nX-Longer-Than-What-Is-Kept: 2\r\n\r\n",
        b"1;" + b"e" * 1000 + b"\r\nx\r\n0\r\n\r\n",
    ],
)
def test_the_end_is_found_wherever_the_body_is_cut(body: bytes) -> None:
    behind = b"GET / HTTP/1.1\r\n\r\n"
    whole = body + behind
    assert end_of([whole]) == len(body)
    assert end_of([whole[i : i + 1] for i in range(len(whole))]) == len(body)
    for cut in range(1, len(whole)):
        assert end_of([whole[:cut], whole[cut:]]) == len(body)


@pytest.mark.parametrize("body", [b"5\r\nhel", b"0\r\n", b"0\r\nX: 1\r\n", b"", b"5", b"0\r\n\r"])
def test_an_unfinished_body_has_no_end(body: bytes) -> None:
    assert end_of([body]) is None


@pytest.mark.parametrize("line", [b"x", b"", b"-5", b"0x5", b" 5", b"5 5", b"11111111111111111"])
def test_what_is_malformed_has_no_end_for_the_parser_refuses_it(line: bytes) -> None:
    assert end_of([line + b"\r\nhello\r\n0\r\n\r\n", b"0\r\n\r\n"]) is None


def test_it_goes_on_from_an_offset() -> None:
    assert ChunkScanner().end_in(b"head\r\n\r\n0\r\n\r\nrest", 8) == 13


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.data())
def test_any_data_in_any_pieces(chunks: list[bytes], data: st.DataObject) -> None:
    body = b"".join(b"%x\r\n%b\r\n" % (len(c), c) for c in chunks) + b"0\r\n\r\n"
    whole = body + b"0\r\n\r\nrest"
    pieces, rest = [], whole
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        pieces.append(rest[:size])
        rest = rest[size:]
    assert end_of(pieces) == len(body)
