"""Upgraded connections: after a 101 both sides are joined, and bytes go through as they are."""

from __future__ import annotations

import asyncio
import os

import anyio

from lb.exchange import Exchange
from lb.frames import GOING_AWAY, FrameStream, close_frame
from lb.headers import first, response_head
from lb.server import ClientConnection
from lb.upstream import Response, UpstreamConnection

# After both sides of a WebSocket were told that we go: how long they have to end it themselves.
GOODBYE_SECONDS = 5.0


async def tunnel(exchange: Exchange, connection: UpstreamConnection, response: Response) -> None:
    """Join the two connections until one of them ends.

    No task moves the bytes: each side writes what comes in to the other, and holds its own socket
    while that one is full. The end of either side is that of the other, behind all that was sent;
    it cancels the caller, for which it is no failure.
    """
    client = exchange.client
    protocol = first(response.headers, b"upgrade") or exchange.request.upgrade or b""
    if protocol.lower() == b"websocket":
        client.frames, connection.frames = FrameStream(), FrameStream()
    head = response_head(
        101,
        response.reason,
        response.headers,
        request_id=exchange.request_id,
        upgrade=protocol,
    )
    exchange.commit(101)
    client.join(connection)
    client.write(head)
    connection.tunnel_data(connection.after_upgrade or b"")
    client.tunnel_data(client.after_upgrade or b"")
    if not connection.connected:
        client.partner_lost()
    try:
        await _until_the_end(client, connection)
    except asyncio.CancelledError:
        if client.connected and connection.connected:
            raise
    finally:
        exchange.bytes_in, exchange.bytes_out = client.tunnel_bytes, connection.tunnel_bytes


async def _until_the_end(client: ClientConnection, connection: UpstreamConnection) -> None:
    """Wait for the end; when we drain, ask the two ends of a WebSocket for it (RFC 6455, 7.4.1)."""
    await client.drain_begins()
    if client.frames is not None and connection.frames is not None:
        client.write(connection.frames.end(close_frame(GOING_AWAY)))
        connection.write(client.frames.end(close_frame(GOING_AWAY, mask=os.urandom(4))))
        while True:
            await anyio.sleep(GOODBYE_SECONDS)
            if client.frames.over and connection.frames.over:
                connection.close()
    await asyncio.get_running_loop().create_future()
