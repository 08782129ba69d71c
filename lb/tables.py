"""The tables of `skyserve-lb status`, as `sky serve status` has them."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table

from controller_client.embedded.versions import FAILURES, Service, Status

UNITS = (("day", "d", 86400), ("hr", "h", 3600), ("min", "m", 60), ("sec", "s", 1))


def row(service: Service, now: float, *, controlled: bool) -> dict[str, Any]:
    """A service as JSON has it; `controlled`: its controller runs."""
    lost = "CONTROLLER_FAILED" if service.controller_pid else "CONTROLLER_INIT"
    status = service.status if service.ending or controlled else lost
    secure = "tls" in service.tasks[service.latest]["service"]
    return {
        "name": service.name,
        "version": service.active,
        "latest_version": service.latest,
        "uptime": now - service.ready_since if service.ready_since else None,
        "status": status,
        "endpoint": f"http{'s' * secure}://127.0.0.1:{service.port}",
        "admin": f"http://127.0.0.1:{service.admin_port}",
        "controller": f"http://127.0.0.1:{service.controller_port}",
        "controller_pid": service.controller_pid,
        "balancer_pid": service.balancer_pid,
        "replicas": [
            {
                "id": each.id,
                "version": each.version,
                "endpoint": each.url,
                "launched": now - each.launched_at,
                "status": each.status.value,
                "pid": each.pid,
            }
            for each in service.replicas
        ],
    }


def tables(rows: Sequence[dict[str, Any]]) -> Group:
    """The two tables, of services and of their replicas."""
    services = _table("NAME", "VERSION", "UPTIME", "STATUS", "REPLICAS", "ENDPOINT")
    replicas = _table("SERVICE_NAME", "ID", "VERSION", "ENDPOINT", "LAUNCHED", "STATUS")
    failed = {status.value for status in FAILURES}
    for each in rows:
        statuses = [replica["status"] for replica in each["replicas"]]
        count = sum(status not in failed for status in statuses)
        services.add_row(
            each["name"],
            ",".join(map(str, each["version"])) or "-",
            _duration(each["uptime"]),
            each["status"],
            f"{statuses.count(Status.READY.value)}/{count}",
            each["endpoint"].removeprefix("http://"),
        )
        for replica in each["replicas"]:
            replicas.add_row(
                *(each["name"], str(replica["id"]), str(replica["version"])),
                replica["endpoint"].removeprefix("http://"),
                _ago(replica["launched"]),
                replica["status"],
            )
    return Group("Services", services, "", "Service Replicas", replicas)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _duration(seconds: float | None) -> str:
    """Such as 6m 15s."""
    if seconds is None:
        return "-"
    parts, rest = list[str](), int(seconds)
    for _, letter, length in UNITS:
        count, rest = divmod(rest, length)
        if count:
            parts.append(f"{count}{letter}")
    return " ".join(parts[:2]) or "0s"


def _ago(seconds: float) -> str:
    """Such as 6 mins ago."""
    for unit, _, length in UNITS:
        if (count := int(seconds) // length) or length == 1:
            return f"{count} {unit}{'s' * (count != 1)} ago"
    raise AssertionError(seconds)
