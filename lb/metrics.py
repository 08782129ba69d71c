"""Every metric series, declared once.

Names, labels and buckets are the interface to dashboards and alerts. Counters and histograms are
plain numbers, counted as things happen (a tenth of what prometheus_client's own cost, which are made
for threads) and made into its families when Prometheus asks; what can be read off the balancer's
state (gauges) is read then, too, through the probes that `lb.app` sets. All labels come from closed
sets, but for `replica`, whose series are dropped `FORGET_SECONDS` after the replica was retired.
"""

from __future__ import annotations

import platform
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import accumulate, compress
from typing import Any, TypeVar, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from controller_client.errors import SyncFailure
from lb import __version__
from lb.errors import Outcome, RejectReason, RetryReason, UpstreamReason

PREFIX = "skyserve_lb_"
FORGET_SECONDS = 600.0

DURATION = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 180, 300, 450, 600, 900)
FIRST_BYTE = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
OVERHEAD = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)
CONNECT = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)

# What a method label may be: any other token of a client is "other", so that the set stays closed.
METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

# Every value of a labelled counter, so that each starts at 0: a rate over a series that appears at 1
# misses the 1. `responses` has too many to begin with.
CHANGES = ("added", "removed", "held", "released", "revived", "ejected", "restored")
PHASES = ("request_body", "before_head", "streaming")
SYNC_RESULTS = ("ok", "empty", *get_args(SyncFailure))


class Histogram:
    """How many values fell into each bucket, and their sum; `counts` has one more for those beyond."""

    __slots__ = ("counts", "edges", "sum")

    def __init__(self, edges: tuple[float, ...]) -> None:
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.edges, value)] += 1
        self.sum += value

    def add(self, other: Histogram) -> None:
        """Count what was counted there, by the same edges."""
        self.counts = [one + two for one, two in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum

    def observe_all(self, values: list[float]) -> None:
        """Many at once: an edge is looked for among the values, rather than each value among the edges."""
        values.sort()
        below = 0
        for index, edge in enumerate(self.edges):
            upto = bisect_right(values, edge, below)
            self.counts[index] += upto - below
            below = upto
        self.counts[-1] += len(values) - below
        self.sum += sum(values)


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


def _zeros(names: Iterable[str]) -> Callable[[], Counter[str]]:
    return lambda: Counter(dict.fromkeys(names, 0))


def _by_outcome(edges: tuple[float, ...]) -> Callable[[], dict[str, Histogram]]:
    return lambda: {each: Histogram(edges) for each in OUTCOMES}


@dataclass
class Numbers:
    """What is counted where requests are carried; the numbers of several processes add up.

    `replicas` has the requests of each known replica, by outcome.
    """

    requests: Counter[str] = field(default_factory=_zeros(OUTCOMES))
    responses: Counter[tuple[int, str]] = field(default_factory=Counter)
    rejections: Counter[str] = field(default_factory=_zeros(get_args(RejectReason)))
    durations: dict[str, Histogram] = field(default_factory=_by_outcome(DURATION))
    first_bytes: dict[str, Histogram] = field(default_factory=_by_outcome(FIRST_BYTE))
    overheads: Histogram = field(default_factory=lambda: Histogram(OVERHEAD))
    received_bytes: int = 0
    sent_bytes: int = 0
    disconnects: Counter[str] = field(default_factory=_zeros(PHASES))
    retries: Counter[str] = field(default_factory=_zeros(get_args(RetryReason)))
    exhausted: int = 0
    upstream_errors: Counter[str] = field(default_factory=_zeros(get_args(UpstreamReason)))
    connects: Histogram = field(default_factory=lambda: Histogram(CONNECT))
    connections: Counter[str] = field(default_factory=_zeros(("created", "reused")))
    changes: Counter[str] = field(default_factory=_zeros(CHANGES))
    loop_lags: Histogram = field(default_factory=lambda: Histogram(OVERHEAD))
    replicas: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, other: Numbers) -> None:
        """Count what was counted there; but for replicas that are unknown here."""
        for each in fields(self):
            setattr(self, each.name, _sum(getattr(self, each.name), getattr(other, each.name)))


