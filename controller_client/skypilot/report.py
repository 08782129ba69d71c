"""Tells what became of the hook in a running controller: in its log, and to `doctor`."""

from collections.abc import Callable
from importlib import metadata
from types import ModuleType
from typing import Any

from controller_client.skypilot import fix, patches
from controller_client.skypilot.hook import BALANCER, FIX

PATH = "/controller/skyserve-lb"


def install(controller: ModuleType) -> None:
    """Report at the start of `run_controller`, and add a route to the controller's HTTP API."""

    def run_controller(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        level = controller.logger.info if _all_active() else controller.logger.warning
        level(f"skyserve-lb {version()}: " + "; ".join(f"{k} {v}" for k, v in parts().items()))
        return original(*args, **kwargs)

    def run(original: Callable[..., Any], self: Any) -> Any:
        self._app.add_api_route(PATH, status, methods=["GET"])
        return original(self)

    patches.wrap(controller, "run_controller", run_controller)
    patches.wrap(controller.SkyServeController, "run", run)


def status() -> dict[str, Any]:
    """The state of this process, as JSON."""
    return {"version": version(), "parts": parts(), "faults": dict(fix.faults)}


def parts() -> dict[str, str]:
    """Each part and what became of it in this process."""
    states = {part: patches.outcome.get(part, "not loaded") for part in (FIX, BALANCER)}
    restart = patches.outcome.get(patches.RESTART, patches.ACTIVE)
    if states[FIX] == patches.ACTIVE != restart:
        states[FIX] = f"{patches.ACTIVE}, but at restarts {restart}"
    return states


def version() -> str:
    """The version of this distribution."""
    return metadata.version("skyserve-lb")


def _all_active() -> bool:
    return set(parts().values()) == {patches.ACTIVE}
