"""The replica table against a simple model of its docstring, through random histories."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
)

from controller_client.protocol import ReadyReplica
from lb.policies import POLICIES
from lb.replicas import Lease, Replica, ReplicaTable, State, TableChange

URLS = ("a", "b", "c", "d")
SPANS = st.sampled_from([0.25, 1.0, 2.0, 5.0, 30.0, 600.0])
SHORT_SPANS = st.sampled_from([0.0, 0.25, 1.0])
OUTCOMES = ["refused", "reset", "answered", "left"]
ACCELERATORS = st.sampled_from([None, "A100", "L4"])


class Longest(random.Random):
    """Jitter that takes nothing off, so that the model need not know it."""

    def uniform(self, a: float, b: float) -> float:
        return b

    def random(self) -> float:
        return 0.0


@dataclass(eq=False)
class Known:
    """What the model knows of one replica; `real` is the table's object."""

    url: str
    accelerator: str | None
    real: Replica | None = None
    state: str = "serving"
    draining_since: float = 0.0
    leases: set[Lease] = field(default_factory=set)
    turn: int = 0
    failures: int = 0
    failed_at: float = 0.0
    ejected_until: float | None = None
    refused: bool = False
    probe: Lease | None = None

    @property
    def routable(self) -> bool:
        return self.state in ("serving", "held")

    def avoided(self, now: float) -> bool:
        if self.ejected_until is None:
            return False
        return now < self.ejected_until or self.probe in self.leases

    def eject(self, now: float, *, refused: bool) -> None:
        self.failures += 1
        self.failed_at = now
        self.refused = refused
        self.probe = None
        self.ejected_until = now + min(30.0, [1.0, 2.0, 4.0, 8.0, 16.0, 30.0][: self.failures][-1])

    def restore(self) -> bool:
        was_ejected = self.ejected_until is not None
        self.ejected_until = self.probe = None
        return was_ejected


