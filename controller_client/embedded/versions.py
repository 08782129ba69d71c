"""Versions and update modes: which versions are active, which replicas stay, come and go. Pure.

| | rolling | blue-green |
| --- | --- | --- |
| active | every version with a ready replica | the latest version with its least number of replicas ready; else the oldest with a ready one |
| old replicas go | one for each new one that is ready, oldest first, those not yet ready before all | all, when their version is older than the active one |
| new replicas come | at once, as many as are wanted | as in rolling |

The active set and the reuse of replicas are SkyPilot's own rules (the differential test holds
that). Of equals the oldest replica goes first, as in the tables of SkyServe's manual, where its code
takes the newest.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any


class Mode(str, Enum):
    ROLLING = "rolling"
    BLUE_GREEN = "blue_green"


class Status(str, Enum):
    """Of a replica; the first four are those of one that is to stay, in the order of its life."""

    PROVISIONING = "PROVISIONING"  # its `setup` runs
    STARTING = "STARTING"  # its `run` runs, and it has not been ready yet
    NOT_READY = "NOT_READY"  # it was ready, and its probe fails
    READY = "READY"
    SHUTTING_DOWN = "SHUTTING_DOWN"
    FAILED = "FAILED"  # `setup` or `run` ended before it was ready
    FAILED_INITIAL_DELAY = "FAILED_INITIAL_DELAY"  # it was not ready in time


STAYING = tuple(Status)[:4]
FAILURES = (Status.FAILED, Status.FAILED_INITIAL_DELAY)


@dataclass(slots=True)
class Replica:
    """One replica. Times are Unix seconds; `changed_at` is when it got its status."""

    id: int
    version: int
    status: Status
    changed_at: float = 0.0
    launched_at: float = 0.0
    first_ready_at: float | None = None
    port: int = 0
    pid: int = 0
    started: str = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def stays(self) -> bool:
        return self.status in STAYING


def active_versions(replicas: Iterable[Replica], mode: Mode, least: Mapping[int, int]) -> list[int]:
    """The versions whose ready replicas are listed; `least` is how many each version must have."""
    ready = Counter(each.version for each in replicas if each.status is Status.READY)
    if mode is Mode.ROLLING or not ready:
        return sorted(ready)
    enough = [version for version, count in ready.items() if count >= least.get(version, math.inf)]
    return [max(enough) if enough else min(ready)]


def service_status(statuses: Sequence[Status]) -> str:
    """The status of a service whose replicas have these."""
    if Status.READY in statuses:
        return "READY"
    if any(status in FAILURES for status in statuses):
        return "FAILED"
    return "REPLICA_INIT" if statuses else "NO_REPLICA"


def reusable(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether a replica of the one task may go on as one of the other: only the service differs.

    Never where files are mounted: what they hold may have changed.
    """
    return new.get("file_mounts") == {} and _comparable(old) == _comparable(new)


def _comparable(task: Mapping[str, Any]) -> dict[str, Any]:
    rest = {
        key: task[key] for key in task if key not in ("service", "pool", "_user_specified_yaml")
    }
    resources = dict(rest.get("resources") or {})
    any_of = resources.pop("any_of", None) or []  # whose order means nothing
    if "resources" in rest:
        rest["resources"] = resources
    rest["any_of"] = sorted(json.dumps(each, sort_keys=True) for each in any_of)
    return rest


def _first_to_go(replicas: Iterable[Replica], count: int) -> list[Replica]:
    order = sorted(replicas, key=lambda each: (STAYING.index(each.status), each.version, each.id))
    return order[: max(0, count)]


