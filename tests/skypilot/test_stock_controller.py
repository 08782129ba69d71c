"""Our balancer in front of SkyPilot's controller as it ships, with the stock balancer beside it."""

from __future__ import annotations

import pytest
from load import Load
from service import Counts, Service, get_text

UPDATES = (3, 2, 3, 2, 3, 2)
RATE = 20.0
CLIENT_TIMEOUT = 10.0


def closed_while_listed(service: Service, counts: dict[str, Counts], through: str) -> int:
    """Connections that a balancer closed on replicas which were listed again afterwards."""
    return sum(
        closed_at < service.last_listed(url)
        for url, counted in counts.items()
        for closed_at, whose in counted["closed"]
        if whose == through
    )


@pytest.mark.timeout(300)
def test_count_only_updates_cost_our_clients_nothing_where_stock_ones_get_503s_and_hang(
    stock_service: Service,
) -> None:
    with (
        stock_service.run(replicas=2) as service,
        service.stock_balancer() as stock,
        # Idle connections are kept, so that a closed one was closed because of the list.
        service.our_balancer("--upstream-keepalive", "120s") as ours,
        Load(stock.url, "stock", RATE, CLIENT_TIMEOUT).run() as stock_load,
        Load(ours.url, "ours", RATE, CLIENT_TIMEOUT).run() as our_load,
    ):
        for replicas in UPDATES:
            service.update_in_the_gap(lambda: stock.process.named("synced")[-1]["t"], replicas)
            # The sync in the gap, and the next one, which brings the list back.
            empty = stock.process.wait_event("synced", service.updated_at)
            stock.process.wait_event("synced", empty["t"] + 0.1)
        counts = service.replica_counts()
        metrics = get_text(f"{ours.admin}/metrics")

    stock_outcomes = stock_load.outcomes()
    assert stock_outcomes["503"] > 0
    assert stock_outcomes["hung"] > 0
    assert stock_load.longest_outage() > service.sync_interval * 0.9

    assert set(our_load.outcomes()) == {"200"}
    assert len(our_load.requests) > 400
    # It did meet the gap, and kept what it had.
    assert sample(metrics, 'skyserve_lb_sync_total{result="empty"') > 0
    assert closed_while_listed(service, counts, "stock") > 0
    assert closed_while_listed(service, counts, "ours") == 0


def sample(metrics: str, series: str) -> float:
    """The value of the first series that starts so."""
    return next(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(series))
