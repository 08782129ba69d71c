"""Loads the files of ``deploy/skypilot`` with SkyPilot's own loaders. Run with SkyPilot's Python."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import child
import sky
from sky.server import plugin_utils, plugins
from sky.server.requests import request_names
from sky.utils import admin_policy_utils, common_utils, config_utils, schemas, yaml_utils

DEPLOY = Path(__file__).resolve().parents[2] / "deploy" / "skypilot"


def carried_wheels(wheel: Path) -> None:
    """The plugin pair in its place, and the wheel in the folder that it names."""
    home = Path.home() / ".sky"
    (home / "controller-wheels").mkdir(parents=True, exist_ok=True)
    (home / "controller-wheels" / wheel.name).write_bytes(wheel.read_bytes())
    for name in ("plugins.yaml", "remote_plugins.yaml"):
        (home / name).write_text((DEPLOY / name).read_text())
    mounts, commands = plugin_utils.get_plugin_mounts_and_commands()
    child.say(
        "carried",
        wheels=[Path(local).name for local in mounts.values()],
        installs=wheel.name in commands,
        config=plugin_utils.get_filtered_plugins_config_path(),
    )
    # The controller's API server reads the remote file as its own, and loads the class.
    os.environ["SKYPILOT_SERVER_PLUGINS_CONFIG"] = str(home / "remote_plugins.yaml")
    plugins.load_plugins(plugins.ExtensionContext(app=None))
    child.say("loaded", plugins=[plugin.name for plugin in plugins.get_plugins()])


def applied_policy() -> None:
    """The policy that the configuration names, on a controller's launch and on a user's."""
    location = yaml_utils.read_yaml(DEPLOY / "config-admin-policy.yaml")["admin_policy"]
    policy = admin_policy_utils._get_policy_impl(location)
    names = request_names.AdminPolicyRequestName
    for name in (names.SERVE_LAUNCH_CONTROLLER, names.CLUSTER_LAUNCH):
        task = sky.Task(setup="echo before", run="true")
        request = sky.UserRequest(task, config_utils.Config(), name)
        mutated = policy.apply(request)
        child.say("applied", request=name.value, setup=mutated.task.setup)


def overrides_of_the_sidecar() -> None:
    """The sidecar's block, through SkyPilot's schema of its configuration and of resources."""
    config = yaml_utils.read_yaml(DEPLOY / "config-sidecar.yaml")
    common_utils.validate_schema(config, schemas.get_config_schema(), "config: ")
    resources = sky.Resources.from_yaml_config(config["serve"]["controller"]["resources"])
    (one,) = resources
    spec = one.cluster_config_overrides["kubernetes"]["pod_config"]["spec"]
    child.say("sidecar", containers=[container["name"] for container in spec["containers"]])


if __name__ == "__main__":
    carried_wheels(Path(sys.argv[1]))
    applied_policy()
    overrides_of_the_sidecar()
