"""Keeps the replicas up to date: poll the controller > apply its list > tell what has changed."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import anyio

from controller_client.errors import SyncError
from controller_client.protocol import ReadyList, ReadyReplica
from lb.arrivals import Arrivals
from lb.logs import Log
from lb.metrics import Metrics
from lb.replicas import Replica, ReplicaTable, State, TableChange

# While the list is empty or the last sync failed; never faster, whatever the controller answers.
URGENT_INTERVAL_SECONDS = 2.0
# So that the balancers of one controller do not all call it at once.
JITTER = 0.1

Sync = Callable[[Sequence[float]], Awaitable[ReadyList]]


class Replicas(Protocol):
    """Those that the lists are about; `now` is of the monotonic clock."""

    table: ReplicaTable
    arrivals: Arrivals

    def apply(self, ready: Collection[ReadyReplica], now: float) -> TableChange:
        """Take in a ready list that the controller answered."""

    def retire(self, now: float) -> tuple[Replica, ...]:
        """Forget the replicas that nobody needs any more, and return them."""


@dataclass
class SyncState:
    """How the last call went; times are Unix times."""

    result: str | None = None  # of the metric's label; None before the first call has ended
    cause: str = ""
    last_answer: float | None = None
    failing_since: float | None = None


class Syncer:
    """Polls the controller, for as long as `run` runs.

    `sync` reports arrivals and returns the ready list, or raises `SyncError`; `interval` is in
    seconds.
    """

    def __init__(
        self,
        sync: Sync,
        *,
        interval: float,
        replicas: Replicas,
        metrics: Metrics,
        log: Log,
    ) -> None:
        self._sync = sync
        self._interval = interval
        self._replicas = replicas
        self._metrics = metrics
        self._log = log
        self.state = SyncState()
        self._skipped: tuple[str, ...] = ()

    @property
    def answered(self) -> bool:
        """Has the controller ever answered?"""
        return self.state.last_answer is not None

    async def run(self) -> None:
        """Sync at once, and then again and again."""
        while True:
            urgent = not await self.sync_once()
            interval = min(self._interval, URGENT_INTERVAL_SECONDS) if urgent else self._interval
            await anyio.sleep(interval * random.uniform(1 - JITTER, 1 + JITTER))

    async def sync_once(self) -> bool:
        """One sync; true if it brought a list that is not empty."""
        started = time.monotonic()
        arrivals = self._replicas.arrivals
        batch = arrivals.take(time.time())
        try:
            ready = await self._sync(batch)
        except SyncError as error:
            arrivals.restore(batch)
            self._failed(error, time.monotonic() - started)
            found = False
        except BaseException:
            arrivals.restore(batch)
            raise
        else:
            self._answered(ready, time.monotonic() - started)
            found = bool(ready.replicas)
        for replica in self._replicas.retire(time.monotonic()):
            self._log.info("replica.retired", replica=replica.name)
        return found

    def _failed(self, error: SyncError, seconds: float) -> None:
        self._metrics.synced(error.result, seconds, None)
        state = self.state
        if state.failing_since is None:
            state.failing_since = time.time()
            self._log.warning("sync.failed", result=error.result, cause=str(error))
        state.result, state.cause = error.result, str(error)

    def _answered(self, ready: ReadyList, seconds: float) -> None:
        now, result = time.time(), "ok" if ready.replicas else "empty"
        self._metrics.synced(result, seconds, now)
        if self.state.failing_since is not None:
            self._log.info("sync.recovered")
        self.state = SyncState(result, last_answer=now)
        if ready.skipped and ready.skipped != self._skipped:
            self._log.warning("list.entry_skipped", entries=list(ready.skipped))
        self._skipped = ready.skipped
        was_held = any(replica.state is State.HELD for replica in self._replicas.table)
        self._report(self._replicas.apply(ready.replicas, time.monotonic()))
        if was_held and ready.replicas:
            self._log.info("list.restored", replicas=len(ready.replicas))

    def _report(self, change: TableChange) -> None:
        for kind, replicas in change.by_kind():
            self._metrics.replica_set_changed(kind, len(replicas))
        for replica in change.added:
            self._log.info("replica.added", **_facts(replica))
        for replica in change.revived:
            self._log.info("replica.revived", **_facts(replica))
        for replica in change.removed:
            self._log.info("replica.removed", **_facts(replica))
        if change.held:
            self._log.warning("list.held", replicas=len(change.held))
        if change.released:
            self._log.warning("list.released", replicas=len(change.released))


def _facts(replica: Replica) -> dict[str, object]:
    return {"replica": replica.name, "accelerator": replica.accelerator}
