"""The replica table: which replicas there are, which are routable, and who holds a lease on them.

Pure: the time is passed in as `now` (seconds of a monotonic clock). This table is the specification:

| event | serving or held | draining | unknown |
| --- | --- | --- | --- |
| a non-empty list names it | serving; its accelerator is updated | serving again: the same object, hence the same pool and connections ("revived") | new, serving ("added") |
| a non-empty list omits it | draining ("removed") | draining | - |
| an empty list within the grace period | held: still routable | draining | - |
| an empty list after the grace period | draining ("released") | draining | - |
| a failed sync | nothing | nothing | - |
| `retire`: no lease and grace period over, or drain time-out over | - | gone ("retired") | - |

The grace period of a held replica starts with the first empty list; that of a draining one with its
own draining. Beside its state a replica may be *ejected*: set aside after failures that the balancer
saw itself. An ejected replica stays routable as a last resort, so the balancer never makes an outage
of its own.

| event | not ejected | ejected |
| --- | --- | --- |
| an attempt fails with an error that ejects | ejected for 1 s, twice that for each failure kept | a probe or a last resort failed: ejected for twice as long, 30 s at the most |
| its time is over | - | the next lease on it is a probe; while that runs, others avoid the replica |
| a connection to it opens | - | restored, if it was ejected because it could not be connected to; its failures are kept |
| it answers (any status) | its failures are forgotten | restored; its failures are forgotten |

Nothing happens to a retired replica any more; leases on it can still be released.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from urllib.parse import urlsplit

from controller_client.protocol import ReadyReplica
from lb.policies import SelectionPolicy
from lb.ranking import Ranking
from lb.stickiness import affinity

FIRST_EJECTION_SECONDS = 1.0
LONGEST_EJECTION_SECONDS = 30.0


class State(Enum):
    """The state of a replica; `SERVING` and `HELD` are routable."""

    SERVING = "serving"
    HELD = "held"
    DRAINING = "draining"
    RETIRED = "retired"


ROUTABLE = (State.SERVING, State.HELD)


class Replica:
    """One replica; its identity is the object, not the URL: pools and leases are bound to it."""

    __slots__ = (
        "accelerator",
        "ejected_until",
        "elsewhere",
        "failed_at",
        "failures",
        "inflight",
        "last_lease",
        "name",
        "peers",
        "probe",
        "since",
        "state",
        "told",
        "unreachable",
        "url",
    )

    def __init__(
        self, url: str, accelerator: str | None, now: float, turn: float, peers: int = 0
    ) -> None:
        self.url = url
        self.name = urlsplit(url).netloc  # host:port, as logs and metrics name it
        self.accelerator = accelerator
        self.state = State.SERVING
        self.since = now  # when it came into this state
        self.inflight = 0
        # What other processes of this balancer have in flight there, as they last told, and what we
        # had then.
        self.peers = peers
        self.elsewhere = 0
        self.told = 0
        self.last_lease = turn  # the number of its last lease; before the first at random below 0
        # Ejection. `failures` counts those in a row; `unreachable` tells whether the last was a
        # failed connect; `probe` is the lease that tries the replica after its time is over.
        self.failures = 0
        self.failed_at = 0.0
        self.ejected_until: float | None = None
        self.unreachable = False
        self.probe: Lease | None = None

    def __repr__(self) -> str:
        return f"<Replica {self.url} {self.state.value} inflight={self.inflight}>"

    @property
    def routable(self) -> bool:
        return self.state in ROUTABLE

    @property
    def load(self) -> int:
        """Requests that all processes of this balancer have in flight there, as far as we can know.

        The others are taken to have done since then what we have: otherwise all would send to the
        replica that had the fewest.
        """
        return self.inflight + self.elsewhere + self.peers * (self.inflight - self.told)

    @property
    def ejected(self) -> bool:
        return self.ejected_until is not None

    def avoided(self, now: float) -> bool:
        """Is it set aside right now: ejected and its time not over, or its probe still running?"""
        return self.ejected_until is not None and (self.probing or now < self.ejected_until)

    @property
    def probing(self) -> bool:
        """Does a request try the ejected replica right now?"""
        return self.probe is not None and not self.probe.released


class Lease:
    """One request's claim on a replica: counted in `inflight` until it is released, exactly once."""

    __slots__ = ("_on_release", "released", "replica")

    def __init__(self, replica: Replica, on_release: Callable[[Replica], None]) -> None:
        self.replica = replica
        self.released = False
        self._on_release = on_release
        replica.inflight += 1

    def release(self) -> None:
        """End the claim; calling it again changes nothing."""
        if not self.released:
            self.released = True
            self.replica.inflight -= 1
            self._on_release(self.replica)


