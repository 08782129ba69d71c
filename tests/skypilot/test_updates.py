"""Count-only updates under load: both balancers beside each other, on a stock and a fixed controller.

Both controllers run at the same time, each with its own replicas. The updates are placed where the
stock controller's gap meets a sync of the stock balancer.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import experiment
import pytest
from experiment import Outcome
from service import Service

UPDATES = 6
# The sync in the gap comes a second after the update, the one that brings the list back 5 s later.
SPACING = 6.5


@pytest.fixture(scope="module")
def services(wheel_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Service]:
    homes = tmp_path_factory.mktemp("homes")
    return {
        name: Service(wheel_python, homes / name, hook=hook)
        for name, hook in (("stock", "off"), ("fixed", "fix"))
    }


@pytest.fixture(scope="module")
def outcomes(services: dict[str, Service], sky_version: str) -> dict[str, Outcome]:
    def run(name: str) -> Outcome:
        with services[name].run(replicas=2) as service:
            return experiment.run(
                service,
                skypilot=sky_version,
                controller=name,
                balancers=("stock", "ours"),
                updates=UPDATES,
                spacing=SPACING,
                # Idle connections are kept, so that a closed one was closed because of the list.
                our_options=("--upstream-keepalive", "120s"),
            )

    with ThreadPoolExecutor() as threads:
        return dict(zip(services, threads.map(run, services), strict=True))


def test_on_the_stock_controller_stock_clients_get_503s_and_hang(
    outcomes: dict[str, Outcome], services: dict[str, Service]
) -> None:
    row = outcomes["stock"].rows["stock"]
    assert row.stale_samples > 0
    assert row.empty_syncs > 0
    assert row.http_503 > 0
    assert row.hung > 0
    assert row.longest_outage > services["stock"].sync_interval * 0.9


def test_on_the_stock_controller_our_clients_notice_nothing(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["stock"]
    row = outcome.rows["ours"]
    assert row.requests > experiment.RATE * SPACING * UPDATES
    assert (row.http_503, row.hung, row.other_faults) == (0, 0, 0)
    assert row.ok == row.requests
    # Ours met the gap as well, and kept what it had.
    assert value(outcome.metrics, 'skyserve_lb_sync_total{result="empty"') > 0


def test_through_the_empty_list_our_balancer_closes_no_connection(
    outcomes: dict[str, Outcome], services: dict[str, Service]
) -> None:
    outcome, service = outcomes["stock"], services["stock"]
    assert closed_while_listed(outcome, service, "stock") > 0
    assert closed_while_listed(outcome, service, "ours") == 0


def test_on_the_fixed_controller_nobody_notices_anything(outcomes: dict[str, Outcome]) -> None:
    for row in outcomes["fixed"].rows.values():
        assert (row.stale_samples, row.empty_syncs, row.reverted_relabels) == (0, 0, 0)
        assert (row.http_503, row.hung, row.other_faults) == (0, 0, 0)
        assert row.ok == row.requests > experiment.RATE * SPACING * UPDATES
        assert row.slowest_update < 1.0


def test_the_fixed_controller_launches_a_replica_for_each_growth_and_no_other(
    outcomes: dict[str, Outcome],
) -> None:
    assert outcomes["fixed"].rows["ours"].replicas_launched == 2 + UPDATES // 2


def closed_while_listed(outcome: Outcome, service: Service, through: str) -> int:
    """Connections that a balancer closed on replicas which were listed again afterwards."""
    return sum(
        closed_at < service.last_listed(url)
        for url, counted in outcome.replica_counts.items()
        for closed_at, whose in counted["closed"]
        if whose == through
    )


def value(metrics: str, series: str) -> float:
    """The value of the first series that starts so."""
    return next(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(series))
