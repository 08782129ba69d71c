"""A replica that costs next to nothing: a fixed answer, or a stream of events on /stream."""

import asyncio
import sys

import uvloop

BODY = b'{"object":"list","data":[]}'
ANSWER = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(BODY)
    + BODY
)
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
EVENT = b'data: {"choices":[{"delta":{"content":"token"}}]}\n\n'
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
EVENTS = 200
EVENT_SECONDS = 0.01


class Replica(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"GET /stream"):
            asyncio.get_running_loop().create_task(self.stream())
        else:
            self.transport.write(ANSWER * data.count(b"\r\n\r\n"))

    async def stream(self) -> None:
        self.transport.write(STREAM_HEAD)
        for _ in range(EVENTS):
            self.transport.write(CHUNK)
            await asyncio.sleep(EVENT_SECONDS)
        self.transport.write(b"0\r\n\r\n")


async def main(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(
        Replica, "127.0.0.1", port, backlog=1024
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


uvloop.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 0))
