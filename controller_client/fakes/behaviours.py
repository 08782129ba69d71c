"""What a replica can do with a request. A test may write its own: `async def own(exchange)`.

Each reads the whole request before it does anything, unless it says otherwise.
"""

import threading
from collections.abc import Iterable
from typing import Literal

from controller_client.fakes.exchange import Behaviour, Exchange
from controller_client.fakes.http import Headers, chunk, response, response_head

PLAIN_TEXT = (b"Content-Type", b"text/plain")
EVENT_STREAM = (b"Content-Type", b"text/event-stream")

How = Literal["fin", "rst"]


def answer(
    body: bytes | None = None,
    *,
    status: int = 200,
    headers: Headers = (PLAIN_TEXT,),
    delay: float = 0.0,
) -> Behaviour:
    """Answer after `delay` seconds; the body is the replica's name where none is given."""
    headers = tuple(headers)

    async def behave(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.wait(delay)
        content = exchange.replica.encode("utf-8") if body is None else body
        whole = response(status, content, headers)
        without_body = exchange.record.method == "HEAD"
        await exchange.send(whole[: len(whole) - len(content)] if without_body else whole)

    return behave


def raw(data: bytes, *, close: bool = False) -> Behaviour:
    """Send exactly these bytes, and close the connection where told."""

    async def behave(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.send(data)
        if close:
            exchange.close()

    return behave


def stream(
    chunks: Iterable[bytes | threading.Event],
    *,
    every: float = 0.0,
    headers: Headers = (EVENT_STREAM,),
) -> Behaviour:
    """Send the head at once, then the chunks in chunked coding, `every` so many seconds.

    Where an event stands in the place of a chunk the stream waits until it is set. `chunks` is
    gone through once for each request; it may be endless.
    """
    head = response_head(200, [*headers, (b"Transfer-Encoding", b"chunked")])

    async def behave(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.send(head)
        for item in chunks:
            if isinstance(item, threading.Event):
                await exchange.wait_for(item)
            else:
                await exchange.wait(every)
                await exchange.send(chunk(item))
        await exchange.send(chunk(b""))

    return behave


def hold(event: threading.Event, then: Behaviour | None = None) -> Behaviour:
    """Wait until the test sets the event, then do the other thing (by default: answer)."""
    after = then or answer()

    async def behave(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.wait_for(event)
        await after(exchange)

    return behave


def stall() -> Behaviour:
    """Never answer: keep the connection until the peer closes it."""

    async def behave(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.wait(None)

    return behave


def hang_up() -> Behaviour:
    """Close the connection (FIN) without a byte of an answer."""
    return raw(b"", close=True)


def reset() -> Behaviour:
    """Reset the connection (RST) without a byte of an answer."""

    async def behave(exchange: Exchange) -> None:
        await exchange.read_body()
        exchange.reset()

    return behave


def stale(how: How = "fin") -> Behaviour:
    """On a reused connection end it without a byte, on a fresh one answer.

    It is what a keep-alive connection looks like that the replica closes just as a request is
    on its way.
    """
    ended = hang_up() if how == "fin" else reset()
    answered = answer()

    async def behave(exchange: Exchange) -> None:
        reused = exchange.record.number_on_connection > 1
        await (ended if reused else answered)(exchange)

    return behave


def cut(sent: bytes = b"half", *, declared: int = 100, how: How = "fin") -> Behaviour:
    """Declare a body of so many bytes, send only these and end the connection."""
    head = response_head(200, [PLAIN_TEXT, (b"Content-Length", str(declared).encode("ascii"))])

    async def behave(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.send(head + sent)
        if how == "fin":
            exchange.close()
        else:
            exchange.reset()

    return behave


def early(status: int = 413, *, how: Literal["drain", "close"] = "drain") -> Behaviour:
    """Answer before the body is read, with `Connection: close`.

    `drain` takes in the rest of the body, unlooked at, until the peer closes. `close` closes at
    once: where bytes of the body are unread or still come, the kernel answers them with RST.
    """
    whole = response(status, b"", [(b"Connection", b"close")])

    async def behave(exchange: Exchange) -> None:
        await exchange.send(whole)
        if how == "drain":
            await exchange.finish()
        else:
            exchange.close()

    return behave
