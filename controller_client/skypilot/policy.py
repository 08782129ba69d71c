"""An admin policy for SkyPilot that installs the wheel on each serve controller it launches.

Named by `admin_policy:` in the configuration of SkyPilot's API server, whose environment must have
this wheel too. See `deploy/skypilot/README.md`, "Admin policy".
"""

import os
import shlex
from importlib import metadata

import sky
from sky.skylet import constants

# What pip installs on the controller: a requirement, a URL or a path there.
VARIABLE = "SKYSERVE_LB_REQUIREMENT"
# The request's name since SkyPilot 0.12; only this one is changed.
LAUNCH_CONTROLLER = "serve.launch_controller"


class InstallOnController(sky.AdminPolicy):  # type: ignore[misc]  # SkyPilot is no dependency here
    """Adds one command to the set-up of serve controllers and leaves every other request alone.

    A policy that raises blocks every launch, and a set-up that fails blocks the controller: so
    neither does. `doctor` shows whether the wheel got there.
    """

    @classmethod
    def validate_and_mutate(cls, user_request: sky.UserRequest) -> sky.MutatedUserRequest:
        """The request, with the command if it launches a serve controller."""
        task = user_request.task
        name = user_request.request_name
        if getattr(name, "value", name) == LAUNCH_CONTROLLER:
            task.setup = f"{task.setup or ''}\n{install_command()}\n"
        return sky.MutatedUserRequest(task, user_request.skypilot_config)


def install_command() -> str:
    """The shell command; it succeeds whether or not the wheel could be installed."""
    own = f"skyserve-lb=={metadata.version('skyserve-lb')}"
    requirement = shlex.quote(os.environ.get(VARIABLE) or own)
    return (
        f"{constants.SKY_UV_PIP_CMD} install {requirement} "
        "|| echo 'skyserve-lb could not be installed: SkyPilot runs as it is' >&2"
    )