class TableMachine(RuleBasedStateMachine):
    leases = Bundle("leases")

    # Times are sums of quarters, so that the floats of both sides are exact.
    @initialize(
        grace=st.sampled_from([0.0, 2.0, 30.0]),
        drain=st.sampled_from([0.0, 5.0, 600.0]),
        policy=st.sampled_from(["round_robin", "least_load"]),
    )
    def start(self, grace: float, drain: float, policy: str) -> None:
        self.grace, self.drain, self.policy = grace, drain, policy
        self.table = ReplicaTable(
            POLICIES[policy](None), grace_period=grace, drain_timeout=drain, jitter=Longest()
        )
        self.now = 0.0
        self.first_empty: float | None = None
        self.known: dict[str, Known] = {}
        self.gone: list[Known] = []
        self.owners: dict[Lease, Known] = {}
        self.sync([("a", None), ("b", None)])

    # --- events ---------------------------------------------------------------------------------

    @rule(seconds=SPANS)
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(named=st.lists(st.tuples(st.sampled_from(URLS), ACCELERATORS), min_size=1, max_size=5))
    def sync(self, named: list[tuple[str, str | None]]) -> None:
        change = self.table.apply([ReadyReplica(*entry) for entry in named], self.now)
        facts = dict(named)
        self.first_empty = None
        added = [url for url in facts if url not in self.known]
        revived = [url for url in facts if url in self.known and not self.known[url].routable]
        removed = [k.url for k in self.known.values() if k.routable and k.url not in facts]
        self.expect(change, added=added, revived=revived, removed=removed)
        for url, accelerator in facts.items():
            known = self.known.setdefault(url, Known(url, accelerator))
            known.state, known.accelerator = "serving", accelerator
        for replica in change.added:
            assert all(replica is not known.real for known in self.everybody())
            self.known[replica.url].real = replica
        self.drain_all(removed)

    @rule()
    def sync_brings_an_empty_list(self) -> None:
        change = self.table.apply([], self.now)
        if self.first_empty is None:
            self.first_empty = self.now
        routable = [known for known in self.known.values() if known.routable]
        if self.now - self.first_empty < self.grace:
            self.expect(change, held=[k.url for k in routable if k.state == "serving"])
            for known in routable:
                known.state = "held"
        else:
            released = [known.url for known in routable]
            self.expect(change, released=released)
            self.drain_all(released)

    @rule()
    def retire(self) -> None:
        over = []
        for known in self.known.values():
            drained_for = self.now - known.draining_since
            idle = not known.leases and drained_for >= self.grace
            if known.state == "draining" and (idle or drained_for >= self.drain):
                over.append(known)
        assert list(self.table.retire(self.now)) == [known.real for known in over]
        for known in over:
            known.state = "retired"
            known.restore()
            self.gone.append(self.known.pop(known.url))

    @rule(target=leases, tried=st.sets(st.sampled_from(URLS), max_size=3))
    def lease(self, tried: set[str]) -> object:
        tried_replicas = [k.real for k in self.everybody() if k.url in tried and k.real]
        lease = self.table.lease(self.now, tried=tried_replicas)
        allowed = [k for k in self.known.values() if k.routable and k.url not in tried]
        if not allowed:
            assert lease is None
            return multiple()
        assert lease is not None, "somebody routable was not tried"
        (chosen,) = (known for known in self.known.values() if known.real is lease.replica)
        assert chosen in allowed
        calm = [known for known in allowed if not known.avoided(self.now)]
        if calm:
            assert chosen in calm
            assert self.rank(chosen) == min(map(self.rank, calm))
        else:
            oldest = min((known.failed_at, known.turn) for known in allowed)
            assert (chosen.failed_at, chosen.turn) == oldest
        if chosen.ejected_until is not None and chosen.probe not in chosen.leases:
            chosen.probe = lease
        chosen.leases.add(lease)
        chosen.turn = len(self.owners) + 1
        self.owners[lease] = chosen
        return lease

    @rule(lease=leases)
    def release(self, lease: Lease) -> None:
        lease.release()
        self.owners[lease].leases.discard(lease)

    @rule(lease=leases, refused=st.booleans())
    def attempt_fails(self, lease: Lease, refused: bool) -> None:
        known = self.owners[lease]
        fresh = known.ejected_until is None
        counts = known.state != "retired" and (fresh or known.probe is lease)
        newly = self.table.failed(lease, self.now, unreachable=refused)
        assert newly == (counts and fresh)
        if counts:
            known.eject(self.now, refused=refused)

    @rule(lease=leases)
    def connection_opens(self, lease: Lease) -> None:
        known = self.owners[lease]
        assert self.table.connected(lease) == (known.refused and known.restore())

    @rule(lease=leases)
    def replica_answers(self, lease: Lease) -> None:
        known = self.owners[lease]
        known.failures = 0
        assert self.table.answered(lease) == known.restore()

    # --- events that mean most one after the other ----------------------------------------------

    @rule(attempts=st.lists(st.tuples(st.sampled_from(OUTCOMES), SHORT_SPANS), max_size=5))
    def one_request(self, attempts: list[tuple[str, float]]) -> None:
        """As the proxy does it: on to another replica after a failure, until all were tried."""
        tried: set[str] = set()
        for outcome, seconds in attempts:
            lease = self.lease(tried)
            if not isinstance(lease, Lease):
                break
            self.time_passes(seconds)
            if outcome == "refused":
                self.attempt_fails(lease, refused=True)
            elif outcome == "reset":
                self.connection_opens(lease)
                self.attempt_fails(lease, refused=False)
            elif outcome == "answered":
                self.replica_answers(lease)
            self.release(lease)
            tried.add(lease.replica.url)

    @rule(spans=st.lists(SPANS, max_size=3))
    def the_list_stays_empty(self, spans: list[float]) -> None:
        self.sync_brings_an_empty_list()
        for seconds in spans:
            self.time_passes(seconds)
            self.sync_brings_an_empty_list()

    @rule(url=st.sampled_from(URLS), spans=st.lists(SPANS, max_size=3))
    def one_replica_leaves(self, url: str, spans: list[float]) -> None:
        self.sync([(other, None) for other in URLS if other != url])
        for seconds in spans:
            self.retire()
            self.time_passes(seconds)
        self.retire()

    # --- what holds at all times ----------------------------------------------------------------

    @invariant()
    def the_table_is_as_the_model(self) -> None:
        assert [(r, r.url, r.state.value, r.accelerator) for r in self.table] == [
            (k.real, k.url, k.state, k.accelerator) for k in self.known.values()
        ]
        assert self.table.routable() == [k.real for k in self.known.values() if k.routable]
        assert len(self.table) == len(self.known)
        counts = dict.fromkeys(["serving", "held", "draining", "ejected"], 0)
        for known in self.known.values():
            counts[known.state] += 1
            counts["ejected"] += known.ejected_until is not None
        assert self.table.counts() == counts

    @invariant()
    def replicas_are_as_the_model(self) -> None:
        for known in self.everybody():
            replica = known.real
            assert replica is not None
            assert replica.inflight == len(known.leases) >= 0
            assert replica.ejected_until == known.ejected_until
            for now in (self.now, self.now + 1.0):
                assert replica.avoided(now) == known.avoided(now)
            assert replica.probing == (known.probe in known.leases)
            assert not replica.probing or replica.probe is known.probe
        assert all(known.real and known.real.state is State.RETIRED for known in self.gone)

    @invariant()
    def leases_stay_with_their_replica(self) -> None:
        for lease, known in self.owners.items():
            assert lease.replica is known.real
            assert lease.released == (lease not in known.leases)

    # --- helpers --------------------------------------------------------------------------------

    def everybody(self) -> list[Known]:
        return [*self.known.values(), *self.gone]

    def rank(self, known: Known) -> tuple[int, ...]:
        load = len(known.leases)
        return (known.turn,) if self.policy == "round_robin" else (load, known.turn)

    def drain_all(self, urls: list[str]) -> None:
        for url in urls:
            self.known[url].state, self.known[url].draining_since = "draining", self.now

    def expect(self, change: TableChange, **wanted: list[str]) -> None:
        """The change has these URLs, by kind, and each stands for the object that was there before."""
        got = {kind: replicas for kind, replicas in change.by_kind() if replicas}
        assert {kind: {r.url for r in got[kind]} for kind in got} == {
            kind: set(urls) for kind, urls in wanted.items() if urls
        }
        for kind, replicas in got.items():
            assert len(replicas) == len(wanted[kind])
            if kind != "added":
                assert all(self.known[replica.url].real is replica for replica in replicas)


# Hypothesis looks for the shortest history that fails for up to 300 s.
TestTable = pytest.mark.timeout(400)(TableMachine.TestCase)