@dataclass(slots=True)
class Service:
    """A service: all that is kept of it. Its methods are what may change its replicas.

    `latest` is its newest version and `wanted` the number of replicas; `tasks` holds the task of
    each version, `proven` the versions of which a replica has been ready. With a `gap` (seconds) the
    active set lags behind an update for so long: the fault of SkyPilot's, on purpose.
    """

    name: str
    tasks: dict[int, dict[str, Any]]
    wanted: int
    port: int
    admin_port: int
    options: list[str] = field(default_factory=list)
    gap: float = 0.0
    stale_until: float = 0.0
    ending: bool = False
    latest: int = 1
    mode: Mode = Mode.ROLLING
    active: list[int] = field(default_factory=list)
    proven: list[int] = field(default_factory=list)
    replicas: list[Replica] = field(default_factory=list)
    next_id: int = 1
    born: float = 0.0
    ready_since: float | None = None
    controller_port: int = 0
    controller_pid: int = 0
    balancer_pid: int = 0
    balancer_started: str = ""

    @classmethod
    def from_json(cls, text: str) -> "Service":
        values = json.loads(text)
        values["mode"] = Mode(values["mode"])
        values["tasks"] = {int(version): task for version, task in values["tasks"].items()}
        values["replicas"] = [
            Replica(**{**each, "status": Status(each["status"])}) for each in values["replicas"]
        ]
        return cls(**values)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def status(self) -> str:
        if self.ending:
            return "SHUTTING_DOWN"
        return service_status([each.status for each in self.replicas])

    @property
    def listed(self) -> list[Replica]:
        """The ready list."""
        ready = [each for each in self.replicas if each.status is Status.READY]
        return [each for each in ready if each.version in self.active]

    def replica(self, replica_id: int) -> Replica | None:
        return next((each for each in self.replicas if each.id == replica_id), None)

    def update(self, version: int, mode: Mode, now: float) -> None:
        """Make a version of `tasks` the latest, and relabel the replicas that may go on as it.

        One that is not newer changes nothing, as in SkyPilot. Raises KeyError for one not in `tasks`.
        """
        task = self.tasks[version]
        if version <= self.latest:
            return
        self.latest, self.mode, self.stale_until = version, mode, now + self.gap
        for replica in self.replicas:
            if replica.stays and reusable(self.tasks[replica.version], task):
                replica.version = version
        self.replicas = [each for each in self.replicas if each.status not in FAILURES]
        self.settle(now)

    def change(self, replica_id: int, status: Status, now: float) -> None:
        """Give a replica that stays another status."""
        replica = self.replica(replica_id)
        if replica and replica.stays and replica.status is not status:
            replica.status, replica.changed_at = status, now
            if status is Status.READY:
                replica.first_ready_at = replica.first_ready_at or now
                self.ready_since = self.ready_since or now
            self.settle(now)

    def remove(self, replica_id: int, now: float) -> None:
        self.replicas = [each for each in self.replicas if each.id != replica_id]
        self.settle(now)

    def settle(self, now: float) -> None:
        """Bring the active set up to date, unless it is to lag or the service ends."""
        if self.ending or now < self.stale_until:
            return
        least = {
            version: task["service"]["replica_policy"]["min_replicas"]
            for version, task in self.tasks.items()
        }
        self.active = active_versions(self.replicas, self.mode, least)
        ready = {each.version for each in self.replicas if each.status is Status.READY}
        self.proven = sorted({*self.proven, *ready})

    def plan(self) -> tuple[int, list[int]]:
        """How many replicas of the latest version to launch, and the ids of those that have to go.

        Before one of the latest version has been ready, one that fails stops everything: the next
        would fail as well, and the old ones serve on.
        """
        current = [each for each in self.replicas if each.version == self.latest]
        proven = self.latest in self.proven
        if not proven and any(each.status in FAILURES for each in current):
            return 0, []
        staying = [each for each in current if each.stays]
        surplus = _first_to_go(staying, len(staying) - self.wanted)
        old = [each for each in self.replicas if each.version != self.latest and each.stays]
        if self.mode is Mode.BLUE_GREEN:
            gone = [each for each in old if self.active and each.version < min(self.active)]
        else:
            ready = sum(each.status is Status.READY for each in staying)
            gone = _first_to_go(old, len(old) - max(0, self.wanted - ready))
        return max(0, self.wanted - len(staying)), [each.id for each in [*gone, *surplus]]


@dataclass(slots=True)
class Scaler:
    """How many replicas are wanted, by the rate of requests over the last minute.

    `target` follows what the rate asks for when that has pointed the same way for as long as the
    policy says.
    """

    WINDOW_SECONDS = 60.0

    target: int
    arrivals: list[float] = field(default_factory=list)
    _since: dict[bool, float] = field(default_factory=dict)  # by whether up: since when

    def decide(self, policy: Mapping[str, Any], now: float) -> int:
        """The target now, by this `replica_policy`."""
        self.arrivals = [each for each in self.arrivals if abs(now - each) < self.WINDOW_SECONDS]
        least, most = policy["min_replicas"], policy["max_replicas"]
        asked, each_takes = least, policy["target_qps_per_replica"]
        if each_takes:
            asked = math.ceil(len(self.arrivals) / self.WINDOW_SECONDS / each_takes)
        asked = max(least, min(most, asked))
        up = asked > self.target
        self._since = {up: self._since.get(up, now)} if asked != self.target else {}
        delay = policy["upscale_delay_seconds" if up else "downscale_delay_seconds"]
        overdue = bool(self._since) and now - self._since[up] >= delay
        if overdue or not self.target or not least <= self.target <= most:
            self.target, self._since = asked, {}
        return self.target
