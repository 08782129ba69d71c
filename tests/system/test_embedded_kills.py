"""SkyServe on one machine: whatever is killed in the middle of an update, it heals, and nothing stays."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from controller_client.embedded.processes import Process, end_all, starting
from tests.system.embedded import NAME, Load, Machine, Scenario, at_once, until

READY, COMING = "READY", "PROVISIONING"
HALFWAY = {1: (1, READY), 2: (1, READY), 3: (2, READY), 4: (2, COMING), 5: (2, COMING)}
DONE = {3: (2, READY), 4: (2, READY), 5: (2, READY)}


def halfway(machine: Machine) -> str:
    """A service in the middle of a rolling update; its URL."""
    machine.let(1, 2)
    url = machine.up(machine.write(replicas=2))
    machine.wait_for({1: (1, READY), 2: (1, READY)})
    machine.let(3)
    machine.run("update", NAME, str(machine.write(replicas=3, text="two")))
    machine.wait_for(HALFWAY)
    return url


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def controllers_and_load_balancer(machine: Machine) -> None:
    url = halfway(machine)
    with Load(url) as load:
        working = kill_the_controller_that_works(machine)
        until(lambda: len(machine.controllers()) == 2)
        (waiting,) = machine.controllers() - {working}
        kill(waiting)
        until(lambda: len(machine.controllers() - {waiting}) == 2)
        machine.let(4)
        machine.wait_for({2: (1, READY), 3: (2, READY), 4: (2, READY), 5: (2, COMING)})
    assert set(load.outcomes()) == {"200 one", "200 two"}
    with Load(url) as load:
        balancer = machine.service()["balancer_pid"]
        kill(balancer)
        until(lambda: machine.service()["balancer_pid"] != balancer)
        assert until(lambda: served(load)) <= {"200 one", "200 two"}
        machine.let(5)
        assert machine.wait_for(DONE)["controller_pid"] == working
        assert set(load.wait_for()) == {"200 two"}


def kill_the_controller_that_works(machine: Machine) -> int:
    """The process id of the one that takes over, with all that there was."""
    until(lambda: len(machine.controllers()) == 2)
    before = machine.service()
    kill(before["controller_pid"])
    until(lambda: machine.service()["controller_pid"] != before["controller_pid"])
    after = machine.service()
    working: int = after["controller_pid"]
    assert working in machine.controllers()
    for known in ("balancer_pid", "controller", "endpoint", "version"):
        assert after[known] == before[known]
    kept = {each["id"]: each["pid"] for each in before["replicas"]}
    assert {each["id"]: each["pid"] for each in after["replicas"]} == kept
    return working


def served(load: Load) -> set[str] | None:
    """The outcomes of the next requests, once all of them are answered."""
    outcomes = set(load.wait_for())
    return outcomes if all(outcome.startswith("200") for outcome in outcomes) else None


def replicas_old_and_new(machine: Machine) -> None:
    with Load(halfway(machine)) as load:
        replicas = {each["id"]: each["pid"] for each in machine.service()["replicas"]}
        machine.let(6, 7)
        for replica_id in (1, 3, 4):  # one that serves, a new one that serves, one that starts
            children = session(replicas[replica_id])
            assert len(children) > 1
            kill(replicas[replica_id])  # the shell alone, not the server that it has started
            until(lambda children=children: not any(map(alive, children)))
        machine.let(5)
        machine.wait_for({5: (2, READY), 6: (2, READY), 7: (2, READY)})
        assert set(load.wait_for()) == {"200 two"}
    assert set(load.outcomes()) == {"200 one", "200 two"}


def session(leader: int) -> list[int]:
    lines = subprocess.check_output(["ps", "-o", "pid=", "-s", str(leader)], text=True)
    return [int(line) for line in lines.split()]


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def the_controller_while_it_takes_the_service_down(machine: Machine) -> None:
    machine.let(1, 2, end=False)
    machine.up(machine.write(replicas=2))
    service = machine.wait_for({1: (1, READY), 2: (1, READY)})
    down = machine.start("down", NAME)
    until(lambda: (machine.gates / "told-1").exists())
    kill(service["controller_pid"])
    machine.open("end-1", "end-2")
    assert down.communicate(timeout=60) == ("", "")
    assert down.returncode == 0
    until(lambda: not machine.processes(), machine.processes)


def both_controllers_so_that_down_does_it_alone(machine: Machine) -> None:
    machine.let(1, 2)
    machine.up(machine.write(replicas=2))
    machine.wait_for({1: (1, READY), 2: (1, READY)})
    until(lambda: len(machine.controllers()) == 2)
    groups = machine.controllers()
    for pid in groups:
        os.kill(pid, signal.SIGSTOP)
    for pid in groups:
        kill(pid)
    until(lambda: machine.service()["status"] == "CONTROLLER_FAILED")
    machine.run("down", NAME)
    assert machine.processes() == {}


def down_while_replicas_start_and_an_update_waits(machine: Machine) -> None:
    machine.open("end-all")
    machine.up(machine.write(replicas=5))
    update = machine.start("update", NAME, str(machine.write(replicas=8, text="two")))
    down = machine.start("down", NAME)
    assert down.communicate(timeout=60)[1] == ""
    update.communicate(timeout=60)
    until(lambda: not machine.processes(), machine.processes)
    assert machine.run("status")[0].split("\n\n")[0].count("\n") == 1


def commands_on_one_service_take_turns(machine: Machine) -> None:
    machine.let(*range(1, 20))
    path = str(machine.write(replicas=1))
    ups = [machine.start("up", path, "--name", NAME) for _ in range(2)]
    errors = [up.communicate(timeout=60)[1] for up in ups]
    assert sorted(up.returncode for up in ups) == [0, 1]
    (refused,) = [error for error in errors if error]
    assert refused.startswith(f"skyserve-lb: there is a service {NAME} already: ")
    files = [str(machine.write(f"{text}.yaml", replicas=1, text=text)) for text in ("two", "three")]
    updates = [machine.start("update", NAME, file) for file in files]
    lines = sorted(update.communicate(timeout=60)[0].split(";")[0] for update in updates)
    assert lines == [f"{NAME} goes to version 2", f"{NAME} goes to version 3"]
    until(lambda: machine.service()["version"] == [3])
    until(lambda: len(machine.service()["replicas"]) == 1)


SCENARIOS = (
    controllers_and_load_balancer,
    replicas_old_and_new,
    the_controller_while_it_takes_the_service_down,
    both_controllers_so_that_down_does_it_alone,
    down_while_replicas_start_and_an_update_waits,
    commands_on_one_service_take_turns,
)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Scenario, Future[None]]]:
    with at_once(SCENARIOS, tmp_path_factory.mktemp("machines")) as futures:
        yield futures


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_a_scenario(scenario: Scenario, played: dict[Scenario, Future[None]]) -> None:
    played[scenario].result()


# --- processes ----------------------------------------------------------------------------------


def begin(folder: Path, script: str) -> Process:
    """A shell that runs in a session of its own."""
    with starting(
        ["sh", "-c", script],
        mark=f"TEST_FOLDER={folder}",
        log=folder / "log",
        cwd=folder,
        env={"PATH": os.environ["PATH"]},
    ) as process:
        pass
    return process


def test_what_is_not_written_down_never_begins(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyError),
        starting(
            ["touch", "begun"], mark=f"A={tmp_path}", log=tmp_path / "log", cwd=tmp_path, env={}
        ) as process,
    ):
        raise KeyError
    until(lambda: not process.alive)
    assert not (tmp_path / "begun").exists()


def test_a_process_id_that_was_given_away_is_left_alone(tmp_path: Path) -> None:
    process = begin(tmp_path, "read never <&2; sleep 60")
    assert process.alive
    other = Process(process.pid, "7@another-start", f"{process.mark}/another")
    assert not other.alive
    assert other.members == []
    assert not other.terminate(set())
    other.end()
    assert process.alive
    process.end()
    assert not process.alive


def test_a_session_without_its_leader_is_ours_only_with_our_mark(tmp_path: Path) -> None:
    process = begin(tmp_path, "sleep 60 & sleep 61 & echo up; wait")
    until(lambda: len(process.members) == 3)
    kill(process.pid)
    os.waitpid(process.pid, 0)
    assert not process.alive
    assert Process(process.pid, process.started, "TEST_FOLDER=/another").members == []
    assert len(process.members) == 2
    process.end()
    assert process.members == []


def test_what_has_left_its_session_is_ended_with_it(tmp_path: Path) -> None:
    process = begin(tmp_path, "setsid sleep 60 & setsid sleep 61 & wait")
    until(lambda: len(process.members) == 3)
    (gone, *others) = [pid for pid in process.members if pid != process.pid]
    kill(gone)
    until(lambda: process.members == sorted([process.pid, *others]))
    process.end()
    assert process.members == []
    os.waitpid(process.pid, 0)
    until(lambda: not any(map(alive, others)))  # their new parent takes note


def test_what_starts_while_others_are_asked_to_end_is_asked_too(tmp_path: Path) -> None:
    process = begin(tmp_path, "trap 'sleep 60 & exit' TERM; touch up; while :; do sleep 0.05; done")
    until(lambda: (tmp_path / "up").exists())
    end_all([process], 3600.0)
    assert process.members == []
    os.waitpid(process.pid, 0)
