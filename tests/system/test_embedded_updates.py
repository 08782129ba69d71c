"""SkyServe on one machine: the steps of a rolling and a blue-green update, under load, in `status`.

Each step is held by files until it was seen. The tables are those of SkyServe's manual, but for two
things: before the first new replica is ready VERSION names the version that serves, as SkyServe's
code has it, and not the one to come; and INFRA and the like are left out.
"""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.system.embedded import RATE, Load, Machine, Scenario, at_once, until

READY, GOING, COMING = "READY", "SHUTTING_DOWN", "PROVISIONING"
States = dict[int, tuple[int, str]]

OLD: States = {1: (1, READY), 2: (1, READY)}
NEW: States = {3: (2, READY), 4: (2, READY), 5: (2, READY)}
STARTED: States = {**OLD, 3: (2, COMING), 4: (2, COMING), 5: (2, COMING)}
ONE_READY: States = {**STARTED, 3: (2, READY)}
TWO_READY: States = {**ONE_READY, 4: (2, READY)}


def shows(machine: Machine, version: str, replicas: str, states: States) -> None:
    """`status` shows this, once it does."""
    machine.wait_for(states)
    service, rows = machine.tables()
    assert [service[0], service[1], service[3], service[4]] == ["svc", version, READY, replicas]
    assert re.fullmatch(r"(\d+m )?\d+s", service[2])
    assert re.fullmatch(r"127\.0\.0\.1:\d+", service[5])
    assert [[row[0], row[1], row[2], row[5]] for row in rows] == [
        ["svc", str(number), str(version), status] for number, (version, status) in states.items()
    ]
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+", row[3]) for row in rows)
    assert all(re.fullmatch(r"\d+ (sec|min)s? ago", row[4]) for row in rows)


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def begin(made: Machine) -> str:
    """A service of two replicas that serve; its URL."""
    made.let(1, 2, end=False)
    url = made.up(made.write(replicas=2))
    shows(made, "1", "2/2", OLD)
    return url


def a_rolling_update_step_by_step(machine: Machine) -> None:
    url = begin(machine)
    with Load(url) as load:
        machine.run("update", "svc", str(machine.write(replicas=3, text="two")))
        shows(machine, "1", "2/5", STARTED)
        machine.let(3)
        shows(machine, "1,2", "3/5", ONE_READY)
        assert set(load.wait_for(2 * RATE)) == {"200 one", "200 two"}
        machine.let(4)
        shows(machine, "1,2", "3/5", {**TWO_READY, 1: (1, GOING)})
        machine.open("end-1", "end-2")
        machine.let(5)
        shows(machine, "2", "3/3", NEW)
        assert set(load.wait_for(3 * RATE)) == {"200 two"}
    assert set(load.outcomes()) == {"200 one", "200 two"}


def a_blue_green_update_step_by_step(machine: Machine) -> None:
    url = begin(machine)
    with Load(url) as load:
        machine.run(
            "update", "svc", str(machine.write(replicas=3, text="two")), "--mode", "blue_green"
        )
        shows(machine, "1", "2/5", STARTED)
        machine.let(3)
        shows(machine, "1", "3/5", ONE_READY)
        assert set(load.wait_for()) == {"200 one"}
        machine.let(4, 5)
        shows(machine, "2", "3/5", {1: (1, GOING), 2: (1, GOING), **NEW})
        machine.open("end-1", "end-2")
        shows(machine, "2", "3/3", NEW)
        assert set(load.wait_for(3 * RATE)) == {"200 two"}
    assert set(load.outcomes()) == {"200 one", "200 two"}


def a_replica_that_goes_finishes_its_requests_before_it_is_told(machine: Machine) -> None:
    url = begin(machine)
    with ThreadPoolExecutor(4) as threads:
        held = [threads.submit(get, f"{url}/hold") for _ in range(4)]
        until(lambda: all((machine.gates / f"held-{each}").exists() for each in (1, 2)))
        machine.let(3, 4)
        machine.run("update", "svc", str(machine.write(replicas=2, text="two")))
        going = {1: (1, GOING), 2: (1, GOING), 3: (2, READY), 4: (2, READY)}
        machine.wait_for(going)
        # The new ones serve for as long as it takes the balancer to hear of it, and then some.
        until(lambda: get(url) in ("two 3", "two 4"))
        assert machine.states() == going
        assert list(machine.gates.glob("told-*")) == []
        machine.open("answer", "end-1", "end-2")
        assert {answer.result().split()[0] for answer in held} == {"one"}
        machine.wait_for({3: (2, READY), 4: (2, READY)})
    assert {path.name for path in machine.gates.glob("told-*")} == {"told-1", "told-2"}


def a_change_of_the_number_takes_the_running_replicas_over(machine: Machine) -> None:
    url = begin(machine)
    before = {each["id"]: each["pid"] for each in machine.service()["replicas"]}
    with Load(url) as load:
        machine.let(3)
        machine.run("update", "svc", str(machine.write(replicas=3)))
        service = machine.wait_for({1: (2, READY), 2: (2, READY), 3: (2, READY)})
        assert {each["id"]: each["pid"] for each in service["replicas"]}.items() >= before.items()
        machine.open("end-1")
        machine.run("update", "svc", str(machine.write(replicas=2)))
        machine.wait_for({2: (3, READY), 3: (3, READY)})
        load.wait_for()
    assert set(load.outcomes()) == {"200 one"}
    (machine.gates / "ready-2").unlink()
    machine.wait_for({2: (3, "NOT_READY"), 3: (3, READY)})
    until(lambda: {get(url) for _ in range(4)} == {"one 3"})
    machine.let(2)
    machine.wait_for({2: (3, READY), 3: (3, READY)})


def an_update_that_fails_leaves_the_old_replicas_serving(machine: Machine) -> None:
    url = begin(machine)
    machine.open(*(f"setup-{number}" for number in range(3, 7)))
    with Load(url) as load:
        broken = machine.write(replicas=2, text="two", run="echo {port}; exit 3")
        machine.run("update", "svc", str(broken))
        machine.wait_for({**OLD, 3: (2, "FAILED"), 4: (2, "FAILED")})
        probe = {"path": "/health", "initial_delay_seconds": 0.1}
        slow = machine.write(replicas=2, text="three", readiness_probe=probe)
        machine.run("update", "svc", str(slow))
        failed = "FAILED_INITIAL_DELAY"
        machine.wait_for({**OLD, 5: (3, failed), 6: (3, failed)})
        load.wait_for()
        machine.open("end-1", "end-2")
        machine.let(7, 8)
        machine.run("update", "svc", str(machine.write(replicas=2, text="four")))
        machine.wait_for({7: (4, READY), 8: (4, READY)})
    assert set(load.outcomes()) == {"200 one", "200 four"}


SCENARIOS = (
    a_rolling_update_step_by_step,
    a_blue_green_update_step_by_step,
    a_replica_that_goes_finishes_its_requests_before_it_is_told,
    a_change_of_the_number_takes_the_running_replicas_over,
    an_update_that_fails_leaves_the_old_replicas_serving,
)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Scenario, Future[None]]]:
    with at_once(SCENARIOS, tmp_path_factory.mktemp("machines")) as futures:
        yield futures


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_a_scenario(scenario: Scenario, played: dict[Scenario, Future[None]]) -> None:
    played[scenario].result()
