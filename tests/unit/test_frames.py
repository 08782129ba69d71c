"""Where a WebSocket frame ends, and how a direction is ended between two of them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lb.frames import GOING_AWAY, FrameStream, close_frame

MASK = b"\x01\x02\x03\x04"
AWAY = close_frame(GOING_AWAY)


def frame(payload: bytes, *, opcode: int = 2, masked: bool = False, long: int = 0) -> bytes:
    """A frame; `long` is the number of bytes of its length, at least so many."""
    size = len(payload)
    if size > 0xFFFF or long == 8:
        length = bytes([127]) + size.to_bytes(8, "big")
    elif size > 125 or long == 2:
        length = bytes([126]) + size.to_bytes(2, "big")
    else:
        length = bytes([size])
    if masked:
        length = bytes([length[0] | 0x80]) + length[1:] + MASK
    return bytes([0x80 | opcode]) + length + payload


frames = st.builds(
    frame,
    st.binary(max_size=300),
    opcode=st.sampled_from([0, 1, 2, 9, 10]),
    masked=st.booleans(),
    long=st.sampled_from([0, 2, 8]),
)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


def test_the_close_frames() -> None:
    assert close_frame(1001) == b"\x88\x02\x03\xe9"
    assert close_frame(1001, MASK) == b"\x88\x82" + MASK + bytes([3 ^ 1, 0xE9 ^ 2])


@given(st.lists(frames, max_size=5), st.lists(st.integers(0, 10_000), max_size=6))
def test_all_passes_as_it_is(sent: list[bytes], cuts: list[int]) -> None:
    stream = FrameStream()
    data = b"".join(sent)
    assert b"".join(map(stream.feed, split(data, cuts))) == data
    assert not stream.over


@given(
    st.lists(frames, min_size=1, max_size=5),
    st.lists(st.integers(0, 10_000), max_size=6),
    st.data(),
)
def test_the_end_comes_behind_the_frame_that_is_passing(
    sent: list[bytes], cuts: list[int], data: st.DataObject
) -> None:
    whole = b"".join(sent)
    asked_at = data.draw(st.integers(0, len(whole)))
    ends = [len(b"".join(sent[:count])) for count in range(len(sent) + 1)]
    boundary = min(end for end in ends if end >= asked_at)

    stream = FrameStream()
    passed = b"".join(map(stream.feed, split(whole[:asked_at], cuts)))
    passed += stream.end(AWAY)
    passed += b"".join(map(stream.feed, split(whole[asked_at:], cuts)))
    assert passed == whole[:boundary] + AWAY
    assert stream.over


def test_the_end_comes_at_once_between_frames() -> None:
    stream = FrameStream()
    assert stream.end(AWAY) == AWAY
    assert stream.over
    assert stream.feed(frame(b"late")) == b""


@pytest.mark.parametrize("head", range(1, 14))
def test_the_end_waits_for_a_frame_of_which_only_a_part_of_the_head_is_here(head: int) -> None:
    stream = FrameStream()
    data = frame(b"x" * 70_000, masked=True)
    assert stream.feed(data[:head]) == data[:head]
    assert stream.end(AWAY) == b""
    assert stream.feed(data[head:-1]) == data[head:-1]
    assert not stream.over
    assert stream.feed(data[-1:] + frame(b"next")) == data[-1:] + AWAY
    assert stream.over


@pytest.mark.parametrize("masked", [False, True])
def test_a_close_frame_of_the_sender_is_the_last_one(masked: bool) -> None:
    stream = FrameStream()
    goodbye = frame(b"\x03\xe8bye", opcode=8, masked=masked)
    assert stream.feed(goodbye) == goodbye
    assert stream.over
    assert stream.end(AWAY) == b""
    assert stream.feed(b"whatever it sends then") == b"whatever it sends then"


def test_a_close_frame_of_the_sender_takes_the_place_of_ours() -> None:
    stream = FrameStream()
    goodbye = frame(b"\x03\xe8", opcode=8)
    stream.feed(goodbye[:1])
    assert stream.end(AWAY) == b""
    assert stream.feed(goodbye[1:]) == goodbye[1:]
    assert stream.over
    assert stream.feed(frame(b"late")) == frame(b"late")


def test_a_fragmented_message_is_ended_between_its_fragments() -> None:
    stream = FrameStream()
    fragment = b"\x01\x03abc"
    stream.feed(fragment[:3])
    assert stream.end(AWAY) == b""
    assert stream.feed(fragment[3:] + b"\x80\x01d") == fragment[3:] + AWAY
