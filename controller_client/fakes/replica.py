"""A replica that does what a test scripts, and remembers every request byte for byte."""

import time

from controller_client.fakes.behaviours import answer
from controller_client.fakes.exchange import Behaviour, Exchange, RequestRecord
from controller_client.fakes.http import BadRequestError, read_head, response
from controller_client.fakes.script import Script
from controller_client.fakes.server import Connection, Server

KEEP_BODY = 1024 * 1024


class ScriptedReplica(Server):
    """An HTTP/1.1 replica with keep-alive.

    It answers every request 200 with its name as the body, until told otherwise by `behave` and
    `behave_always`. `requests` holds a RequestRecord for each request whose head came whole, in
    order; `faults` what came and was no HTTP (answered 400). `keep_body` bounds the bytes kept of
    each body. `idle_timeout` (seconds) closes connections on which no request comes.
    """

    def __init__(
        self,
        name: str = "replica",
        *,
        port: int = 0,
        keep_body: int = KEEP_BODY,
        idle_timeout: float | None = None,
    ) -> None:
        super().__init__(port=port)
        self.name = name
        self.requests: list[RequestRecord] = []
        self.faults: list[str] = []
        self._keep_body = keep_body
        self._idle_timeout = idle_timeout
        self._script: Script[Behaviour] = Script(answer())

    def __repr__(self) -> str:
        return (
            f"<ScriptedReplica {self.name} on port {self.port}: {self.connections} connections,"
            f" {len(self.requests)} requests>"
        )

    def behave(self, *behaviours: Behaviour) -> None:
        """Use each of these for one of the next requests, in order."""
        self._script.then(*behaviours)

    def behave_always(self, *behaviours: Behaviour) -> None:
        """Use these, in turn, for all requests that `behave` leaves; none: answer again."""
        self._script.always(*behaviours)

    async def _serve(self, connection: Connection) -> None:
        number = 0
        exchange: Exchange | None = None
        try:
            while exchange is None or not exchange.closing:
                if not await self._request_comes(connection):
                    return
                number += 1
                exchange = await self._take_request(connection, number)
                await self._script.take()(exchange)
                exchange.record.answered_at = time.monotonic()
                self._tell()
                if not exchange.closing:
                    await exchange.read_body()
        except BadRequestError as error:
            self.faults.append(str(error))
            self._tell()
            await connection.send(response(400, b"", [(b"Connection", b"close")]))

    async def _request_comes(self, connection: Connection) -> bool:
        if self._idle_timeout is None:
            return True
        return await connection.wait_for_bytes(self._idle_timeout)

    async def _take_request(self, connection: Connection, number: int) -> Exchange:
        head = await read_head(connection)
        record = RequestRecord(head, connection, number)
        self.requests.append(record)
        self._tell()
        return Exchange(self.name, head, record, connection, self._keep_body, self._tell)
