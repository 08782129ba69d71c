"""Selection policies: which of the candidate replicas gets the next request.

Pure. A policy is a key: the replica with the smallest one is chosen. It knows nothing of health;
the load lives on the replica (`Replica.load`), not here. Each key ends in the number of
the replica's last lease, so that ties rotate: without it the first replica of the list wins each tie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol


class Candidate(Protocol):
    """What a policy may look at."""

    @property
    def accelerator(self) -> str | None: ...
    @property
    def load(self) -> int: ...
    @property
    def last_lease(self) -> float: ...


TargetQps = Mapping[str, float] | float | None
SelectionPolicy = Callable[[Candidate], tuple[Any, ...]]


def round_robin(target_qps: TargetQps) -> SelectionPolicy:
    """The replica that has waited longest for its turn."""
    return lambda replica: (replica.last_lease,)


def least_load(target_qps: TargetQps) -> SelectionPolicy:
    """The replica with the fewest requests in flight."""
    return lambda replica: (replica.load, replica.last_lease)


def instance_aware_least_load(target_qps: TargetQps) -> SelectionPolicy:
    """The fewest requests in flight per unit of the accelerator's target QPS."""
    return lambda replica: (
        replica.load / target_of(replica.accelerator, target_qps),
        replica.last_lease,
    )


def target_of(accelerator: str | None, target_qps: TargetQps) -> float:
    """The target QPS of a replica with this accelerator, matched as SkyPilot does.

    The exact name wins; then the first target whose name before the colon is the accelerator
    (a target for `A100:1` serves an `A100`); else 1.0. A plain number is everyone's target.
    """
    if not isinstance(target_qps, Mapping):
        return target_qps or 1.0
    if accelerator is not None and accelerator in target_qps:
        return target_qps[accelerator]
    for name, target in target_qps.items():
        if name.split(":", 1)[0] == accelerator:
            return target
    return 1.0


POLICIES: Mapping[str, Callable[[TargetQps], SelectionPolicy]] = {
    "round_robin": round_robin,
    "least_load": least_load,
    "instance_aware_least_load": instance_aware_least_load,
}