def _sum(mine: Any, other: Any) -> Any:
    if isinstance(mine, int):
        return mine + other
    if isinstance(mine, Histogram):
        mine.add(other)
    elif isinstance(mine, Counter):
        mine.update(other)
    else:
        for name in mine.keys() & other.keys():
            _sum(mine[name], other[name])
    return mine


# One finished request: outcome, status, method, seconds from arrival to the last byte, to the first
# byte and to the first send without waits (None where it did not come to that), bytes of the bodies
# from and to the client, replica ("" for none).
Finished = tuple[str, int, str, float, float | None, float | None, int, int, str]


class Metrics:
    """The numbers of one balancer, and the registry that tells them: never the global one.

    Finished requests are only noted, and counted many at a time: when somebody reads, and by `fold`.
    """

    def __init__(self, *, service: str, policy: str, mode: str = "standalone") -> None:
        self.service = service
        self.about = (__version__, platform.python_version(), policy, mode)
        self.gauges = Gauges()
        self.numbers = Numbers()
        self.syncs = Counter[str](dict.fromkeys(SYNC_RESULTS, 0))
        self.sync_durations = Histogram(CONNECT)
        self.last_sync = 0.0
        self._retired: dict[str, float] = {}  # replicas, and since when
        self._finished: list[Finished] = []
        self.registry = CollectorRegistry()
        self.registry.register(_Collector(self))

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)

    # --- one line per thing that can happen -----------------------------------------------------

    def request_finished(self, finished: Finished) -> None:
        self._finished.append(finished)

    def fold(self) -> None:
        """Count the requests that have finished since the last time."""
        if not self._finished:
            return
        finished, self._finished = self._finished, []
        outcomes, statuses, methods, totals, firsts, owns, received, sent, replicas = zip(
            *finished, strict=True
        )
        numbers = self.numbers
        numbers.requests.update(outcomes)
        numbers.responses.update(zip(statuses, map(_label_of, methods), strict=True))
        numbers.received_bytes += sum(received)
        numbers.sent_bytes += sum(sent)
        numbers.overheads.observe_all([own for own in owns if own is not None])
        for outcome in set(outcomes):
            mine = [each == outcome for each in outcomes]
            numbers.durations[outcome].observe_all(list(compress(totals, mine)))
            first_bytes = [first for first in compress(firsts, mine) if first is not None]
            numbers.first_bytes[outcome].observe_all(first_bytes)
        for (replica, outcome), count in Counter(zip(replicas, outcomes, strict=True)).items():
            if replica in numbers.replicas:  # else none was chosen, or it was forgotten meanwhile
                numbers.replicas[replica][outcome] += count

    def take(self) -> Numbers:
        """What was counted since the last time, for somebody else to add; counting begins anew."""
        self.fold()
        taken, self.numbers = self.numbers, Numbers()
        self.numbers.replicas = {name: _zeros(OUTCOMES)() for name in taken.replicas}
        return taken

    def rejected(self, reason: RejectReason) -> None:
        self.numbers.rejections[reason] += 1

    def client_disconnected(self, phase: str) -> None:
        self.numbers.disconnects[phase] += 1

    def retried(self, reason: RetryReason) -> None:
        self.numbers.retries[reason] += 1

    def retries_exhausted(self) -> None:
        self.numbers.exhausted += 1

    def upstream_failed(self, reason: UpstreamReason) -> None:
        self.numbers.upstream_errors[reason] += 1

    def connection_created(self, seconds: float) -> None:
        self.numbers.connections["created"] += 1
        self.numbers.connects.observe(seconds)

    def connection_reused(self) -> None:
        self.numbers.connections["reused"] += 1

    def replica_set_changed(self, change: str, count: int = 1) -> None:
        self.numbers.changes[change] += count

    def synced(self, result: str, seconds: float, unix_time: float | None) -> None:
        """A call to the controller ended; `unix_time` is now if it was answered."""
        self.syncs[result] += 1
        self.sync_durations.observe(seconds)
        if unix_time is not None:
            self.last_sync = unix_time

    def loop_lag(self, seconds: float) -> None:
        self.numbers.loop_lags.observe(seconds)

    def replica_added(self, replica: str) -> None:
        self.numbers.replicas.setdefault(replica, _zeros(OUTCOMES)())
        self._retired.pop(replica, None)

    def replica_retired(self, replica: str, now: float) -> None:
        self._retired[replica] = now

    def live_replicas(self, now: float) -> Mapping[str, Mapping[str, int]]:
        """The counts of each replica; those that have left long enough ago are forgotten."""
        self.fold()
        for name, since in list(self._retired.items()):
            if now - since >= FORGET_SECONDS:
                del self._retired[name]
                self.numbers.replicas.pop(name, None)
        return self.numbers.replicas

    # --- what has been counted, for the status page ---------------------------------------------

    def outcomes(self) -> dict[str, int]:
        """Finished requests since the start, by how they ended."""
        self.fold()
        return dict(self.numbers.requests)

    def first_byte_counts(self) -> list[int]:
        """Answers of replicas since the start, by bucket of `FIRST_BYTE`, and those beyond the last."""
        self.fold()
        return _of_replicas(self.numbers.first_bytes)

    def duration_counts(self) -> list[int]:
        """The same by bucket of `DURATION`."""
        self.fold()
        return _of_replicas(self.numbers.durations)


