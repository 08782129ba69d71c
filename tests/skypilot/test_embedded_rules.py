"""The rules of ``controller_client/embedded/versions.py`` against SkyPilot's own functions."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controller_client.embedded.versions import (
    Mode,
    Replica,
    Service,
    Status,
    active_versions,
    service_status,
)

CASES = 2000
SCRIPT = Path(__file__).with_name("rules_process.py")
SMALL = [{"cpus": 1}, {"cpus": 2}]

Json = dict[str, Any]


def task(**values: Any) -> st.SearchStrategy[Json]:
    """A task as SkyPilot writes it out. Most often two of them differ in the service alone."""
    rare = st.sampled_from
    return st.fixed_dictionaries(
        {
            "service": st.fixed_dictionaries(
                {"replica_policy": st.fixed_dictionaries({"min_replicas": st.integers(0, 3)})}
            ),
            "run": rare(["x"] * 7 + ["y"]),
            "resources": rare(
                [{}] * 4
                + [{"any_of": SMALL}, {"any_of": SMALL[::-1]}] * 2
                + [{"cpus": 1}, {"any_of": SMALL[:1]}]
            ),
            "file_mounts": rare([{}] * 9 + [{"/data": "s3://bucket"}]),
        },
        optional={"_user_specified_yaml": rare(["a", "b"]), "envs": rare([{}, {"A": "b"}])},
    ).map(without_mounts_at_times)


def without_mounts_at_times(config: Json) -> Json:
    """Now and then a task that does not say whether it has mounts, which is no "no" for SkyPilot."""
    if config.get("_user_specified_yaml") == "b" and config["run"] == "y":
        del config["file_mounts"]
    return config


statuses = st.dictionaries(
    st.integers(1, 6),
    st.sampled_from([*Status, Status.READY, Status.READY]).map(lambda status: status.value),
    min_size=1,
    max_size=6,
)
update = st.fixed_dictionaries(
    {"task": task(), "mode": st.sampled_from([mode.value for mode in Mode])},
    optional={"statuses": statuses},
)
change = st.fixed_dictionaries({"statuses": statuses})
services = st.fixed_dictionaries(
    {"task": task(), "steps": st.lists(st.one_of(change, update), min_size=1, max_size=6)}
)


class Ours:
    """A service under our rules, one step at a time."""

    def __init__(self, first: Json) -> None:
        self.service = Service("svc", {1: first}, 1, 0, 0)
        self.failed: list[Replica] = []  # which an update forgets, and SkyPilot keeps

    def step(self, step: Json) -> Json:
        service = self.service
        if "task" in step:
            before = list(service.replicas)
            service.tasks[step["version"]] = step["task"]
            service.update(step["version"], Mode(step["mode"]), 0.0)
            self.failed += [each for each in before if each not in service.replicas]
        for replica_id, status in step.get("statuses", {}).items():
            self._set_status(int(replica_id), Status(status))
        service.settle(0.0)
        least = {
            version: each["service"]["replica_policy"]["min_replicas"]
            for version, each in service.tasks.items()
        }
        chosen = active_versions(service.replicas, Mode.BLUE_GREEN, least)
        everyone = [*service.replicas, *self.failed]
        return {
            "active": service.active,
            "enough": chosen[0] if chosen else None,
            "status": service_status([each.status for each in everyone]),
            "versions": {str(each.id): each.version for each in everyone},
        }

    def _set_status(self, replica_id: int, status: Status) -> None:
        known = [*self.service.replicas, *self.failed]
        replica = next((each for each in known if each.id == replica_id), None)
        if replica is None:
            replica = Replica(replica_id, self.service.latest, status)
        replica.status = status
        self.failed = [each for each in self.failed if each is not replica]
        if replica not in self.service.replicas:
            self.service.replicas.append(replica)


@pytest.fixture(scope="module")
def theirs(
    stock_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Json], list[Json]]]:
    home = tmp_path_factory.mktemp("home")
    environ = {**os.environ, "HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    with (
        (home / "log").open("w") as log,
        subprocess.Popen(
            [str(stock_python), str(SCRIPT)],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        assert process.stdin
        assert process.stdout
        to, answers = process.stdin, process.stdout

        def play(service: Json) -> list[Json]:
            to.write(json.dumps(service) + "\n")
            to.flush()
            line = answers.readline()
            assert line, (home / "log").read_text()[-2000:]
            seen: list[Json] = json.loads(line)["seen"]
            return seen

        yield play
        to.close()


def test_the_same_befalls_replicas_under_our_rules_and_skypilots(
    theirs: Callable[[Json], list[Json]],
) -> None:
    happened = Counter[str]()

    @settings(
        max_examples=CASES,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(services)
    def check(service: Json) -> None:
        for version, step in enumerate(service["steps"], start=2):
            step["version"] = version
        ours = Ours(service["task"])
        for step, their in zip(service["steps"], theirs(service), strict=True):
            before = {each.id: each.version for each in ours.service.replicas}
            assert ours.step(step) == their
            if "task" in step:
                happened[step["mode"]] += 1
                now = {each.id: each.version for each in ours.service.replicas}
                happened["relabelled"] += any(now.get(each, 0) > before[each] for each in before)
                happened["kept apart"] += any(now.get(each) == before[each] for each in before)
            happened["two active"] += len(their["active"]) > 1
            happened["old one active"] += bool(
                their["active"] and max(their["active"]) < ours.service.latest
            )
        happened["cases"] += 1

    check()
    assert happened["cases"] >= CASES
    # That the cases are not all of the dull kind.
    wanted = ["rolling", "blue_green", "relabelled", "kept apart", "two active", "old one active"]
    assert {each: happened[each] for each in wanted if happened[each] < CASES / 50} == {}
