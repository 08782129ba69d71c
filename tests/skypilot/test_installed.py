"""The wheel, installed by pip into SkyPilot's environment and nothing else done.

The service is started as SkyPilot starts it: ``python -u -m sky.serve.service``, which spawns the
controller and the balancer. It wants no replica, so no cloud is needed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import environment
import pytest
from service import get_json

NAME = "svc-a"
TASK = {
    "service": {
        "readiness_probe": "/health",
        "replica_policy": {"min_replicas": 0, "max_replicas": 1, "target_qps_per_replica": 1},
        "ports": 8080,
    },
    "run": "true",
    "file_mounts": {},
}


# What `sky serve logs svc-a --load-balancer --tail 5` runs on the controller.
SHOW_LOG = (
    "from sky.serve import serve_utils;"
    f"print(serve_utils.stream_serve_process_logs({NAME!r}, False, False, 5, False))"
)


class SkyService:
    """A running ``sky.serve.service`` in a HOME of its own."""

    def __init__(self, python: Path, home: Path) -> None:
        home.mkdir()
        self.python = python
        self.environ = {
            **os.environ,
            "HOME": str(home),
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
            "SKYSERVE_LB_HOOK": "",
        }
        self.balancer_log = home / f".sky/serve/{NAME.replace('-', '_')}/load_balancer.log"
        self.log = home / "service.log"
        self._task = home / "task.yaml"
        self._task.write_text(json.dumps(TASK))

    @contextlib.contextmanager
    def run(self) -> Iterator[SkyService]:
        arguments = ("--service-name", NAME, "--task-yaml", str(self._task), "--job-id", "1")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                (str(self.python), "-u", "-m", "sky.serve.service", *arguments, "--entrypoint", ""),
                env=self.environ,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            yield self
        finally:
            # All of its session: SkyPilot's controller would outlive its parent.
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def python_says(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = (str(self.python), *arguments)
        return subprocess.run(
            command, env=self.environ, capture_output=True, text=True, check=False
        )

    def ports(self) -> tuple[int, int]:
        """Of the controller and of the balancer, as SkyPilot chose and stored them."""
        query = (
            "import json; from sky.serve import serve_state as s;"
            f"r = s.get_service_from_name({NAME!r}) or {{}};"
            "print(json.dumps([r.get('controller_port'), r.get('load_balancer_port')]))"
        )
        until(lambda: self.balancer_log.exists(), "balancer log", self.log)
        answer = self.python_says("-c", query)
        controller, balancer = json.loads(answer.stdout)
        until(lambda: listens(controller) and listens(balancer), "open ports", self.log)
        return controller, balancer

    def doctor(self, python: str | Path = "", *options: str) -> tuple[int, Any]:
        """Its exit code and what it says; run by SkyPilot's Python unless told otherwise."""
        command = (str(python or self.python), "-m", "lb", "doctor", "--json", *options)
        answer = subprocess.run(
            command, env=self.environ, capture_output=True, text=True, check=False
        )
        assert answer.stdout, answer.stderr
        return answer.returncode, json.loads(answer.stdout)


