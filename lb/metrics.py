"""Every metric series, declared once.

Names, labels and buckets are the interface to dashboards and alerts. Counters and histograms are
written as things happen; what can be read off the balancer's state (gauges) is read when Prometheus
asks, through the probes that `lb.app` sets. All labels come from closed sets, but for `replica`,
whose series are dropped `FORGET_SECONDS` after the replica was retired.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar, cast, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.metrics import MetricWrapperBase

from controller_client.errors import SyncFailure
from lb import __version__
from lb.errors import Outcome, RejectReason, RetryReason, UpstreamReason

Series = TypeVar("Series", bound=MetricWrapperBase)

PREFIX = "skyserve_lb_"
FORGET_SECONDS = 600.0

DURATION = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 180, 300, 450, 600, 900)
FIRST_BYTE = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
OVERHEAD = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)
CONNECT = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)

# What a method label may be: any other token of a client is "other", so that the set stays closed.
METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


@dataclass
class Gauges:
    """Where the values that are read at scrape time come from; `lb.app` sets them."""

    replicas: Callable[[], Mapping[str, int]] = dict
    replica_inflight: Callable[[], Mapping[str, int]] = dict
    pool_connections: Callable[[], Mapping[str, int]] = dict
    inflight: Callable[[], int] = int
    inflight_oldest_seconds: Callable[[], float] = float
    arrivals_pending: Callable[[], int] = int
    arrivals_dropped: Callable[[], Mapping[str, int]] = dict
    draining: Callable[[], bool] = bool
    certificate_not_after: Callable[[], float | None] = lambda: None
    now: Callable[[], float] = float


@dataclass
class _ReplicaCounts:
    """The request counts of one replica, and since when it is retired."""

    outcomes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    retired_at: float | None = None


class Metrics:
    """The registry of one balancer, never the global one."""

    def __init__(self, *, service: str, policy: str, mode: str = "standalone") -> None:
        self.registry = CollectorRegistry()
        self.gauges = Gauges()
        self._service = service
        self._replicas: dict[str, _ReplicaCounts] = {}
        self._children: dict[tuple[MetricWrapperBase, tuple[str, ...]], MetricWrapperBase] = {}

        info = self._gauge(
            "info", "Constant 1; the labels say what runs.", ("version", "python", "policy", "mode")
        )
        info.labels(service, __version__, platform.python_version(), policy, mode).set(1)
        self._requests = self._counter(
            "requests", "Finished client requests, by how they ended.", "outcome"
        )
        self._responses = self._counter(
            "responses",
            "Answers sent to clients, by status (499: the client left before the head).",
            "code",
            "method",
        )
        self._rejected = self._counter(
            "rejected_requests", "Requests that the balancer itself refused, by reason.", "reason"
        )
        self._duration = self._histogram(
            "request_duration_seconds",
            "Arrival of a request to the last byte of its answer.",
            DURATION,
            "outcome",
        )
        self._first_byte = self._histogram(
            "time_to_first_byte_seconds",
            "Arrival of a request to the first byte of its answer.",
            FIRST_BYTE,
            "outcome",
        )
        self._overhead = self._histogram(
            "overhead_seconds",
            "Own time from arrival to the first send to a replica; waits and connects excluded.",
            OVERHEAD,
        ).labels(service)
        self._received = self._counter(
            "received_bytes", "Bytes of request bodies that came from clients."
        ).labels(service)
        self._sent = self._counter(
            "sent_bytes", "Bytes of response bodies that went to clients."
        ).labels(service)
        self._disconnects = self._counter(
            "client_disconnects", "Clients that left before their answer was complete.", "phase"
        )
        self._retries = self._counter("retries", "Attempts after the first, by cause.", "reason")
        self._exhausted = self._counter(
            "retries_exhausted", "Requests that failed with no attempt left."
        ).labels(service)
        self._upstream_errors = self._counter(
            "upstream_errors", "Attempts that failed, by cause.", "reason"
        )
        self._connect = self._histogram(
            "upstream_connect_duration_seconds",
            "Time to open a connection to a replica.",
            CONNECT,
        ).labels(service)
        pool = self._counter(
            "pool_connections", "Connections taken for an attempt: opened or used again.", "result"
        )
        self._created, self._reused = (
            pool.labels(service, "created"),
            pool.labels(service, "reused"),
        )
        self._changes = self._counter(
            "replica_set_changes", "Changes of the set of replicas.", "change"
        )
        self._syncs = self._counter("sync", "Calls to the controller, by result.", "result")
        self._sync_duration = self._histogram(
            "sync_duration_seconds", "Duration of a call to the controller.", CONNECT
        ).labels(service)
        self._last_sync = self._gauge(
            "sync_last_success_timestamp_seconds",
            "Unix time of the last call that the controller answered; 0 before the first.",
        ).labels(service)
        self._loop_lag = self._histogram(
            "event_loop_lag_seconds", "How late a timer of the event loop fires.", OVERHEAD
        ).labels(service)
        self._start_closed_sets()
        self.registry.register(_StateCollector(self))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, ("service", *labels), registry=self.registry)

    def _gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(PREFIX + name, text, ("service", *labels), registry=self.registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        return Histogram(
            PREFIX + name, text, ("service", *labels), registry=self.registry, buckets=buckets
        )

    def _child(self, metric: Series, *labels: str) -> Series:
        """The series of these labels: `labels` looks it up under a lock, in 1 us; this in a tenth."""
        child = self._children.get((metric, labels))
        if child is None:
            child = self._children[metric, labels] = metric.labels(self._service, *labels)
        return cast("Series", child)

    def _start_closed_sets(self) -> None:
        """Let every labelled counter start at 0: a rate over a series that appears at 1 misses the 1."""
        for outcome in OUTCOMES:
            self._requests.labels(self._service, outcome)
        for counter, values in (
            (self._rejected, get_args(RejectReason)),
            (self._retries, get_args(RetryReason)),
            (self._upstream_errors, get_args(UpstreamReason)),
            (self._disconnects, ("request_body", "before_head", "streaming")),
            (self._syncs, ("ok", "empty", *get_args(SyncFailure))),
            (
                self._changes,
                ("added", "removed", "held", "released", "revived", "ejected", "restored"),
            ),
        ):
            for value in values:
                counter.labels(self._service, value)

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(_WithoutCreated(self.registry))

    # --- one line per thing that can happen -----------------------------------------------------

    def request_finished(
        self, outcome: str, status: int, method: str, total: float, first_byte: float | None
    ) -> None:
        label = method if method in METHODS else "other"
        self._child(self._requests, outcome).inc()
        self._child(self._responses, str(status), label).inc()
        self._child(self._duration, outcome).observe(total)
        if first_byte is not None:
            self._child(self._first_byte, outcome).observe(first_byte)

    def bodies(self, received: int, sent: int) -> None:
        self._received.inc(received)
        self._sent.inc(sent)

    def overhead(self, seconds: float) -> None:
        self._overhead.observe(seconds)

    def rejected(self, reason: RejectReason) -> None:
        self._rejected.labels(self._service, reason).inc()

    def client_disconnected(self, phase: str) -> None:
        self._disconnects.labels(self._service, phase).inc()

    def retried(self, reason: RetryReason) -> None:
        self._retries.labels(self._service, reason).inc()

    def retries_exhausted(self) -> None:
        self._exhausted.inc()

    def upstream_failed(self, reason: UpstreamReason) -> None:
        self._upstream_errors.labels(self._service, reason).inc()

    def connection_created(self, seconds: float) -> None:
        self._created.inc()
        self._connect.observe(seconds)

    def connection_reused(self) -> None:
        self._reused.inc()

    def replica_set_changed(self, change: str, count: int = 1) -> None:
        self._changes.labels(self._service, change).inc(count)

    def synced(self, result: str, seconds: float, unix_time: float | None) -> None:
        """A call to the controller ended; `unix_time` is now if it was answered."""
        self._syncs.labels(self._service, result).inc()
        self._sync_duration.observe(seconds)
        if unix_time is not None:
            self._last_sync.set(unix_time)

    def loop_lag(self, seconds: float) -> None:
        self._loop_lag.observe(seconds)

    def replica_request(self, replica: str, outcome: str) -> None:
        counts = self._replicas.get(replica)
        if counts is None:
            counts = self._replicas[replica] = _ReplicaCounts()
        counts.outcomes[outcome] += 1

    def replica_added(self, replica: str) -> None:
        self._replicas.setdefault(replica, _ReplicaCounts()).retired_at = None

    def replica_retired(self, replica: str, now: float) -> None:
        if replica in self._replicas:
            self._replicas[replica].retired_at = now

    def live_replicas(self, now: float) -> Iterator[tuple[str, Mapping[str, int]]]:
        """The counts of each replica; those that have left long enough ago are forgotten."""
        for name, counts in list(self._replicas.items()):
            if counts.retired_at is not None and now - counts.retired_at >= FORGET_SECONDS:
                del self._replicas[name]
            else:
                yield name, counts.outcomes

    # --- what has been counted, for the status page ---------------------------------------------

    def outcomes(self) -> dict[str, int]:
        """Finished requests since the start, by how they ended."""
        (family,) = self._requests.collect()
        return {
            sample.labels["outcome"]: int(sample.value)
            for sample in family.samples
            if sample.name.endswith("_total")
        }

    def first_byte_counts(self) -> list[int]:
        """Answers of replicas since the start, by bucket of `FIRST_BYTE`, and those beyond the last."""
        return _bucket_counts(self._first_byte, FIRST_BYTE)

    def duration_counts(self) -> list[int]:
        """The same by bucket of `DURATION`."""
        return _bucket_counts(self._duration, DURATION)

    @property
    def service(self) -> str:
        return self._service


def _bucket_counts(histogram: Histogram, edges: Sequence[float]) -> list[int]:
    """What fell into each bucket, over all outcomes but our own refusals, which are quick."""
    counts = [0] * (len(edges) + 1)
    (family,) = histogram.collect()
    of_outcome: dict[str, list[int]] = {}
    for sample in family.samples:
        if sample.name.endswith("_bucket") and sample.labels["outcome"] != "lb_error":
            of_outcome.setdefault(sample.labels["outcome"], [0]).append(int(sample.value))
    for upto in of_outcome.values():
        counts = [
            count + new - old for count, (old, new) in zip(counts, pairwise(upto), strict=True)
        ]
    return counts


class _WithoutCreated:
    """The registry without the `_created` series, which double the text and tell nothing.

    prometheus_client can leave them out itself, but only for the whole process.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for metric in self._registry.collect():
            metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
            yield metric


