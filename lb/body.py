"""The request body on its way to a replica: sent as it comes, kept for another attempt while that fits."""

from __future__ import annotations

from aiohttp import StreamReader

from lb.replay import ReplayBudget, ReplayBuffer
from lb.request import Request
from lb.server import ClientConnection
from lb.upstream import UpstreamConnection

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


def chunk_of(data: bytes) -> bytes:
    """One chunk of a chunked body (RFC 9112, section 7.1)."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class NoUpload:
    """A request without a body, in the place of an `Upload`: sends the head."""

    finished = can_restart = True
    may_outgrow = False
    bytes_read = 0

    def start(self, connection: UpstreamConnection, head: bytes) -> None:
        connection.write(head)

    def go_on(self) -> None:
        """There is nothing more."""

    stop = close = let_go = go_on


NO_UPLOAD = NoUpload()


class Upload:
    """Sends one request, head and body, to one connection after the other until an attempt succeeds."""

    def __init__(
        self,
        request: Request,
        body: StreamReader,
        client: ClientConnection,
        budget: ReplayBudget,
    ) -> None:
        self._request = request
        self._client = client
        self._body = body
        self._budget = budget
        self._kept = ReplayBuffer(budget)
        self._told_to_continue = not request.expects_continue
        self._connection: UpstreamConnection | None = None  # of the attempt that is under way
        self.finished = False  # has the whole body been sent?
        self.bytes_read = 0

    @property
    def can_restart(self) -> bool:
        """Is all that was read of the body still here?"""
        return self._kept.complete

    @property
    def may_outgrow(self) -> bool:
        """May the body be too large to be kept, so that it cannot be sent twice?

        A chunked body is taken to be as large as one that is kept may be.
        """
        declared = self._request.length
        size = self._budget.limit if declared is None else int(declared)
        return size > self._budget.limit or self._budget.used + size > self._budget.total

    def start(self, connection: UpstreamConnection, head: bytes) -> None:
        """Send the head, what is here of the body, and then the rest as it comes."""
        self.finished = False
        self._connection = connection
        self._client.flow_into(connection)
        pieces = [head]
        for data in self._kept.chunks:
            pieces += self._framed(data)
        self._send(pieces)
        if not (self.finished or self._told_to_continue):
            self._told_to_continue = True
            self._client.write(CONTINUE)

    def go_on(self) -> None:
        """Send what else is here of the body."""
        if self._connection is not None:
            self._send([])

    def _send(self, pieces: list[bytes]) -> None:
        connection, body = self._connection, self._body
        assert connection is not None
        if data := body.read_nowait():
            self.bytes_read += len(data)
            self._kept.keep(data)
            pieces += self._framed(data)
        if body.at_eof():
            if self._request.chunked:
                pieces.append(LAST_CHUNK)
            self.stop()
            self.finished = True
        connection.write_all(pieces)

    def stop(self) -> None:
        """Send no more: all is sent, or the attempt has failed."""
        if self._connection is not None:
            self._connection = None
            self._client.end_flow()

    def close(self) -> None:
        """The request is over, whatever became of it."""
        self.stop()
        self._kept.release()

    def let_go(self) -> None:
        """A response came: the body will not be needed again."""
        self._kept.release()

    def _framed(self, data: bytes) -> list[bytes]:
        return [b"%x\r\n" % len(data), data, b"\r\n"] if self._request.chunked else [data]
