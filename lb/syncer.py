"""Keeps the replica table up to date: poll the controller > apply its list > open and close pools."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import anyio

from controller_client.errors import SyncError
from controller_client.protocol import ReadyList
from lb.arrivals import Arrivals
from lb.logs import Log
from lb.metrics import Metrics
from lb.replicas import Replica, ReplicaTable, State, TableChange
from lb.upstream import Pools
from lb.wakeup import Wakeup

# While the list is empty or the last sync failed; never faster, whatever the controller answers.
URGENT_INTERVAL_SECONDS = 2.0
# So that the balancers of one controller do not all call it at once.
JITTER = 0.1

Sync = Callable[[Sequence[float]], Awaitable[ReadyList]]


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
        table: ReplicaTable,
        pools: Pools,
        arrivals: Arrivals,
        replicas_changed: Wakeup,
        metrics: Metrics,
        log: Log,
        on_first_answer: Callable[[], None],
    ) -> None:
        self._sync = sync
        self._interval = interval
        self._table = table
        self._pools = pools
        self._arrivals = arrivals
        self._replicas_changed = replicas_changed
        self._metrics = metrics
        self._log = log
        self._on_first_answer = on_first_answer
        self.state = SyncState()
        self._skipped: tuple[str, ...] = ()

    async def run(self) -> None:
        """Sync at once, and then again and again."""
        while True:
            urgent = not await self.sync_once()
            interval = min(self._interval, URGENT_INTERVAL_SECONDS) if urgent else self._interval
            await anyio.sleep(interval * random.uniform(1 - JITTER, 1 + JITTER))

    async def sync_once(self) -> bool:
        """One sync; true if it brought a list that is not empty."""
        started = time.monotonic()
        batch = self._arrivals.take(time.time())
        try:
            ready = await self._sync(batch)
        except SyncError as error:
            self._arrivals.restore(batch)
            self._failed(error, time.monotonic() - started)
            found = False
        except BaseException:
            self._arrivals.restore(batch)
            raise
        else:
            self._answered(ready, time.monotonic() - started)
            found = bool(ready.replicas)
        self._retire()
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
        was_held = any(replica.state is State.HELD for replica in self._table)
        change = self._table.apply(ready.replicas, time.monotonic())
        for replica in change.added:
            self._metrics.replica_added(self._pools.open(replica).name)
        self._on_first_answer()
        self._report(change)
        if was_held and ready.replicas:
            self._log.info("list.restored", replicas=len(ready.replicas))
        if change:
            self._replicas_changed.fire()

    def _report(self, change: TableChange) -> None:
        for kind, replicas in change.by_kind():
            self._metrics.replica_set_changed(kind, len(replicas))
        for replica in change.added:
            self._log.info("replica.added", **self._facts(replica))
        for replica in change.revived:
            self._log.info("replica.revived", **self._facts(replica))
        for replica in change.removed:
            self._log.info("replica.removed", **self._facts(replica))
        if change.held:
            self._log.warning("list.held", replicas=len(change.held))
        if change.released:
            self._log.warning("list.released", replicas=len(change.released))

    def _facts(self, replica: Replica) -> dict[str, object]:
        return {"replica": self._pools[replica].name, "accelerator": replica.accelerator}

    def _retire(self) -> None:
        now = time.monotonic()
        for replica in self._table.retire(now):
            name = self._pools[replica].name
            self._pools.close(replica)
            self._metrics.replica_retired(name, now)
            self._log.info("replica.retired", replica=name)