@dataclass(frozen=True)
class TableChange:
    """What one event changed, as tuples of replicas."""

    added: tuple[Replica, ...] = ()
    removed: tuple[Replica, ...] = ()
    held: tuple[Replica, ...] = ()
    released: tuple[Replica, ...] = ()
    revived: tuple[Replica, ...] = ()

    def __bool__(self) -> bool:
        return any(replicas for _, replicas in self.by_kind())

    def by_kind(self) -> Iterator[tuple[str, tuple[Replica, ...]]]:
        """Each kind of change, by its name, with the replicas that it befell."""
        return ((each.name, getattr(self, each.name)) for each in fields(self))


class ReplicaTable:
    """All replicas that are known.

    `grace_period` and `drain_timeout` are in seconds; a grace period of 0 is none. `peers`: how many
    other processes of this balancer lease the same replicas.
    """

    def __init__(
        self,
        policy: SelectionPolicy,
        *,
        grace_period: float,
        drain_timeout: float,
        peers: int = 0,
        jitter: random.Random | None = None,
    ) -> None:
        self._policy = policy
        self._peers = peers
        self._grace_period = grace_period
        self._drain_timeout = drain_timeout
        self._jitter = jitter or random.Random()
        self._replicas: dict[str, Replica] = {}
        self._empty_since: float | None = None
        self._leases = 0
        self._rank()

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def __len__(self) -> int:
        return len(self._replicas)

    def routable(self) -> list[Replica]:
        """The replicas that may get new requests, ejected ones included."""
        return [replica for replica in self if replica.routable]

    def counts(self) -> dict[str, int]:
        """How many replicas are serving, held and draining, and how many of them are ejected."""
        counts = {"serving": 0, "held": 0, "draining": 0, "ejected": 0}
        for replica in self:
            counts[replica.state.value] += 1
            counts["ejected"] += replica.ejected
        return counts

    @property
    def empty_since(self) -> float | None:
        """When the list became empty, which it still is; None while it names a replica."""
        return self._empty_since

    def apply(self, ready: Collection[ReadyReplica], now: float) -> TableChange:
        """Take in one ready list that the controller answered."""
        change = self._apply(ready, now)
        self._rank()
        return change

    def _apply(self, ready: Collection[ReadyReplica], now: float) -> TableChange:
        if ready:
            self._empty_since = None
            return self._apply_list(ready, now)
        if self._empty_since is None:
            self._empty_since = now
        if now - self._empty_since < self._grace_period:
            return TableChange(held=self._move(self._serving(), State.HELD, now))
        return TableChange(released=self._move(self.routable(), State.DRAINING, now))

    def _apply_list(self, ready: Collection[ReadyReplica], now: float) -> TableChange:
        added, revived, named = [], [], set()
        for entry in ready:
            named.add(entry.url)
            replica = self._replicas.get(entry.url)
            if replica is None:
                # In the list's order, all balancers of a service would take their turns in step.
                turn = -self._jitter.random()
                replica = Replica(entry.url, entry.accelerator, now, turn, self._peers)
                self._replicas[entry.url] = replica
                added.append(replica)
            elif replica.state is State.DRAINING:
                revived.append(replica)
            if replica.state is not State.SERVING:
                replica.state, replica.since = State.SERVING, now
            replica.accelerator = entry.accelerator
        omitted = [replica for replica in self.routable() if replica.url not in named]
        return TableChange(
            added=tuple(added),
            revived=tuple(revived),
            removed=self._move(omitted, State.DRAINING, now),
        )

    def _serving(self) -> list[Replica]:
        return [replica for replica in self if replica.state is State.SERVING]

    def _move(self, replicas: Iterable[Replica], state: State, now: float) -> tuple[Replica, ...]:
        moved = tuple(replicas)
        for replica in moved:
            replica.state, replica.since = state, now
        return moved

    def retire(self, now: float) -> tuple[Replica, ...]:
        """Forget the draining replicas that nobody needs any more, and return them."""
        retired = tuple(replica for replica in self if self._is_over(replica, now))
        for replica in retired:
            replica.state = State.RETIRED
            del self._replicas[replica.url]
            self._restore(replica)
        return retired

    def _is_over(self, replica: Replica, now: float) -> bool:
        if replica.state is not State.DRAINING:
            return False
        drained_for = now - replica.since
        idle = replica.inflight == 0 and drained_for >= self._grace_period
        return idle or drained_for >= self._drain_timeout

    def lease(
        self, now: float, *, tried: Collection[Replica] = (), session: bytes | None = None
    ) -> Lease | None:
        """Choose a routable replica that was not tried yet, and lease it; None where there is none.

        Among those that are not set aside the policy chooses, or the session of a sticky request
        does. With only set-aside ones left, the
        one that failed longest ago is taken: asking somebody beats refusing by our own choice.
        """
        replica = None if tried or session is not None else self._first(now)
        if replica is None:
            replica = self._search(now, tried, session)
        if replica is None:
            return None
        self._leases += 1
        replica.last_lease = self._leases
        lease = Lease(replica, self._eased)
        if replica.ejected and not replica.probing:
            replica.probe = lease
        return lease

    def _first(self, now: float) -> Replica | None:
        """What the policy chooses of all; None where all are set aside."""
        first = self._ranking.first()
        for replica in self._ejected:
            if not replica.avoided(now) and (
                first is None or self._policy(replica) < self._policy(first)
            ):
                first = replica
        return first

    def _search(
        self, now: float, tried: Collection[Replica], session: bytes | None
    ) -> Replica | None:
        """The same by looking at each, where not all may be chosen or the policy is not asked."""
        candidates = [r for r in self._replicas.values() if r.routable and r not in tried]
        preferred = [replica for replica in candidates if not replica.avoided(now)]
        if preferred and session is not None:
            score = affinity(session)
            return max(preferred, key=lambda r: score(r.url))
        if preferred:
            return min(preferred, key=self._policy)
        return min(candidates, key=lambda r: (r.failed_at, r.last_lease), default=None)

    def take_loads(self, elsewhere: Mapping[str, int], told: Mapping[str, int]) -> None:
        """Take in, by URL, what other processes of this balancer have in flight where that has changed,
        and what we had in flight when they last were told."""
        for url, replica in self._replicas.items():
            replica.elsewhere = elsewhere.get(url, replica.elsewhere)
            replica.told = told.get(url, 0)
            self._eased(replica)

    def _eased(self, replica: Replica) -> None:
        """Its load may be less; the replica may be one of an earlier ranking."""
        self._ranking.fell(replica)

    def _rank(self) -> None:
        """After a change of who may be chosen: rare, beside leases."""
        routable = self.routable()
        self._ejected = [replica for replica in routable if replica.ejected]
        self._ranking = Ranking((r for r in routable if not r.ejected), self._policy)

    def failed(self, lease: Lease, now: float, *, unreachable: bool) -> bool:
        """An attempt failed with an error that ejects; true if the replica was not ejected before.

        Failures of attempts that ran side by side count as one: a replica that dies under 100
        requests has failed once, not 100 times. The lease may be released before this or after.
        """
        replica = lease.replica
        newly = not replica.ejected
        if replica.state is State.RETIRED or not (newly or replica.probe is lease):
            return False
        replica.probe = None
        replica.failures += 1
        replica.failed_at = now
        replica.unreachable = unreachable
        longest = min(
            FIRST_EJECTION_SECONDS * 2.0 ** min(replica.failures - 1, 10), LONGEST_EJECTION_SECONDS
        )
        replica.ejected_until = now + longest * self._jitter.uniform(0.75, 1.0)
        if newly:
            self._rank()
        return newly

    def connected(self, lease: Lease) -> bool:
        """A connection to the replica opened; true if that restored it.

        Its failures are kept until it answers: one that accepts and then resets goes on doubling.
        """
        return lease.replica.unreachable and self._restore(lease.replica)

    def answered(self, lease: Lease) -> bool:
        """The replica sent a response head, of any status; true if that restored it."""
        lease.replica.failures = 0
        return self._restore(lease.replica)

    def _restore(self, replica: Replica) -> bool:
        if not replica.ejected:
            return False
        replica.ejected_until = None
        replica.probe = None
        self._rank()
        return True
