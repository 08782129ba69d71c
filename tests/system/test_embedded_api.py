"""SkyServe on one machine: its controller's HTTP API, in the shapes that SkyPilot gives it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.system.embedded import machine

READY = "READY"


def call(url: str, body: Any = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_the_api_has_skypilots_shapes(tmp_path: Path) -> None:
    with machine(tmp_path) as made:
        made.let(1, 2, 3)
        made.up(made.write(replica_policy={"min_replicas": 2, "max_replicas": 5}))
        service = made.wait_for({1: (1, READY), 2: (1, READY)})
        controller = service["controller"]
        info = {"min_replicas": 2, "max_replicas": 5, "target_num_replicas": 2}
        assert call(f"{controller}/autoscaler/info") == (200, info)

        sync = f"{controller}/controller/load_balancer_sync"
        ready = {each["endpoint"]: {"gpu_type": "unknown"} for each in service["replicas"]}
        report = {"request_aggregator": {"timestamps": [1.0, 2.0]}}
        assert call(sync, report) == (200, {"replica_info": ready})
        assert call(sync, {}) == (200, {"replica_info": ready})
        assert call(sync, [])[0] == 500

        update = f"{controller}/controller/update_service"
        message = {"message": "Error: version is not specified."}
        assert call(update, {"mode": "rolling"}) == (400, message)
        assert call(update, {"version": 9})[0] == 500
        assert call(update, {"version": 1, "mode": "sideways"})[0] == 500
        assert call(update, {"version": 1}) == (200, {"message": "Success"})

        terminate = f"{controller}/controller/terminate_replica"
        assert call(terminate, {"replica_id": 9, "purge": False})[0] == 500
        assert call(terminate, {"replica_id": 2, "purge": False})[0] == 200
        assert call(terminate, {"replica_id": 1, "purge": False})[0] == 200
        made.wait_for({3: (1, READY), 4: (1, "PROVISIONING")})


def test_a_replica_that_has_failed_is_forgotten_on_demand_alone(tmp_path: Path) -> None:
    with machine(tmp_path) as made:
        made.let(1)
        made.up(made.write(run="exit 3 # {port}"))
        service = made.wait_for({1: (1, "FAILED")})
        terminate = f"{service['controller']}/controller/terminate_replica"
        code, answer = call(terminate, {"replica_id": 1, "purge": False})
        assert code == 409
        assert "FAILED" in answer["message"]
        assert made.states() == {1: (1, "FAILED")}
        assert call(terminate, {"replica_id": 1, "purge": True})[0] == 200
        made.wait_for({2: (1, "PROVISIONING")})
