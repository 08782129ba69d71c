"""The controller-side fix, on SkyPilot's real replica manager and database (see ``contract.py``)."""

from __future__ import annotations

import ast
import json
import os
import subprocess
from pathlib import Path

import pytest
from service import HERE, Event

CHECKS = tuple(
    node.name.removeprefix("check_")
    for node in ast.parse((HERE / "contract.py").read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
)
# Those that show the faults of SkyPilot as it ships, without chance in it.
FAIL_ON_STOCK = (
    "a_ready_replica_stays_listed",
    "several_replicas_ready_or_not",
    "the_order_of_any_of_is_no_change",
    "a_slow_probe_neither_delays_nor_reverts_an_update",
    "what_a_slow_probe_found_is_kept",
    "a_write_after_an_older_read_keeps_the_new_version",
    "a_relabel_does_not_undo_a_termination",
    "a_relabel_does_not_bring_back_a_removed_replica",
    "a_stale_view_scales_nothing_down",
    "a_restarted_controller_goes_on_where_it_was",
    "a_crash_between_two_writes_leaves_all_listed",
)

Results = dict[tuple[str, str], str]


def run_contract(python: Path, home: Path, hook: str, *checks: str) -> Results:
    """The fault of each check by name and mode; empty where it held."""
    home.mkdir()
    environ = {**os.environ, "HOME": str(home), "SKYSERVE_LB_HOOK": hook}
    command = (str(python), str(HERE / "contract.py"), *checks)
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    events: list[Event] = [json.loads(line) for line in done.stdout.splitlines()]
    return {(e["check"], e["mode"]): e["fault"] for e in events if e["event"] == "checked"}


@pytest.fixture(scope="module")
def fixed(wheel_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_contract(wheel_python, tmp_path_factory.mktemp("fixed") / "home", "fix")


@pytest.mark.parametrize("mode", ["rolling", "blue_green"])
@pytest.mark.parametrize("check", CHECKS)
def test_fixed_controller(fixed: Results, check: str, mode: str) -> None:
    assert fixed[check, mode] == ""


def test_stock_controller_fails_them_so_they_can_fail(wheel_python: Path, tmp_path: Path) -> None:
    results = run_contract(wheel_python, tmp_path / "home", "off", *FAIL_ON_STOCK)
    assert len(results) == 2 * len(FAIL_ON_STOCK)
    assert [check for check, fault in results.items() if "AssertionError" not in fault] == []
