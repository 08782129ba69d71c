"""Upgraded connections: after a 101 both sides are joined, and bytes go through as they are."""

from __future__ import annotations

import os

import anyio

from lb.exchange import Exchange
from lb.frames import GOING_AWAY, FrameStream, close_frame
from lb.headers import response_head
from lb.server import ClientConnection
from lb.upstream import Response, UpstreamConnection

# After both sides of a WebSocket were told that we go: how long they have to end it themselves.
GOODBYE_SECONDS = 5.0


def join(exchange: Exchange, connection: UpstreamConnection, response: Response) -> None:
    """Join the two connections until one of them ends.

    Each side writes what comes in to the other, and holds its own socket while that one is full. The
    end of either side is that of the other, behind all that was sent, and no failure.
    """
    client = exchange.client
    protocol = response.fields.first.get(b"upgrade") or exchange.request.upgrade or b""
    if protocol.lower() == b"websocket":
        client.frames, connection.frames = FrameStream(), FrameStream()
    head = response_head(
        101,
        response.reason,
        response.fields,
        request_id=exchange.request_id,
        upgrade=protocol,
    )
    exchange.commit(101)
    client.join(connection)
    client.write(head)
    connection.tunnel_data(connection.after_upgrade or b"")
    client.tunnel_data(client.after_upgrade or b"")


async def say_goodbye(client: ClientConnection, connection: UpstreamConnection) -> None:
    """When we drain, ask the two ends of a WebSocket for the end of it (RFC 6455, section 7.4.1)."""
    await client.drain_begins()
    if client.frames is None or connection.frames is None:
        return
    client.write(connection.frames.end(close_frame(GOING_AWAY)))
    connection.write(client.frames.end(close_frame(GOING_AWAY, mask=os.urandom(4))))
    while True:
        await anyio.sleep(GOODBYE_SECONDS)
        if client.frames.over and connection.frames.over:
            connection.close()
