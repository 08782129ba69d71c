"""SkyPilot's own rules of versions, asked over pipes: a line of JSON is a service and what befalls it.

Run with SkyPilot's Python. Its functions are called as they are; the database below them is a
namespace, so that thousands of services take seconds.
"""

from __future__ import annotations

import json
import logging
import sys
from types import SimpleNamespace
from typing import Any

import child
from sky.serve import replica_managers, serve_state, serve_utils
from sky.utils import common_utils

RUNNING, DONE = common_utils.ProcessStatus.RUNNING, common_utils.ProcessStatus.SUCCEEDED
PROPERTIES: dict[str, dict[str, Any]] = {
    "PROVISIONING": {"sky_launch_status": RUNNING},
    "STARTING": {},
    "READY": {"service_ready_now": True, "first_ready_time": 1.0},
    "NOT_READY": {"first_ready_time": 1.0},
    "SHUTTING_DOWN": {"sky_down_status": RUNNING},
    "FAILED": {"sky_down_status": DONE, "user_app_failed": True},
    "FAILED_INITIAL_DELAY": {"sky_down_status": DONE, "first_ready_time": -1.0},
}


class Database:
    """What the rules ask of ``serve_state``, for one service."""

    def __init__(self) -> None:
        self.tasks: dict[int, str] = {}
        self.least: dict[int, int] = {}
        self.replicas: dict[int, Any] = {}
        self.record: dict[str, Any] = {"status": None, "active_versions": []}

    def install(self) -> None:
        serve_state.get_service_from_name = lambda name: self.record
        serve_state.set_service_status_and_active_versions = self.set_active
        serve_state.get_replica_infos = lambda name: list(self.replicas.values())
        serve_state.add_or_update_replica = lambda name, replica_id, info: None
        serve_state.get_yaml_content = lambda name, version: self.tasks[version]
        serve_state.get_spec = lambda name, version: SimpleNamespace(
            min_replicas=self.least[version]
        )

    def set_active(self, name: str, status: Any, active_versions: list[int]) -> None:
        self.record.update(status=status, active_versions=active_versions)

    def add_version(self, version: int, task: dict[str, Any]) -> None:
        self.tasks[version] = json.dumps(task)
        self.least[version] = task["service"]["replica_policy"]["min_replicas"]


def play(service: dict[str, Any]) -> list[dict[str, Any]]:
    """What SkyPilot makes of each step."""
    database = Database()
    database.install()
    database.add_version(1, service["task"])
    manager = SimpleNamespace(latest_version=1, _service_name="svc", _update_mode=None)
    mode = serve_utils.UpdateMode.ROLLING
    seen = []
    for step in service["steps"]:
        if "task" in step:
            database.add_version(step["version"], step["task"])
            mode = serve_utils.UpdateMode(step["mode"])
            replica_managers.SkyPilotReplicaManager.update_version(
                manager, step["version"], None, mode
            )
        for replica_id, status in step.get("statuses", {}).items():
            set_status(database, manager.latest_version, int(replica_id), status)
        infos = list(database.replicas.values())
        serve_utils.set_service_status_and_active_versions_from_replica("svc", infos, mode)
        statuses = [info.status for info in infos]
        seen.append(
            {
                "active": database.record["active_versions"],
                "enough": serve_utils.get_latest_version_with_min_replicas("svc", infos),
                "status": serve_state.ServiceStatus.from_replica_statuses(statuses).value,
                "versions": {info.replica_id: info.version for info in infos},
            }
        )
    return seen


def set_status(database: Database, latest: int, replica_id: int, status: str) -> None:
    """Give a replica a status; a new one is of the latest version."""
    info = database.replicas.get(replica_id) or replica_managers.ReplicaInfo(
        replica_id, f"svc-{replica_id}", "8080", False, None, latest, None
    )
    info.status_property = replica_managers.ReplicaStatusProperty(
        **{"sky_launch_status": DONE, **PROPERTIES[status]}
    )
    assert info.status.value == status
    database.replicas[replica_id] = info


def main() -> None:
    logging.disable(logging.ERROR)
    for line in sys.stdin:
        child.say("played", seen=play(json.loads(line)))


if __name__ == "__main__":
    main()
