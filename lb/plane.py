"""What the control side (sync, admin port, page) asks of the side that carries requests.

Two classes are one: `lb.dataplane.DataPlane`, in this process, and `lb.workers.Workers`, which stands
for those of several processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Protocol

from controller_client.protocol import ReadyReplica
from lb.arrivals import Arrivals
from lb.replicas import Replica, ReplicaTable, TableChange


class Plane(Protocol):
    """Times are seconds of the monotonic clock."""

    table: ReplicaTable
    arrivals: Arrivals  # not yet reported

    # --- life

    async def start(self) -> list[tuple[str, int]]:
        """Listen; the addresses bound. Raises OSError where that cannot be."""

    async def run(self) -> None:
        """What goes on until it is cancelled."""

    async def drain(self, forced: asyncio.Event) -> int:
        """Let what runs finish, within the drain time-out and unless forced; how many are left."""

    async def close(self) -> None:
        """Cut what is left."""

    def reload(self) -> None:
        """Read the certificate again."""

    # --- what it is told

    def apply(self, ready: Collection[ReadyReplica], now: float) -> TableChange:
        """Take in a ready list that the controller answered."""

    def retire(self, now: float) -> tuple[Replica, ...]:
        """Forget the replicas that nobody needs any more, and return them."""

    # --- what it is asked

    async def refresh(self) -> None:
        """Get what follows, and the metrics, up to date."""

    @property
    def processes(self) -> int: ...

    @property
    def in_flight(self) -> int:
        """Requests."""

    @property
    def oldest_arrival(self) -> float | None:
        """When the oldest request in flight came."""

    @property
    def unfinished(self) -> int:
        """How many clients wait for an answer, or for the rest of one."""

    def connections(self, replica: Replica) -> tuple[int, int]:
        """How many are open to a replica: idle ones, active ones."""
