"""`run_load_balancer` in the place of SkyPilot's own: same parameters, our balancer.

SkyPilot starts it in a child process of the service, with stdout redirected to the file that
`sky serve logs --load-balancer` shows, and ends it with SIGKILL. Nobody starts it again: so whatever
can be done without is, rather than not serving at all.
"""

import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controller_client.skypilot.bounded_log import BoundedLog

if TYPE_CHECKING:
    from lb.settings import Settings

# What 0.12 and later pass, all positionally; 0.14 adds the stream time-out.
PARAMETERS = (
    "controller_addr",
    "load_balancer_port",
    "load_balancing_policy_name",
    "tls_credential",
    "target_qps_per_replica",
)
# The name in /proc/PID/comm, by which `doctor` tells this balancer from the stock one.
PROCESS_NAME = "skyserve-lb"
# SkyPilot passes this if the user chose none. As a limit on silence it would cut long thinking.
STOCK_STREAM_TIMEOUT = 120
ADMIN_PORT_OFFSET = 1000

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def run_load_balancer(
    controller_addr: str,
    load_balancer_port: int,
    load_balancing_policy_name: str | None = None,
    tls_credential: Any = None,
    target_qps_per_replica: float | dict[str, float] | None = None,
    stream_timeout_seconds: float = STOCK_STREAM_TIMEOUT,
) -> None:
    """Balance until killed, or until the parent dies. Raises SystemExit with the exit code."""
    end_with_parent()
    given = (controller_addr, load_balancer_port, load_balancing_policy_name)
    try:
        from lb.app import run
    except ImportError as fault:
        _run_stock(fault, *given, tls_credential, target_qps_per_replica)
        return
    _name_process()
    sys.stdout = sys.stderr = BoundedLog.around(sys.stdout)
    values = settings_of(*given, tls_credential, target_qps_per_replica)
    settings = _load(values, own_defaults(load_balancer_port))
    sys.exit(run(_with_stream_timeout(settings, stream_timeout_seconds), mode="embedded"))


def settings_of(
    controller_addr: str,
    port: int,
    policy: str | None,
    tls_credential: Any,
    target_qps: float | dict[str, float] | None,
) -> dict[str, str]:
    """SkyPilot's arguments as settings, by name, in the form in which a user would give them."""
    values = {
        # Inside Kubernetes SkyPilot passes the address that the controller binds.
        "controller_url": controller_addr.replace("//0.0.0.0:", "//127.0.0.1:"),
        "port": str(port),
    }
    if policy is not None:
        values["policy"] = _known_policy(policy, target_qps)
    if target_qps:
        values["target_qps"] = json.dumps(target_qps)
    if tls_credential is not None:
        values["tls_keyfile"] = str(Path(tls_credential.keyfile).expanduser())
        values["tls_certfile"] = str(Path(tls_credential.certfile).expanduser())
    return values


def own_defaults(port: int) -> dict[str, str]:
    """What suits a balancer inside the controller, where its variable does not say otherwise."""
    values = {"log_format": "console"}
    if "--service-name" in sys.argv[:-1]:  # the service's own command line, which its children see
        values["service_name"] = sys.argv[sys.argv.index("--service-name") + 1]
    if not _is_free(port + ADMIN_PORT_OFFSET):
        # A balancer that still drains may hold it; to serve matters more than where we are watched.
        values["admin_port"] = "0"
    return values


def end_with_parent() -> None:
    """Have the kernel end this process, with a drain, when its parent dies."""
    parent = os.getppid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the kernel was asked
        sys.exit(0)


def _known_policy(policy: str, target_qps: object) -> str:
    from lb.policies import POLICIES

    if policy not in POLICIES:
        _say(f"policy {policy!r} is not one of {', '.join(POLICIES)}: least_load is used")
        return "least_load"
    if policy == "instance_aware_least_load" and not isinstance(target_qps, Mapping):
        return "least_load"  # which is what the stock policy does without targets by accelerator
    return policy


def _load(values: dict[str, str], defaults: dict[str, str]) -> "Settings":
    from lb.settings import ENV_PREFIX, SettingsError, load

    variables = {f"{ENV_PREFIX}{name.upper()}": value for name, value in defaults.items()}
    try:
        return load(values, {**variables, **os.environ})
    except SettingsError as error:
        for fault in error.faults:
            _say(fault)
    _say("going on without the SKYSERVE_LB_ variables")
    try:
        return load(values, variables)
    except SettingsError as error:
        sys.exit("\n".join(f"{PROCESS_NAME}: {fault}" for fault in error.faults))


def _with_stream_timeout(settings: "Settings", seconds: float) -> "Settings":
    """A time-out that the user chose bounds silence, and is granted to the response head as well."""
    if seconds == STOCK_STREAM_TIMEOUT:
        return settings
    total = max(settings.total_timeout, seconds)
    return replace(settings, stream_idle_timeout=float(seconds), total_timeout=total)


def _run_stock(fault: ImportError, *arguments: Any) -> None:
    _say(f"cannot be loaded ({fault}): SkyPilot's own load balancer runs instead")
    from sky.serve import load_balancer

    load_balancer.SkyServeLoadBalancer(*arguments).run()


def _name_process() -> None:
    _prctl(_PR_SET_NAME, ctypes.c_char_p(PROCESS_NAME.encode()))


def _prctl(option: int, argument: Any) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            return False
    return True


def _say(line: str) -> None:
    print(f"{PROCESS_NAME}: {line}", flush=True)  # noqa: T201  stdout is the balancer's log