class _StateCollector:
    """The series that are read off the balancer's state when Prometheus asks."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        gauges = self._metrics.gauges
        yield self._family(
            "replicas", "Replicas, by state.", ("state",), _single(gauges.replicas())
        )
        yield self._family(
            "replica_inflight_requests",
            "Requests that a replica is working on.",
            ("replica",),
            _single(gauges.replica_inflight()),
        )
        yield self._family(
            "pool_connections",
            "Open connections to replicas, by state.",
            ("state",),
            _single(gauges.pool_connections()),
        )
        yield self._family(
            "inflight_requests", "Client requests in flight.", (), {(): gauges.inflight()}
        )
        yield self._family(
            "inflight_oldest_seconds",
            "Age of the oldest client request in flight; 0 without one.",
            (),
            {(): gauges.inflight_oldest_seconds()},
        )
        yield self._family(
            "arrivals_pending",
            "Arrivals not yet reported to the controller.",
            (),
            {(): gauges.arrivals_pending()},
        )
        yield self._family("draining", "1 while shutting down.", (), {(): int(gauges.draining())})
        not_after = gauges.certificate_not_after()
        if not_after is not None:
            yield self._family(
                "tls_certificate_not_after_timestamp_seconds",
                "Unix time at which the certificate of the data port expires; absent without TLS.",
                (),
                {(): not_after},
            )
        yield self._family(
            "arrivals_dropped",
            "Arrivals that were given up before they could be reported.",
            ("reason",),
            _single(gauges.arrivals_dropped()),
            CounterMetricFamily,
        )
        yield self._family(
            "replica_requests",
            "Finished requests of each replica, by how they ended.",
            ("replica", "outcome"),
            {
                (replica, outcome): count
                for replica, outcomes in self._metrics.live_replicas(gauges.now())
                for outcome, count in outcomes.items()
            },
            CounterMetricFamily,
        )

    def _family(
        self,
        name: str,
        text: str,
        labels: tuple[str, ...],
        values: Mapping[tuple[str, ...], float],
        kind: type[GaugeMetricFamily | CounterMetricFamily] = GaugeMetricFamily,
    ) -> Metric:
        family = kind(PREFIX + name, text, labels=("service", *labels))
        for key, value in values.items():
            family.add_metric((self._metrics.service, *key), value)
        return family


def _single(values: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    return {(key,): value for key, value in values.items()}