def until(condition: Callable[[], object], what: str, log: Path, seconds: float = 45.0) -> None:
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"no {what}\n{log.read_text()[-3000:]}"
        pause.wait(0.2)  # another process's doing: nothing to wait on


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_pip_install_turns_fix_and_balancer_on(wheel_python: Path, tmp_path: Path) -> None:
    with SkyService(wheel_python, tmp_path / "home").run() as service:
        controller, balancer = service.ports()
        report = get_json(f"http://127.0.0.1:{controller}/controller/skyserve-lb")
        assert report["parts"] == {"fix": "active", "lb": "active"}
        assert report["faults"] == {}
        log = service.log.read_text()
        assert log.count(f"skyserve-lb {report['version']}: fix active; lb active") == 1

        # Readable by people, with the service's name in it, in the file that `sky serve logs` shows.
        until(lambda: "server.started" in service.balancer_log.read_text(), "start", service.log)
        lines = service.balancer_log.read_text().splitlines()
        (line,) = (line for line in lines if "server.started" in line)
        assert f"address=0.0.0.0:{balancer}" in line
        assert f"service={NAME}" in line
        assert not line.startswith("{")
        shown = service.python_says("-c", SHOW_LOG)
        assert "server.started" in shown.stdout, shown.stderr

        code, findings = service.doctor()
        assert (code, findings["problems"]) == (0, [])
        assert findings["ok"] is True
        (found,) = findings["services"]
        assert (found["name"], found["balancer"]) == (NAME, "skyserve-lb")

        # SkyPilot's parent may die by SIGKILL: the balancer goes with it, and frees its port.
        service.process.kill()
        until(lambda: not listens(balancer), "end of the balancer", service.balancer_log)


def test_pip_uninstall_leaves_skypilot_as_it_was(
    stock_python: Path, wheel_python: Path, tmp_path: Path
) -> None:
    with environment.copy_of(wheel_python) as python:
        service = SkyService(python, tmp_path / "home")
        removed = service.python_says("-m", "pip", "uninstall", "-q", "-y", "skyserve-lb")
        assert removed.returncode == 0, removed.stderr
        assert start_files(python) == start_files(stock_python)
        with service.run():
            controller, _ = service.ports()
            with pytest.raises(OSError, match="404"):
                get_json(f"http://127.0.0.1:{controller}/controller/skyserve-lb")
            until(
                lambda: "SkyServe Load Balancer started" in service.balancer_log.read_text(),
                "stock balancer",
                service.log,
            )
            assert "fix active" not in service.log.read_text()

            code, findings = service.doctor(sys.executable, "--python", str(python))
            assert code == 1
            assert [problem.split(":")[0] for problem in findings["problems"]] == [
                "skyserve-lb is not installed",
                f"service {NAME}",  # its controller
                f"service {NAME}",  # its balancer
            ]
            (found,) = findings["services"]
            assert found["controller"] == {"fault": "it runs without the hook"}
            assert found["balancer"] not in (None, "skyserve-lb")


def test_an_interpreter_starts_no_later_for_the_hook_and_prints_nothing(
    wheel_python: Path,
) -> None:
    """It took 0.6 ms of CPU time where it was measured; what it imports decides that."""
    (pth,) = wheel_python.parents[1].glob("lib/python3.*/site-packages/skyserve_lb.pth")
    # Without site, which would have run the line already; `os` it would have loaded in any case.
    code = (
        "import os, sys; line = open(sys.argv[1]).read(); before = set(sys.modules);"
        "sys.path.append(os.path.dirname(sys.argv[1])); exec(line);"
        "print(type(sys.meta_path[0]).__name__, *sorted(set(sys.modules) - before))"
    )
    command = (str(wheel_python), "-S", "-c", code, str(pth))
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    finder, *imported = done.stdout.split()
    assert (finder, done.stderr) == ("Finder", "")
    assert imported == [
        "controller_client",
        "controller_client.skypilot",
        "controller_client.skypilot.hook",
    ]

    quiet = subprocess.run((str(wheel_python), "-c", ""), capture_output=True, check=True)
    assert (quiet.stdout, quiet.stderr) == (b"", b"")


def test_the_wheel_keeps_to_skypilots_own_requirements(wheel_python: Path) -> None:
    checked = subprocess.run(
        (str(wheel_python), "-m", "pip", "check"), capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout


def start_files(python: Path) -> dict[str, int]:
    """What decides how SkyPilot starts: its modules and each ``.pth`` file, with their sizes."""
    (packages,) = python.parents[1].glob("lib/python3.*/site-packages")
    files = [*packages.glob("*.pth"), *packages.glob("sky/**/*.py")]
    return {str(path.relative_to(packages)): path.stat().st_size for path in files}