def _of_replicas(histograms: Mapping[str, Histogram]) -> list[int]:
    """What fell into each bucket, over all outcomes but our own refusals, which are quick."""
    counted = [each.counts for outcome, each in histograms.items() if outcome != "lb_error"]
    return [sum(counts) for counts in zip(*counted, strict=True)]


def _label_of(method: str) -> str:
    return method if method in METHODS else "other"


class _Collector:
    """All families, in the order of the page."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        self._metrics.fold()
        yield from self._requests()
        yield from self._attempts()
        yield from self._replicas()
        yield from self._control_plane()
        yield from self._process()

    def _requests(self) -> Iterator[Metric]:
        numbers, gauges = self._metrics.numbers, self._metrics.gauges
        yield self._counter(
            "requests",
            "Finished client requests, by how they ended.",
            ("outcome",),
            _single(numbers.requests),
        )
        yield self._counter(
            "responses",
            "Answers sent to clients, by status (499: the client left before the head).",
            ("code", "method"),
            {(str(code), method): n for (code, method), n in numbers.responses.items()},
        )
        yield self._counter(
            "rejected_requests",
            "Requests that the balancer itself refused, by reason.",
            ("reason",),
            _single(numbers.rejections),
        )
        yield self._histogram(
            "request_duration_seconds",
            "Arrival of a request to the last byte of its answer.",
            ("outcome",),
            _single(numbers.durations),
        )
        yield self._histogram(
            "time_to_first_byte_seconds",
            "Arrival of a request to the first byte of its answer.",
            ("outcome",),
            _single(numbers.first_bytes),
        )
        yield self._histogram(
            "overhead_seconds",
            "Own time from arrival to the first send to a replica; waits and connects excluded.",
            (),
            {(): numbers.overheads},
        )
        yield self._gauge(
            "inflight_requests", "Client requests in flight.", (), {(): gauges.inflight()}
        )
        yield self._gauge(
            "inflight_oldest_seconds",
            "Age of the oldest client request in flight; 0 without one.",
            (),
            {(): gauges.inflight_oldest_seconds()},
        )
        yield self._counter(
            "received_bytes",
            "Bytes of request bodies that came from clients.",
            (),
            {(): numbers.received_bytes},
        )
        yield self._counter(
            "sent_bytes",
            "Bytes of response bodies that went to clients.",
            (),
            {(): numbers.sent_bytes},
        )
        yield self._counter(
            "client_disconnects",
            "Clients that left before their answer was complete.",
            ("phase",),
            _single(numbers.disconnects),
        )

    def _attempts(self) -> Iterator[Metric]:
        numbers, gauges = self._metrics.numbers, self._metrics.gauges
        yield self._counter(
            "retries",
            "Attempts after the first, by cause.",
            ("reason",),
            _single(numbers.retries),
        )
        yield self._counter(
            "retries_exhausted",
            "Requests that failed with no attempt left.",
            (),
            {(): numbers.exhausted},
        )
        yield self._counter(
            "upstream_errors",
            "Attempts that failed, by cause.",
            ("reason",),
            _single(numbers.upstream_errors),
        )
        yield self._histogram(
            "upstream_connect_duration_seconds",
            "Time to open a connection to a replica.",
            (),
            {(): numbers.connects},
        )
        yield self._gauge(
            "pool_connections",
            "Open connections to replicas, by state.",
            ("state",),
            _single(gauges.pool_connections()),
        )
        yield self._counter(
            "pool_connections",
            "Connections taken for an attempt: opened or used again.",
            ("result",),
            _single(numbers.connections),
        )

    def _replicas(self) -> Iterator[Metric]:
        numbers, gauges = self._metrics.numbers, self._metrics.gauges
        yield self._gauge("replicas", "Replicas, by state.", ("state",), _single(gauges.replicas()))
        yield self._counter(
            "replica_set_changes",
            "Changes of the set of replicas.",
            ("change",),
            _single(numbers.changes),
        )
        yield self._gauge(
            "replica_inflight_requests",
            "Requests that a replica is working on.",
            ("replica",),
            _single(gauges.replica_inflight()),
        )
        yield self._counter(
            "replica_requests",
            "Finished requests of each replica, by how they ended.",
            ("replica", "outcome"),
            {
                (replica, outcome): count
                for replica, outcomes in self._metrics.live_replicas(gauges.now()).items()
                for outcome, count in outcomes.items()
            },
        )

    def _control_plane(self) -> Iterator[Metric]:
        metrics, gauges = self._metrics, self._metrics.gauges
        yield self._counter(
            "sync", "Calls to the controller, by result.", ("result",), _single(metrics.syncs)
        )
        yield self._histogram(
            "sync_duration_seconds",
            "Duration of a call to the controller.",
            (),
            {(): metrics.sync_durations},
        )
        yield self._gauge(
            "sync_last_success_timestamp_seconds",
            "Unix time of the last call that the controller answered; 0 before the first.",
            (),
            {(): metrics.last_sync},
        )
        yield self._gauge(
            "arrivals_pending",
            "Arrivals not yet reported to the controller.",
            (),
            {(): gauges.arrivals_pending()},
        )
        yield self._counter(
            "arrivals_dropped",
            "Arrivals that were given up before they could be reported.",
            ("reason",),
            _single(gauges.arrivals_dropped()),
        )

    def _process(self) -> Iterator[Metric]:
        numbers, gauges = self._metrics.numbers, self._metrics.gauges
        yield self._gauge(
            "info",
            "Constant 1; the labels say what runs.",
            ("version", "python", "policy", "mode"),
            {self._metrics.about: 1},
        )
        yield self._histogram(
            "event_loop_lag_seconds",
            "How late a timer of the event loop fires.",
            (),
            {(): numbers.loop_lags},
        )
        yield self._gauge("draining", "1 while shutting down.", (), {(): int(gauges.draining())})
        not_after = gauges.certificate_not_after()
        if not_after is not None:
            yield self._gauge(
                "tls_certificate_not_after_timestamp_seconds",
                "Unix time at which the certificate of the data port expires; absent without TLS.",
                (),
                {(): not_after},
            )

    def _counter(
        self, name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]
    ) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=("service", *labels))
        for key, value in values.items():
            family.add_metric((self._metrics.service, *key), value)
        return family

    def _gauge(
        self, name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]
    ) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=("service", *labels))
        for key, value in values.items():
            family.add_metric((self._metrics.service, *key), value)
        return family

    def _histogram(
        self,
        name: str,
        text: str,
        labels: tuple[str, ...],
        values: Mapping[tuple[str, ...], Histogram],
    ) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, text, labels=("service", *labels))
        for key, histogram in values.items():
            edges = [*map(floatToGoString, histogram.edges), "+Inf"]
            upto = accumulate(histogram.counts)
            family.add_metric(
                (self._metrics.service, *key), list(zip(edges, upto, strict=True)), histogram.sum
            )
        return family


Value = TypeVar("Value")


def _single(values: Mapping[str, Value]) -> dict[tuple[str, ...], Value]:
    return {(key,): value for key, value in values.items()}
