"""The files of ``deploy/skypilot``, loaded by SkyPilot's own loaders (see ``deployed.py``)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from service import HERE, Event


@pytest.fixture(scope="module")
def events(
    wheel_python: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[Event]:
    home = tmp_path_factory.mktemp("home")
    done = subprocess.run(
        (str(wheel_python), str(HERE / "deployed.py"), str(wheel)),
        env={**os.environ, "HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def of(events: list[Event], name: str) -> list[Event]:
    return [event for event in events if event["event"] == name]


def test_the_plugin_pair_carries_the_wheel_and_its_class_loads(
    events: list[Event], wheel: Path
) -> None:
    (carried,) = of(events, "carried")
    assert carried["wheels"] == [wheel.name]
    assert carried["installs"] is True
    assert carried["config"].endswith("remote_plugins.yaml")
    assert of(events, "loaded")[0]["plugins"] == ["skyserve-lb"]


def test_the_policy_adds_to_the_controllers_setup_and_to_no_other(events: list[Event]) -> None:
    controller, user = of(events, "applied")
    assert controller["request"] == "serve.launch_controller"
    before, command = controller["setup"].strip().splitlines()
    assert before == "echo before"
    assert "install skyserve-lb==" in command
    assert command.endswith(">&2")
    assert user["setup"] == "echo before"


def test_the_sidecar_is_a_container_of_the_controllers_pod(events: list[Event]) -> None:
    assert of(events, "sidecar")[0]["containers"] == ["skyserve-lb"]
