"""The cloud of the tests: replica "clusters" are processes of this machine.

Imported inside SkyPilot's environment. It replaces what would reach a cloud and nothing else, and
divides SkyPilot's intervals by a time scale. Prober, autoscaler, ``update_version``, database and
HTTP API stay SkyPilot's own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sky import global_user_state
from sky.serve import constants, replica_managers, serve_state
from sky.serve.service_spec import SkyServiceSpec
from sky.utils import controller_utils

Say = Callable[..., None]


class LocalCloud:
    """Launches and terminates replica processes; tells ``say`` of each."""

    def __init__(self, health_seconds: float, say: Say) -> None:
        self._health_seconds = health_seconds
        self._say = say
        self._lock = threading.Lock()
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._urls: dict[str, str] = {}

    def install(self) -> None:
        """Put this cloud in the place of the real one."""
        cloud = self
        replica_managers.launch_cluster = self.launch_cluster
        replica_managers.terminate_cluster = self.terminate_cluster
        replica_managers.ReplicaInfo.url = property(lambda info: cloud.url(info.cluster_name))
        replica_managers.ReplicaInfo.handle = lambda info, cluster_record=None: None
        manager = replica_managers.SkyPilotReplicaManager
        manager._fetch_job_status = lambda self: None
        manager._handle_preemption = lambda self, info: False
        controller_utils.can_provision = lambda pool: True
        controller_utils.can_terminate = lambda pool: True
        # Asked before a termination: without it no cluster would ever be ended.
        global_user_state.cluster_with_name_exists = lambda name: cloud.url(name) is not None

    def url(self, cluster_name: str) -> str | None:
        with self._lock:
            return self._urls.get(cluster_name)

    def launch_cluster(
        self, replica_id: int, yaml_content: str, cluster_name: str, *_: Any, **__: Any
    ) -> None:
        """Stands for ``replica_managers.launch_cluster``: start a local replica process."""
        script = Path(__file__).with_name("replica.py")
        process = subprocess.Popen(
            (
                *(sys.executable, str(script), "--replica-id", str(replica_id)),
                *("--health-seconds", str(self._health_seconds)),
            ),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        url = f"http://127.0.0.1:{json.loads(process.stdout.readline())['port']}"
        with self._lock:
            self._processes[cluster_name] = process
            self._urls[cluster_name] = url
        self._say("launched", replica=replica_id, url=url)

    def terminate_cluster(
        self, cluster_name: str, log_file: str, replica_drain_delay_seconds: float = 0, **_: Any
    ) -> None:
        """Stands for ``replica_managers.terminate_cluster``: end the process after the drain."""
        self._say("draining", cluster=cluster_name)
        time.sleep(replica_drain_delay_seconds)
        self.end(cluster_name)

    def end(self, cluster_name: str) -> None:
        with self._lock:
            process = self._processes.pop(cluster_name, None)
            url = self._urls.pop(cluster_name, None)
        if process is not None:
            counts = _counts(url)
            process.kill()
            process.wait()
            self._say("terminated", cluster=cluster_name, url=url, counts=counts)

    def end_all(self) -> None:
        for name in list(self._processes):
            self.end(name)


def _counts(url: str | None) -> Any:
    """What the replica counted, read at its end, since it dies with the process."""
    with urllib.request.urlopen(f"{url}/stats", timeout=5) as answer:
        return json.load(answer)


def divide_intervals(scale: float) -> None:
    """Divide SkyPilot's intervals by ``scale``. The windows that a user sets are left alone."""
    for module, names in {
        constants: (
            "ENDPOINT_PROBE_INTERVAL_SECONDS",
            "DEFAULT_ENDPOINT_PROBE_INTERVAL_SECONDS",
            "LB_CONTROLLER_SYNC_INTERVAL_SECONDS",
            "AUTOSCALER_DEFAULT_DECISION_INTERVAL_SECONDS",
            "AUTOSCALER_NO_REPLICA_DECISION_INTERVAL_SECONDS",
            "AUTOSCALER_QPS_WINDOW_SIZE_SECONDS",
        ),
        replica_managers: ("_DEFAULT_DRAIN_SECONDS",),
    }.items():
        for name in names:
            if hasattr(module, name):
                setattr(module, name, getattr(module, name) / scale)
    # How soon a finished launch is noticed: of no weight here, and it is most of a test's wait.
    replica_managers._PROCESS_POOL_REFRESH_INTERVAL = 0.5


def add_service(name: str, yaml_content: str) -> Any:
    """Write the service and its version 1 to the database, as ``sky serve up`` does."""
    spec = SkyServiceSpec.from_yaml_str(yaml_content)
    serve_state.add_service(
        name,
        controller_job_id=1,
        policy=spec.autoscaling_policy_str(),
        requested_resources_str="-",
        load_balancing_policy=spec.load_balancing_policy,
        status=serve_state.ServiceStatus.CONTROLLER_INIT,
        tls_encrypted=False,
        pool=False,
        controller_pid=1,
        entrypoint="",
    )
    serve_state.add_or_update_version(name, 1, spec, yaml_content)
    return spec
