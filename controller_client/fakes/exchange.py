"""One request at a replica: what came, and what a behaviour can do about it."""

import hashlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from controller_client.fakes.http import RequestHead, read_body
from controller_client.fakes.server import Connection

SEND_SIZE = 64 * 1024


class RequestRecord:
    """One request as the replica saw it. It grows while the request runs.

    Times are `time.monotonic()`:
    - `received_at`: the head was there;
    - `answered_at`: the behaviour came to its end, None until then, and for good where the peer
      did not wait for it;
    - `peer_closed_at`: the peer was seen to close or reset the connection that the request came
      on, during the request or after it.

    `connection` is the number of that connection (from 1), `number_on_connection` over 1 says
    that it was reused. `body` holds the first bytes of the body (how many: the replica's
    `keep_body`), `body_length` and `body_sha256` are those of all that has come, and
    `body_complete` tells whether that is the whole. `bytes_sent` counts what the system has
    taken of the answer.
    """

    def __init__(self, head: RequestHead, connection: Connection, number_on_connection: int):
        self.raw_head = head.raw
        self.method = head.method
        self.target = head.target
        self.headers = head.headers
        self.connection = connection.number
        self.number_on_connection = number_on_connection
        self.received_at = time.monotonic()
        self.answered_at: float | None = None
        self.body = bytearray()
        self.body_length = 0
        self.body_complete = False
        self.bytes_sent = 0
        self._connection = connection
        self._digest = hashlib.sha256()

    def __repr__(self) -> str:
        return f"<{self.method} {self.target!r} on connection {self.connection}>"

    @property
    def body_sha256(self) -> str:
        return self._digest.hexdigest()

    @property
    def peer_closed_at(self) -> float | None:
        return self._connection.peer_closed_at

    def values(self, name: bytes) -> list[bytes]:
        """Return the values of every header with this name, in order."""
        return [value for key, value in self.headers if key.lower() == name.lower()]

    def add_to_body(self, piece: bytes, keep: int) -> None:
        self._digest.update(piece)
        self.body_length += len(piece)
        self.body += piece[: max(0, keep - len(self.body))]


class Exchange:
    """One request in the hands of a behaviour.

    Every method that waits raises PeerClosedError when the peer closes; a behaviour lets it
    pass. Unless `close` or `reset` was called, the connection serves the next request afterwards.
    """

    def __init__(
        self,
        replica: str,
        head: RequestHead,
        record: RequestRecord,
        connection: Connection,
        keep_body: int,
        on_change: Callable[[], None],
    ) -> None:
        self.replica = replica
        self.record = record
        self.closing = head.wants_close
        self._connection = connection
        self._keep_body = keep_body
        self._on_change = on_change
        self._body = read_body(connection, head)

    async def body(self) -> AsyncIterator[bytes]:
        """Give what is still unread of the request's body, piece by piece."""
        async for piece in self._body:
            self.record.add_to_body(piece, self._keep_body)
            self._on_change()
            yield piece
        self.record.body_complete = True
        self._on_change()

    async def read_body(self) -> None:
        """Read what is still unread of the request's body."""
        async for _ in self.body():
            pass

    async def receive(self) -> bytes:
        """Return raw bytes that come after the request: for connections that were upgraded."""
        return await self._connection.receive()

    async def send(self, data: bytes) -> None:
        """Send raw bytes of the answer."""
        for start in range(0, len(data), SEND_SIZE):
            piece = data[start : start + SEND_SIZE]
            await self._connection.send(piece)
            self.record.bytes_sent += len(piece)
            self._on_change()

    async def wait(self, seconds: float | None) -> None:
        """Let time pass, for ever with None."""
        await self._connection.wait(seconds)

    async def wait_for(self, event: threading.Event) -> None:
        """Wait until a test sets the event."""
        await self._connection.wait_for_event(event)

    async def finish(self) -> None:
        """Send FIN, take in the rest of the request unlooked at, and close after the peer."""
        self.closing = True
        await self._connection.finish()

    def close(self) -> None:
        """Close the connection when the behaviour ends: FIN, or RST with bytes still unread."""
        self.closing = True

    def reset(self) -> None:
        """Reset the connection (RST) when the behaviour ends."""
        self.closing = True
        self._connection.reset_on_close()


Behaviour = Callable[[Exchange], Awaitable[None]]
