"""SkyPilot's own load balancer behind our controller of services on one machine.

The other way round, our balancer behind SkyPilot's controller, is what ``test_updates.py`` does.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from service import Process

from controller_client.embedded.places import free_port
from tests.system.embedded import NAME, Load, machine

READY = "READY"
SCALE = 40.0  # a sync each half second


def test_the_stock_balancer_serves_through_an_update(stock_python: Path, tmp_path: Path) -> None:
    port = free_port()
    with machine(tmp_path) as made:
        made.let(1, 2, end=False)
        made.up(made.write(replicas=2))
        service = made.wait_for({1: (1, READY), 2: (1, READY)})
        script = Path(__file__).with_name("stock_balancer.py")
        words = ["--controller-url", service["controller"], "--port", str(port)]
        environ = {**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
        stock = Process(
            [str(stock_python), str(script), *words, "--scale", str(SCALE)],
            environ,
            tmp_path / "stock.log",
        )
        try:
            wait_listed(stock, service, 1, 2)
            with Load(f"http://127.0.0.1:{port}") as load:
                load.wait_for()
                made.let(3, 4)
                made.run("update", NAME, str(made.write(replicas=2, text="two")))
                going = dict.fromkeys((1, 2), (1, "SHUTTING_DOWN"))
                service = made.wait_for({**going, 3: (2, READY), 4: (2, READY)})
                wait_listed(stock, service, 3, 4)
                made.open("end-1", "end-2")
                made.wait_for({3: (2, READY), 4: (2, READY)})
                assert set(load.wait_for()) == {"200 two"}
            assert set(load.outcomes()) == {"200 one", "200 two"}
        finally:
            stock.stop()


def wait_listed(stock: Process, service: dict[str, Any], *replica_ids: int) -> None:
    urls = {each["endpoint"] for each in service["replicas"] if each["id"] in replica_ids}
    stock.wait_for(
        lambda: any(set(each["urls"]) == urls for each in stock.named("synced")[-1:]), "list"
    )
