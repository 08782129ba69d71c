"""The seed's experiment: steady load, count-only updates placed in the gap, and what came of it."""

from __future__ import annotations

import contextlib
import csv
import itertools
from dataclasses import asdict, dataclass
from pathlib import Path

from load import Load, Request
from service import Balancer, Counts, Event, Service, get_text

RATE = 20.0  # requests a second to each balancer
CLIENT_TIMEOUT = 60.0  # divided by the time scale, as all that follows


@dataclass(frozen=True)
class Row:
    """One balancer on one controller: a line of the seed's table. Times in seconds, as measured."""

    skypilot: str
    controller: str
    balancer: str
    updates: int
    slowest_update: float
    stale_samples: int  # READY replicas, none of them routable
    stale_seconds: float
    empty_syncs: int
    reverted_relabels: int
    longest_outage: float
    http_503: int
    hung: int
    other_faults: int
    ok: int
    requests: int
    replicas_launched: int

    @property
    def clean(self) -> bool:
        """Whether clients noticed nothing."""
        return self.ok == self.requests


@dataclass(frozen=True)
class Outcome:
    """What an experiment left: a row a balancer, and the raw records behind them."""

    rows: dict[str, Row]
    requests: dict[str, list[Request]]
    samples: list[Event]
    replica_counts: dict[str, Counts]  # by replica URL
    metrics: str  # of ours


def run(
    service: Service,
    *,
    skypilot: str,
    controller: str,
    balancers: tuple[str, ...],
    updates: int,
    spacing: float,
    our_options: tuple[str, ...] = (),
) -> Outcome:
    """Run it on a service that is up with two replicas. ``spacing`` lies between two updates."""
    client_timeout = CLIENT_TIMEOUT / service.scale
    slowest = 0.0
    with contextlib.ExitStack() as stack:
        running = {
            name: stack.enter_context(_start(service, name, our_options)) for name in balancers
        }
        sampler = stack.enter_context(service.sampler())
        loads = {
            name: stack.enter_context(Load(balancer.url, name, RATE, client_timeout).run())
            for name, balancer in running.items()
        }
        for number in range(updates):
            took = service.update_in_the_gap(
                lambda: _last_sync(service, running), replicas=2 if number % 2 else 3
            )
            slowest = max(slowest, took)
            service.controller.wait_until(service.updated_at + spacing)
        counts = service.replica_counts()
        metrics = get_text(f"{running['ours'].admin}/metrics") if "ours" in running else ""
    syncs = service.controller.named("sync", since=sampler.events[0]["t"])
    stale = [bool(e["ready"]) and not e["routable"] for e in sampler.events]
    shared = {
        "skypilot": skypilot,
        "controller": controller,
        "updates": updates,
        "slowest_update": round(slowest, 3),
        "stale_samples": sum(stale),
        "stale_seconds": round(_seconds(sampler.events, stale), 1),
        "empty_syncs": sum(not e["urls"] for e in syncs),
        "reverted_relabels": _reverted(sampler.events),
        "replicas_launched": len(service.controller.named("launched")),
    }
    rows = {name: Row(balancer=name, **shared, **_counted(load)) for name, load in loads.items()}
    requests = {name: load.requests for name, load in loads.items()}
    return Outcome(rows, requests, sampler.events, counts, metrics)


def _start(
    service: Service, name: str, our_options: tuple[str, ...]
) -> contextlib.AbstractContextManager[Balancer]:
    return service.stock_balancer() if name == "stock" else service.our_balancer(*our_options)


def _last_sync(service: Service, running: dict[str, Balancer]) -> float:
    """When the stock balancer synced last, or ours where it runs alone."""
    if "stock" in running:
        return float(running["stock"].process.named("synced")[-1]["t"])
    return float(service.controller.named("sync")[-1]["t"])


def _counted(load: Load) -> dict[str, float]:
    outcomes = load.outcomes()
    ok, http_503, hung = (outcomes[name] for name in ("200", "503", "hung"))
    return {
        "longest_outage": round(load.longest_outage(), 1),
        "http_503": http_503,
        "hung": hung,
        "ok": ok,
        "other_faults": len(load.requests) - ok - http_503 - hung,
        "requests": len(load.requests),
    }


def _seconds(samples: list[Event], chosen: list[bool]) -> float:
    times = [sample["t"] for sample in samples]
    return sum(
        later - earlier
        for (earlier, later), stale in zip(itertools.pairwise(times), chosen, strict=False)
        if stale
    )


def _reverted(samples: list[Event]) -> int:
    """How often a replica was seen with an older version than the sample before it showed."""
    return sum(
        version < before.get(replica, 0)
        for before, now in itertools.pairwise(dict(sample["replicas"]) for sample in samples)
        for replica, version in now.items()
    )


def write_csv(path: Path, records: list[Row] | list[Request]) -> None:
    """One line a record, with a head."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(asdict(records[0])))
        writer.writeheader()
        writer.writerows(asdict(record) for record in records)
