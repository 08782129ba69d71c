"""WebSocket frames, as far as a tunnel has to know them: where one ends (RFC 6455, section 5.2).

Pure. Payloads are neither looked at nor unmasked; extensions change them, but not the frames' heads.
"""

from __future__ import annotations

GOING_AWAY = 1001

_FINAL, _CLOSE, _MASKED = 0x80, 0x8, 0x80
_OPCODE, _LENGTH = 0x0F, 0x7F
_LONG = {126: 2, 127: 8}  # bytes of a length that does not fit into the second byte of the head


def close_frame(code: int, mask: bytes | None = None) -> bytes:
    """A close frame; masked with these four bytes where it goes to a server."""
    payload = code.to_bytes(2, "big")
    if mask is None:
        return bytes((_FINAL | _CLOSE, len(payload))) + payload
    masked = bytes(byte ^ key for byte, key in zip(payload, mask, strict=False))
    return bytes((_FINAL | _CLOSE, _MASKED | len(payload))) + mask + masked


class FrameStream:
    """One direction of a WebSocket connection, which can be ended between two frames.

    `over`: a close frame has passed, the sender's or ours, after which no frame may follow.
    """

    __slots__ = ("_cut", "_farewell", "_head", "_left", "over")

    def __init__(self) -> None:
        self.over = False
        self._cut = False
        self._farewell: bytes | None = None
        self._head = bytearray()  # of a frame, as long as it is not all here
        self._left = 0  # bytes of the payload still to come

    def feed(self, data: bytes) -> bytes:
        """What is to be passed on of what came next."""
        if len(data) <= self._left and not self._farewell:  # most of a large frame
            self._left -= len(data)
            return data
        position = 0
        while position < len(data) and not self._cut:
            if self._left:
                step = min(self._left, len(data) - position)
                self._left -= step
                position += step
            else:
                position = self._take_head(data, position)
            if self._farewell and self._between_frames:
                return data[:position] + self.end(self._farewell)
        return data[:position]

    def end(self, frame: bytes) -> bytes:
        """Let this be the last frame, as soon as the one that is passing has ended.

        Returns what is to be sent now. Nothing more passes after it; and where the sender itself
        ends the direction first, this frame is not sent at all.
        """
        if self.over:
            self._farewell = None
        elif self._between_frames:
            self.over = self._cut = True
            self._farewell = None
            return frame
        else:
            self._farewell = frame
        return b""

    @property
    def _between_frames(self) -> bool:
        return not self._left and not self._head

    def _take_head(self, data: bytes, position: int) -> int:
        """Read on in a head; the position behind what belongs to it."""
        head = self._head
        while (missing := _head_size(head) - len(head)) and position < len(data):
            head += data[position : position + missing]
            position = min(position + missing, len(data))
        if not missing:
            self._left = _payload_size(head)
            self.over = self.over or head[0] & _OPCODE == _CLOSE
            head.clear()
        return position


def _head_size(head: bytearray) -> int:
    """The size of the whole head, as far as what is here of it tells."""
    if len(head) < 2:
        return 2
    return 2 + _LONG.get(head[1] & _LENGTH, 0) + (4 if head[1] & _MASKED else 0)


def _payload_size(head: bytearray) -> int:
    length = head[1] & _LENGTH
    extra = _LONG.get(length, 0)
    return int.from_bytes(head[2 : 2 + extra], "big") if extra else length
