"""What `doctor` looks at, as one JSON object on stdout. Run as a script with SkyPilot's Python.

Standard library and SkyPilot only: it must work, and say so, where our wheel is missing.
"""

import contextlib
import importlib
import importlib.metadata
import json
import os
import socket
import sys
import time
import urllib.error
import urllib.request
from typing import Any

SECONDS = 5.0  # for a controller to answer


def inspect() -> dict[str, Any]:
    """The environment, and each service that SkyPilot's database knows."""
    skypilot = _version("skypilot")
    found: dict[str, Any] = {
        "python": sys.executable,
        "skypilot": skypilot,
        "wheel": _version("skyserve-lb"),
        "hook": any(
            type(finder).__module__ == "controller_client.skypilot.hook" for finder in sys.meta_path
        ),
        "variable": os.environ.get("SKYSERVE_LB_HOOK", ""),
        "parts": {},
        "services": [],
    }
    if skypilot is not None:
        found["parts"] = _parts(found["hook"])
        from sky.serve import serve_state

        found["services"] = [_service(record) for record in serve_state.get_services()]
    return found


def _version(distribution: str) -> Any:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _parts(hook: bool) -> Any:
    """What the hook did to the modules that a service imports, in this very process."""
    from sky.serve import service  # noqa: F401

    if not hook:
        return {}
    from controller_client.skypilot import report

    return report.parts()


def _service(record: dict[str, Any]) -> dict[str, Any]:
    pool = bool(record.get("pool"))
    return {
        "name": record["name"],
        "status": record["status"].value,
        "pool": pool,
        "controller": _controller(record),
        "balancer": None if pool else _listener(record["load_balancer_port"]),
        **_settled_versions(record["name"]),
    }


def _controller(record: dict[str, Any]) -> dict[str, Any]:
    """What the running controller says of itself, or why it says nothing."""
    host = record.get("controller_ip") or "127.0.0.1"
    url = f"http://{host}:{record['controller_port']}/controller/skyserve-lb"
    try:
        with urllib.request.urlopen(url, timeout=SECONDS) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as error:
        why = "it runs without the hook" if error.code == 404 else f"it answered {error.code}"
    except (OSError, ValueError) as error:
        why = f"no answer from port {record['controller_port']}: {error}"
    return {"fault": why}


def _listener(port: int) -> Any:
    """The name of the process that listens on `port`; None if there is none."""
    psutil = importlib.import_module("psutil")  # SkyPilot brings it

    for connection in psutil.net_connections(kind="tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
            with contextlib.suppress(psutil.Error):
                return psutil.Process(connection.pid).name() if connection.pid else "unknown"
    with socket.socket() as probe:
        probe.settimeout(SECONDS)
        return "unknown" if probe.connect_ex(("127.0.0.1", port)) == 0 else None


def _settled_versions(name: str) -> dict[str, Any]:
    """Versions and active set. Read again if they disagree: an update may be under way."""
    versions: dict[str, Any] = {}
    for _ in range(3):
        versions = _versions(name)
        if versions["agree"]:
            break
        time.sleep(0.5)
    return versions


def _versions(name: str) -> dict[str, Any]:
    from sky.serve import serve_state

    replicas = serve_state.get_replica_infos(name)
    record = serve_state.get_service_from_name(name) or {"active_versions": []}
    active = record["active_versions"]
    ready = [replica for replica in replicas if replica.is_ready]
    routable = [replica for replica in ready if replica.version in active]
    return {
        "active_versions": active,
        "replicas": {replica.replica_id: replica.version for replica in replicas},
        "ready": len(ready),
        "routable": len(routable),
        # In a blue-green update some READY replicas rightly wait; that all do is the fault.
        "agree": bool(routable or not ready),
    }


if __name__ == "__main__":
    del sys.path[0]  # this folder: its modules are no top-level ones
    answer = sys.stdout
    sys.stdout = sys.stderr  # whatever an import prints is no part of the answer
    print(json.dumps(inspect()), file=answer)
