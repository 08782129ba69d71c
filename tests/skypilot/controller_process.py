"""SkyPilot's real serve controller over local replicas. Run with SkyPilot's Python.

Prints one JSON event a line: what the cloud did, each sync (with the list that it was answered),
the end of each prober pass. The observers only watch; they change no argument and no answer.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import child
import cloud
from sky.serve import controller, replica_managers, serve_utils


def observe(
    owner: Any, name: str, event: str, fields: Callable[..., dict[str, Any]] = lambda _: {}
) -> None:
    """Say ``event`` after each call of ``owner.name``, with ``fields(result)``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def observed(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        child.say(event, **fields(result))
        return result

    setattr(owner, name, observed)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--service-name", required=True)
    parser.add_argument("--task-yaml", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--health-seconds", type=float, required=True)
    parser.add_argument("--scale", type=float, required=True)
    options = parser.parse_args()

    cloud.divide_intervals(options.scale)
    local = cloud.LocalCloud(options.health_seconds, child.say)
    local.install()
    observe(
        *(replica_managers.SkyPilotReplicaManager, "get_active_replica_urls", "sync"),
        lambda urls: {"urls": urls},
    )
    observe(serve_utils, "set_service_status_and_active_versions_from_replica", "recomputed")

    child.end_with_parent(local.end_all)
    folder = Path(serve_utils.generate_task_yaml_file_name(options.service_name, 1)).parent
    folder.mkdir(parents=True, exist_ok=True)
    spec = cloud.add_service(options.service_name, options.task_yaml.read_text())
    child.say("configured", folder=str(folder))
    controller.run_controller(options.service_name, spec, 1, "127.0.0.1", options.port)


if __name__ == "__main__":
    main()
