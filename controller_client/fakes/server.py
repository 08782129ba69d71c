"""A TCP server on 127.0.0.1 that a test controls from outside its event loop.

Each server runs a selector loop in a daemon thread, on plain non-blocking sockets: that is what
lets it reset a connection, stop listening without giving up its port or see a peer leave at any
moment. Its public methods block for as long as they need and may be called from any other thread.
"""

import asyncio
import contextlib
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from controller_client.fakes.events import EventWatch

Result = TypeVar("Result")
Itself = TypeVar("Itself", bound="Server")  # typing.Self is new in Python 3.11

HOST = "127.0.0.1"
BACKLOG = 1024
CALL_TIMEOUT = 10.0
READ_SIZE = 256 * 1024
NO_LINGER = struct.pack("ii", 1, 0)  # l_onoff, l_linger: close() sends RST instead of FIN


class PeerClosedError(Exception):
    """The peer ended the connection while more was expected of it."""


class Connection:
    """One accepted connection. To be used on the server's loop only.

    `number` counts the server's connections from 1. `peer_closed_at` is the `time.monotonic()`
    at which the peer was seen to close or reset it, None until then.
    """

    def __init__(
        self, sock: socket.socket, number: int, events: EventWatch, on_change: Callable[[], None]
    ) -> None:
        self.number = number
        self.peer_closed_at: float | None = None
        self._sock = sock
        self._events = events
        self._on_change = on_change
        self._ahead = bytearray()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def receive(self, limit: int = READ_SIZE) -> bytes:
        """Return the next bytes, at least one. Raises PeerClosedError at their end."""
        while not self._ahead:
            await self._fill(None)
        return self._cut_off(limit)

    async def receive_exactly(self, count: int) -> bytes:
        """Return the next `count` bytes. Raises PeerClosedError when they do not all come."""
        while len(self._ahead) < count:
            await self._fill(None)
        return self._cut_off(count)

    async def receive_until(self, end: bytes, limit: int) -> bytes:
        """Return the bytes up to and with `end`.

        Raises PeerClosedError when it never comes, ValueError when it is not within `limit` bytes.
        """
        searched = 0
        while (found := self._ahead.find(end, searched)) < 0:
            if len(self._ahead) > limit:
                raise ValueError(f"no {end!r} within {limit} bytes")
            searched = max(0, len(self._ahead) - len(end) + 1)
            await self._fill(None)
        return self._cut_off(found + len(end))

    async def send(self, data: bytes) -> None:
        """Send all of it. Raises PeerClosedError when the peer takes no more."""
        try:
            await asyncio.get_running_loop().sock_sendall(self._sock, data)
        except OSError:
            self._saw_the_peer_close()

    async def wait(self, seconds: float | None) -> None:
        """Let time pass, for ever with None. Raises PeerClosedError as soon as the peer closes."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while deadline is None or time.monotonic() < deadline:
            await self._fill(deadline)

    async def wait_for_event(self, event: threading.Event) -> None:
        """Wait until the event is set. Raises PeerClosedError as soon as the peer closes."""
        is_set = self._events.future(event)
        while not is_set.done():
            await self._fill(None, is_set)

    async def wait_for_bytes(self, seconds: float) -> bool:
        """Return whether a byte is there to be received within this time."""
        if not self._ahead:
            await self._fill(time.monotonic() + seconds)
        return bool(self._ahead)

    async def finish(self) -> None:
        """Send FIN, then discard what still comes until the peer closes too.

        Closing with bytes unread would send RST, which may overtake the answer.
        """
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(PeerClosedError):
            while True:
                await self.receive()

    def reset_on_close(self) -> None:
        """Make the close that follows send RST."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)

    def close(self) -> None:
        self._sock.close()

    def _cut_off(self, count: int) -> bytes:
        data = bytes(self._ahead[:count])
        del self._ahead[:count]
        return data

    async def _fill(
        self, deadline: float | None, unless: asyncio.Future[None] | None = None
    ) -> None:
        """Take what the peer sends next; nothing when the deadline or `unless` comes before."""
        if not await self._readable(deadline, unless):
            return
        try:
            data = self._sock.recv(READ_SIZE)
        except BlockingIOError:  # pragma: no cover - a wake-up for nothing
            return
        except OSError:
            data = b""
        if not data:
            self._saw_the_peer_close()
        self._ahead += data

    async def _readable(self, deadline: float | None, unless: asyncio.Future[None] | None) -> bool:
        # Not loop.sock_recv: cancelled by a deadline, it may already hold bytes, and loses them.
        loop = asyncio.get_running_loop()
        readable = loop.create_future()
        descriptor = self._sock.fileno()

        def wake() -> None:
            if not readable.done():
                readable.set_result(None)

        loop.add_reader(descriptor, wake)
        try:
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            waited_for = {readable} if unless is None else {readable, unless}
            await asyncio.wait(waited_for, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            loop.remove_reader(descriptor)
        return readable.done()

    def _saw_the_peer_close(self) -> NoReturn:
        self.peer_closed_at = self.peer_closed_at or time.monotonic()
        self._on_change()
        raise PeerClosedError


class Server(ABC):
    """Listens on one port for its whole life, in a thread of its own.

    A context manager; `start` and `close` do the same by hand. `connections` counts the accepted
    connections, `open_connections` those that are still open on this side.
    """

    def __init__(self, *, port: int = 0) -> None:
        self.port = port
        self.connections = 0
        self._changed = threading.Condition()
        self._crashes: list[Exception] = []
        self._conversations: dict[asyncio.Task[None], Connection] = {}
        self._listener: socket.socket | None = None
        self._filler: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop
        self._events: EventWatch
        self._guard: socket.socket
        self._thread: threading.Thread

    @abstractmethod
    async def _serve(self, connection: Connection) -> None:
        """Hold the conversation on one connection; it is closed when this returns."""

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def accepting(self) -> bool:
        """Whether new connections are accepted, that is neither refused nor left hanging."""
        return self._listener is not None and self._filler is None

    @property
    def open_connections(self) -> int:
        return len(self._conversations)

    def __enter__(self: Itself) -> Itself:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        """Take the port and accept connections. Raises OSError for a port that is not free."""
        # Bound but never listening, the guard keeps the port ours while it refuses connections:
        # the system gives it neither to others nor, as a local port, to a connecting client.
        self._guard = _bind(self.port)
        self.port = self._guard.getsockname()[1]
        self._events = EventWatch()
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(
            target=self._run, name=f"{type(self).__name__} on port {self.port}", daemon=True
        )
        self._thread.start()
        self._call(self._listen(BACKLOG))

    def close(self) -> None:
        """Close every connection and the port; `start` takes the same port again.

        Raises RuntimeError when the fake itself failed in one of its conversations.
        """
        if self._loop.is_closed():
            return
        self._call(self._shut_down())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._guard.close()
        if self._crashes:
            raise RuntimeError(f"{self!r} failed: {self._crashes[0]!r}") from self._crashes[0]

    def accept(self) -> None:
        """Accept connections again, on the same port."""
        self._call(self._listen(BACKLOG))

    def refuse(self) -> None:
        """Refuse new connections, as a port does on which nothing listens. Open ones live on."""
        self._call(self._stop_listening())

    def stall_connects(self) -> None:
        """Let new connections hang in connect(), as a host does that drops packets.

        Linux admits one connection to the queue of `listen(0)`; with one that nobody accepts
        in it, the queue is full, and the kernel drops each SYN that follows. The client sends it
        again after 1, 3, 7 s ...: after `accept` such a client gets through at its next try.
        """
        self._call(self._stall())

    def reset_all(self) -> None:
        """Reset every open connection (RST) and return when they are closed."""
        self._call(self._end_conversations(reset=True))

    def wait_for(self, predicate: Callable[[], Result], timeout: float = 10.0) -> Result:
        """Block until the predicate, asked on each change here, is true; return what it returned.

        Raises AssertionError when it still is not after `timeout` seconds. In async code:
        `await anyio.to_thread.run_sync(fake.wait_for, predicate)`.
        """
        with self._changed:
            result = self._changed.wait_for(predicate, timeout)
        if not result:
            raise AssertionError(f"{self!r} did not come to what was waited for in {timeout:g} s")
        return result

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _call(self, steps: Coroutine[Any, Any, Result]) -> Result:
        if threading.current_thread() is self._thread:
            steps.close()
            raise RuntimeError("a fake cannot be controlled from its own loop")
        return asyncio.run_coroutine_threadsafe(steps, self._loop).result(CALL_TIMEOUT)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        asyncio.set_event_loop(None)

    async def _listen(self, backlog: int) -> socket.socket:
        await self._stop_listening()
        self._listener = listener = _bind(self.port)
        listener.listen(backlog)
        asyncio.get_running_loop().add_reader(listener, self._accept_waiting, listener)
        self._tell()
        return listener

    async def _stop_listening(self) -> None:
        if self._listener is not None:
            if asyncio.get_running_loop().remove_reader(self._listener):
                self._accept_waiting(self._listener)  # closing the listener would reset them
            self._listener.close()
            self._listener = None
        if self._filler is not None:
            self._filler.close()
            self._filler = None

    async def _stall(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(await self._listen(0))
        self._filler = socket.socket()
        self._filler.setblocking(False)
        await loop.sock_connect(self._filler, (HOST, self.port))

    async def _shut_down(self) -> None:
        await self._stop_listening()
        await self._end_conversations(reset=False)
        await asyncio.get_running_loop().shutdown_asyncgens()

    async def _end_conversations(self, *, reset: bool) -> None:
        conversations = dict(self._conversations)
        for task, connection in conversations.items():
            if reset:
                connection.reset_on_close()
            task.cancel()
        if conversations:
            await asyncio.wait(conversations)

    def _accept_waiting(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            self.connections += 1
            connection = Connection(sock, self.connections, self._events, self._tell)
            task = asyncio.get_running_loop().create_task(self._converse(connection))
            self._conversations[task] = connection
            task.add_done_callback(self._forget)
            self._tell()

    async def _converse(self, connection: Connection) -> None:
        try:
            await self._serve(connection)
        except PeerClosedError:
            pass
        except Exception as error:
            self._crashes.append(error)

    def _forget(self, task: asyncio.Task[None]) -> None:
        # Here and not in _converse, of which no line runs when it is cancelled at its start.
        self._conversations.pop(task).close()
        self._tell()


def _bind(port: int) -> socket.socket:
    sock = socket.socket()
    try:
        sock.setblocking(False)
        # REUSEPORT lets the guard and the listener share the port, REUSEADDR take it while
        # connections of an earlier life are in TIME_WAIT.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((HOST, port))
    except BaseException:
        sock.close()
        raise
    return sock
