"""The request body on its way to a replica: sent as it comes, kept for another attempt while that fits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from lb.headers import first
from lb.replay import ReplayBudget, ReplayBuffer
from lb.request import Request
from lb.server import ClientConnection
from lb.transport import WRITE_LIMIT
from lb.upstream import UpstreamConnection

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


def chunk_of(data: bytes) -> bytes:
    """One chunk of a chunked body (RFC 9112, section 7.1)."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class Upload:
    """Sends one request, head and body, to one connection after the other until an attempt succeeds.

    A small body that is all here goes out with the head in one write; any other is sent by a task,
    so that a replica may answer while it reads.
    """

    def __init__(self, request: Request, client: ClientConnection, budget: ReplayBudget) -> None:
        self._request = request
        self._client = client
        self._body = request.body
        self._budget = budget
        self._kept = ReplayBuffer(budget)
        self._told_to_continue = not request.expects_continue
        self._pump_task: asyncio.Task[None] | None = None
        self._pumped = False
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
        if self._body is None:
            return False
        declared = first(self._request.headers, b"content-length")
        size = self._budget.limit if declared is None else int(declared)
        return size > self._budget.limit or self._budget.used + size > self._budget.total

    @property
    def finished(self) -> bool:
        """Has the whole body been sent? Sending that failed or was given up has not finished."""
        return self._pump_task is None or self._pumped

    def start(self, connection: UpstreamConnection, head: bytes) -> None:
        """Send the head, what is here of the body, and then the rest as it comes."""
        if self._body is None:
            connection.write(head)
            return
        pieces = self._kept.chunks.copy()
        if data := self._body.read_nowait():
            pieces.append(self._keep(data))
        if self._body.at_eof() and sum(map(len, pieces)) <= WRITE_LIMIT:
            connection.write(b"".join([head, *map(self._framed, pieces), self._end()]))
            return
        connection.write(head)
        self._pumped = False
        self._pump_task = asyncio.get_running_loop().create_task(self._pump(connection, pieces))

    async def stop(self) -> None:
        """End a failed attempt's sending, so that the next one can start."""
        if self._pump_task is not None:
            self._pump_task.cancel()
            await asyncio.wait([self._pump_task])  # its cancellation must not be taken for ours
            self._pump_task = None

    def close(self) -> None:
        """The request is over, whatever became of it."""
        if self._pump_task is not None:
            self._pump_task.cancel()
        self._kept.release()

    def let_go(self) -> None:
        """A response came: the body will not be needed again."""
        self._kept.release()

    async def _pump(self, connection: UpstreamConnection, pieces: Sequence[bytes]) -> None:
        assert self._body is not None
        try:
            for piece in pieces:
                connection.write(self._framed(piece))
                await connection.drain()
            if not self._told_to_continue:
                self._told_to_continue = True
                self._client.write(CONTINUE)
            while connection.connected and (data := await self._body.readany()):
                connection.write(self._framed(self._keep(data)))
                await connection.drain()
            if connection.connected:
                connection.write(self._end())
                self._pumped = True
        except Exception as error:  # whoever waits for the answer is to get it, not this task
            connection.interrupt(error)

    def _keep(self, data: bytes) -> bytes:
        self.bytes_read += len(data)
        self._kept.keep(data)
        return data

    def _framed(self, data: bytes) -> bytes:
        return chunk_of(data) if self._request.chunked else data

    def _end(self) -> bytes:
        return LAST_CHUNK if self._request.chunked else b""
