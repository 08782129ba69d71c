"""The commands of a service on one machine: as README shows them, and what they refuse, in one line."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.system.embedded import NAME, ROOT, Machine, Scenario, at_once, machine, until

READY = "READY"


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Machine]:
    with machine(tmp_path) as made:
        yield made


def what_readme_shows(made: Machine) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.split("## SkyServe on one machine\n")[1]
    (block,) = re.findall(r"```sh\n(.*?)```", section.split("\n## ")[0], re.DOTALL)
    bin_folder = made.folder / "bin"
    bin_folder.mkdir()
    script = bin_folder / "skyserve-lb"
    script.write_text(f"#!/bin/sh\nexec '{sys.executable}' -m lb \"$@\"\n")
    script.chmod(0o755)
    path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
    shown = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=made.folder,
        env=made.environ() | {"HOME": str(made.folder), "PATH": path},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    assert re.match(r"Hello from replica [12]\n", shown.stdout)
    for line in ("http-server goes to version 2", "http-server goes to version 3", "SERVICE_NAME"):
        assert line in shown.stdout
    assert "GET /health" in shown.stdout
    until(lambda: not made.processes(), made.processes)
    assert (made.folder / ".skyserve-lb/state.db").exists()


def status_and_logs(made: Machine) -> None:
    assert made.run("status", "--json")[0].strip() == "[]"
    made.let(1)
    made.up(made.write(replicas=1, run="echo this is said; exec sleep 60 # {port}"), "--port", "1")
    until(lambda: made.states() == {1: (1, "STARTING")})
    (row,) = json.loads(made.run("status", "--json")[0])
    assert (row["name"], row["status"], row["version"]) == (NAME, "REPLICA_INIT", [])
    assert row["endpoint"] == "http://127.0.0.1:1"
    assert made.tables()[0][1:3] == ["-", "-"]
    assert made.run("logs", NAME, "1")[0] == "this is said\n"
    assert "replica 1 is STARTING" in made.run("logs", NAME)[0]
    assert '"server.started"' in made.run("logs", NAME, "balancer")[0]
    (line,) = made.run("logs", NAME, "7", code=1)[1]
    assert line == f"skyserve-lb: {NAME} has no log of 7"


def watching_goes_on_until_it_is_interrupted(made: Machine) -> None:
    made.let(1)
    made.up(made.write(replicas=1))
    watching = {
        "status": made.start("status", "--watch", "--json"),
        "logs": made.start("logs", NAME, "controller", "--follow"),
    }
    status, logs = (watching[name].stdout for name in ("status", "logs"))
    assert status
    assert logs
    assert [json.loads(status.readline())[0]["name"] for _ in range(2)] == [NAME, NAME]
    made.let(2)
    made.run("update", NAME, str(made.write(replicas=2)))
    assert any("replica 2 is READY" in line for line in iter(logs.readline, ""))
    for process in watching.values():
        process.send_signal(signal.SIGINT)
        with process:
            assert process.communicate(timeout=60)[1].strip() == ""
        assert process.returncode == 130


def a_balancer_that_cannot_start_takes_the_service_down_again(made: Machine) -> None:
    made.open("end-all")
    bad = [made.folder / name for name in ("key.pem", "cert.pem")]
    for file in bad:
        file.write_text("nonsense")
    path = made.write(tls={"keyfile": str(bad[0]), "certfile": str(bad[1])})
    (line,) = made.run("up", str(path), "--name", NAME, code=1)[1]
    assert line.startswith(f"skyserve-lb: {NAME} is down again: --tls-certfile ")
    assert made.run("status", "--json")[0].strip() == "[]"


def tls_and_what_has_no_effect(made: Machine) -> None:
    if not shutil.which("openssl"):
        pytest.fail("openssl makes the certificate of this test")
    made.let(1)
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=127.0.0.1"),
            *("-keyout", "key.pem", "-out", "cert.pem"),
        ],
        cwd=made.folder,
        check=True,
        capture_output=True,
    )
    path = made.write(tls={"keyfile": "key.pem", "certfile": "cert.pem"}, load_balancer={})
    output, notes = made.run("up", str(path), "--name", NAME)
    assert output.startswith("https://127.0.0.1:")
    assert notes == [f"skyserve-lb: {path}: service.load_balancer: has no effect on one machine"]
    made.wait_for({1: (1, READY)})
    curl = ["curl", "-sk", output.strip()]
    assert subprocess.run(curl, capture_output=True, text=True, check=True).stdout == "one 1"


SCENARIOS = (
    what_readme_shows,
    status_and_logs,
    watching_goes_on_until_it_is_interrupted,
    a_balancer_that_cannot_start_takes_the_service_down_again,
    tls_and_what_has_no_effect,
)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Scenario, Future[None]]]:
    with at_once(SCENARIOS, tmp_path_factory.mktemp("machines")) as futures:
        yield futures


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_a_scenario(scenario: Scenario, played: dict[Scenario, Future[None]]) -> None:
    played[scenario].result()


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (("up", "missing.yaml"), 2, "missing.yaml cannot be read: No such file or directory"),
        (("up", "bad.yaml"), 2, "bad.yaml:2: service.replicas: 'x' is not a whole number"),
        (("update", NAME, "good.yaml"), 1, f"no service {NAME}: there is none"),
        (("down", NAME), 1, f"no service {NAME}: there is none"),
        (("logs", NAME), 1, f"no service {NAME}: there is none"),
        (("status", NAME), 1, f"no service {NAME}: there is none"),
        (("down", "../x"), 1, "no service ../x: there is none"),
        (("up", "good.yaml", "--name", "../x"), 1, "'../x' is no name"),
        (("up", "good.yaml", "--gap", "5d"), 2, "'--gap': '5d' has the unknown unit 'd'"),
        (("update", NAME, "good.yaml", "--mode", "x"), 2, "'x' is not one of"),
        (("status", NAME, "--balancer", "http://127.0.0.1:1"), 2, "do not go together"),
        (("status", "--balancer", "nonsense"), 2, "--balancer: 'nonsense' is no URL"),
        (("status", "--balancer", "http://127.0.0.1:1"), 1, "127.0.0.1:1"),
    ],
)
def test_a_mistake_is_one_line(made: Machine, words: tuple[str, ...], code: int, part: str) -> None:
    (made.folder / "bad.yaml").write_text("service:\n  replicas: x\nrun: y")
    (made.folder / "good.yaml").write_text("service: {}\nrun: serve {port}")
    (line,) = made.run(*words, code=code)[1]
    assert line.startswith("skyserve-lb: ")
    assert part in line
    assert made.processes() == {}


def test_a_state_folder_that_cannot_be_is_one_line(made: Machine) -> None:
    made.state = Path("/proc/none")
    (line,) = made.run("status", code=1)[1]
    assert line.startswith("skyserve-lb: --state-dir /proc/none cannot be used: ")


def test_what_another_release_wrote_is_one_line(made: Machine) -> None:
    made.run("status")
    with contextlib.closing(sqlite3.connect(made.state / "state.db")) as database, database:
        database.execute("INSERT INTO services VALUES ('new', '{\"of\": \"tomorrow\"}')")
    for words in (("status",), ("down", "new")):
        (line,) = made.run(*words, code=1)[1]
        assert line.endswith("cannot be used: service new was written by another release")
