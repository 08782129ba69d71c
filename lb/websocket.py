"""Upgraded connections: after a 101 both sides are joined, and bytes go through as they are."""

from __future__ import annotations

import asyncio

from lb.exchange import Exchange
from lb.headers import first, response_head
from lb.upstream import Response, UpstreamConnection


async def tunnel(exchange: Exchange, connection: UpstreamConnection, response: Response) -> None:
    """Join the two connections until one of them ends.

    No task moves the bytes: each side writes what comes in to the other, and holds its own socket
    while that one is full. The end of either closes the other; the client's end cancels the caller.
    """
    client = exchange.client
    upgrade = first(response.headers, b"upgrade") or exchange.request.upgrade
    head = response_head(
        101,
        response.reason,
        response.headers,
        request_id=exchange.request_id,
        upgrade=upgrade,
    )
    exchange.commit(101)
    early_answer, early_request = connection.after_upgrade or b"", client.after_upgrade or b""
    client.tunnel, connection.tunnel = connection, client
    client.write(head + early_answer)
    if early_request:
        connection.write(early_request)
    if not connection.connected:
        client.close()
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        exchange.bytes_out = connection.tunnel_bytes + len(early_answer)
