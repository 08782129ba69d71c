"""What the control process and its workers tell each other, over a socket pair for each worker.

Messages are pickled: both ends run the same code, and nobody else can reach the socket.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from controller_client.protocol import ReadyReplica
from lb.events import EventFacts
from lb.metrics import Numbers
from lb.settings import Settings

_LENGTH = struct.Struct(">I")


# --- to a worker ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """The first message: who you are."""

    number: int
    settings: Settings


@dataclass(frozen=True, slots=True)
class Listed:
    """A ready list, and when it came. The monotonic clock is one for all processes of a machine."""

    ready: tuple[ReadyReplica, ...]
    at: float


@dataclass(frozen=True, slots=True)
class Loads:
    """Requests in flight by URL, of replicas for which that has changed: to a worker, those of all
    others; from a worker, its own."""

    in_flight: Mapping[str, int]


def changed_loads(told: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """What is to be told, where `told` has been: a replica that is missing has none in flight."""
    urls = told.keys() | now.keys()
    return {url: now.get(url, 0) for url in urls if now.get(url, 0) != told.get(url, 0)}


@dataclass(frozen=True, slots=True)
class Ask:
    """Answer with a `Report` of this number."""

    number: int


@dataclass(frozen=True, slots=True)
class Reload:
    """Read the certificate again."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Begin to shut down; told twice, end at once."""


# --- from a worker --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Serving:
    """It takes connections."""


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """How one replica is seen from a worker."""

    ejected_until: float | None
    failures: int
    idle: int
    active: int


@dataclass(frozen=True, slots=True)
class Report:
    """What has happened since the last report, and how it is now.

    `replicas` are by URL; `oldest_arrival` is of the monotonic clock.
    """

    number: int
    numbers: Numbers
    arrivals: list[float]
    events: list[EventFacts]
    replicas: dict[str, ReplicaReport]
    in_flight: int
    oldest_arrival: float | None
    unfinished: int


Message = Begin | Listed | Loads | Ask | Reload | Drain | Serving | Report


class Link:
    """One end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, sock: socket.socket) -> Link:
        return cls(*await asyncio.open_unix_connection(sock=sock))

    def send(self, message: Message) -> None:
        """To one that is gone, nothing."""
        data = pickle.dumps(message)
        if not self._writer.is_closing():
            self._writer.write(_LENGTH.pack(len(data)) + data)

    @property
    def jammed(self) -> bool:
        """Does the other end not take what it was sent?"""
        return self._writer.transport.get_write_buffer_size() > 0

    async def receive(self) -> Message | None:
        """The next message; None when the other end is gone."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            data = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        message: Message = pickle.loads(data)  # noqa: S301 - of our own process
        return message

    async def flush(self) -> None:
        """Wait until all that was sent is on its way."""
        try:
            await self._writer.drain()
        except ConnectionError:
            pass  # the other end is gone

    def close(self) -> None:
        self._writer.close()
