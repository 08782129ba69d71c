"""Gathers what this process knows into a snapshot; the one place that does."""

from __future__ import annotations

import time
from collections.abc import Callable

from lb import __version__
from lb.events import RecentEvents
from lb.history import Counts, History
from lb.metrics import DURATION, FIRST_BYTE, Metrics
from lb.plane import Plane
from lb.replicas import Replica
from lb.settings import Settings
from lb.snapshot import FAILED, About, Edges, ReplicaFacts, Snapshot, SyncFacts
from lb.syncer import SyncState

_EDGES: Edges = {"first_byte": list(FIRST_BYTE), "duration": list(DURATION)}


class Facts:
    """What the balancer's parts know, read when somebody asks; `sample` keeps the history going.

    `not_ready` says why the balancer should get no new clients, or None; `sync` is how the last
    call to the controller went.
    """

    def __init__(
        self,
        settings: Settings,
        mode: str,
        *,
        metrics: Metrics,
        plane: Plane,
        not_ready: Callable[[], str | None],
        sync: Callable[[], SyncState],
        events: RecentEvents,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._plane = plane
        self._not_ready = not_ready
        self._sync = sync
        self._events = events
        sticky = settings.sticky
        self._about: About = {
            "version": __version__,
            "service": settings.service_name,
            "policy": settings.policy,
            "sticky": f"{sticky.source}:{sticky.name}" if sticky else None,
            "mode": mode,
            "started": time.time(),
        }
        self._history = History(time.time(), self._counts())

    def sample(self) -> None:
        """Keep what was counted since the last time, if it is time for that."""
        now = time.time()
        if self._history.due(now):
            self._history.sample(now, self._counts(), self._metrics.gauges.inflight())

    def _counts(self) -> Counts:
        return Counts(
            outcomes=self._metrics.outcomes(),
            first_byte=self._metrics.first_byte_counts(),
            duration=self._metrics.duration_counts(),
            replicas={
                name: (sum(outcomes.values()), sum(outcomes[each] for each in FAILED))
                for name, outcomes in self._metrics.live_replicas(time.monotonic()).items()
            },
        )

    def snapshot(self) -> Snapshot:
        """All that is known, now."""
        gauges, now = self._metrics.gauges, time.time()
        offset = now - time.monotonic()
        return {
            "about": self._about,
            "now": now,
            "processes": self._plane.processes,
            "not_ready": self._not_ready(),
            "draining": gauges.draining(),
            "in_flight": gauges.inflight(),
            "oldest_seconds": gauges.inflight_oldest_seconds(),
            "sync": self._sync_facts(offset),
            "replicas": [self._replica(each, offset) for each in self._plane.table],
            "edges": _EDGES,
            "ticks": list(self._history),
            "events": list(self._events),
        }

    def _sync_facts(self, offset: float) -> SyncFacts:
        state, empty_since = self._sync(), self._plane.table.empty_since
        return {
            "interval": self._settings.sync_interval,
            "grace_period": self._settings.grace_period,
            "result": state.result,
            "cause": state.cause,
            "last_answer": state.last_answer,
            "failing_since": state.failing_since,
            "empty_since": None if empty_since is None else empty_since + offset,
        }

    def _replica(self, replica: Replica, offset: float) -> ReplicaFacts:
        """`offset` turns the monotonic clock's times into Unix times."""
        until = replica.ejected_until
        finished, failed = self._history.of_replica(replica.name)
        idle, active = self._plane.connections(replica)
        return {
            "name": replica.name,
            "url": replica.url,
            "state": replica.state.value,
            "since": replica.since + offset,
            "accelerator": replica.accelerator,
            "ejected": replica.ejected,
            "ejected_until": None if until is None else until + offset,
            "failures": replica.failures,
            "in_flight": replica.inflight,
            "idle_connections": idle,
            "active_connections": active,
            "finished": finished,
            "failed": failed,
        }
