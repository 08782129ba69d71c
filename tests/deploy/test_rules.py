"""The alerting rules under `promtool`, and the files that are made of them and of the dashboard."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yaml"
CASES = ("tests.yaml", "tests-slow.yaml")
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool (Debian: prometheus) is not installed"
)


def promtool(*arguments: object) -> tuple[int, str]:
    """The exit code, and all that it printed."""
    ended = subprocess.run(
        [str(PROMTOOL), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )
    return ended.returncode, ended.stdout


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def all_rules() -> Iterator[dict[str, Any]]:
    for group in read(RULES)["groups"]:
        yield from group["rules"]


ALERTS = {rule["alert"]: rule for rule in all_rules() if "alert" in rule}


@needs_promtool
def test_promtool_takes_rules_and_configuration() -> None:
    assert promtool("check", "rules", RULES)[0] == 0
    assert promtool("check", "config", RULES.parent / "prometheus.yaml")[0] == 0


@needs_promtool
@pytest.mark.parametrize("cases", CASES)
def test_each_alert_fires_when_it_must_and_only_then(cases: str) -> None:
    code, said = promtool("test", "rules", RULES.parent / cases)
    assert code == 0, said


def wrong_with(expression: str, tmp_path: Path) -> list[tuple[str, bool]]:
    """Which cases notice that every alert is this; for each the alert, and whether it was to fire."""
    rules = [{"alert": name, "expr": expression} for name in ALERTS]
    groups = [{"name": "all", "rules": rules}]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
    noticed = []
    for cases in CASES:
        shutil.copy(RULES.parent / cases, tmp_path)
        _, said = promtool("test", "rules", tmp_path / cases)
        for name, expected in re.findall(r'alertname=\\"(\w+)\\".*\n +exp: *(nil|\{)', said):
            noticed.append((name, expected != "nil"))
    return noticed


@needs_promtool
def test_no_alert_lacks_a_case_in_which_it_must_fire(tmp_path: Path) -> None:
    noticed = wrong_with("vector(0) > 1", tmp_path)
    assert {name for name, fires in noticed if fires} == ALERTS.keys()


@needs_promtool
def test_no_alert_lacks_a_case_in_which_it_must_not_fire(tmp_path: Path) -> None:
    noticed = wrong_with("vector(1)", tmp_path)
    assert {name for name, fires in noticed if not fires} == ALERTS.keys()


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_what_is_wrong_and_what_to_do(name: str) -> None:
    assert name.startswith("SkyserveLB")
    alert = ALERTS[name]
    assert alert["labels"].keys() == {"severity"}
    assert alert["labels"]["severity"] in ("critical", "warning")
    notes = alert["annotations"]
    assert notes.keys() == {"summary", "description", "runbook"}
    assert all(text.endswith((".", ").")) for text in notes.values())
    assert len(notes["runbook"]) > 100


def test_no_two_rules_have_one_name() -> None:
    names = [rule.get("alert") or rule["record"] for rule in all_rules()]
    assert len(set(names)) == len(names)


# --- what is made of them -----------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["prometheus", "grafana"])
def test_the_files_are_those_that_the_generator_makes(folder: str) -> None:
    made: dict[str, str] = runpy.run_path(str(DEPLOY / folder / "generate.py"))["files"]()
    for name, text in made.items():
        committed = (DEPLOY / folder / name).read_text(encoding="utf-8")
        assert committed == text, f"run python deploy/{folder}/generate.py"


@pytest.mark.parametrize("name", ["prometheus-rule.yaml", "vm-rule.yaml"])
def test_the_operators_get_the_same_rules(name: str) -> None:
    assert read(RULES.parent / name)["spec"] == read(RULES)


@pytest.mark.parametrize(
    ("name", "endpoints", "relabelling"),
    [
        ("pod-monitor.yaml", "podMetricsEndpoints", "relabelings"),
        ("service-monitor.yaml", "endpoints", "relabelings"),
        ("vm-pod-scrape.yaml", "podMetricsEndpoints", "relabelConfigs"),
    ],
)
def test_targets_get_the_job_that_the_rules_know(
    name: str, endpoints: str, relabelling: str
) -> None:
    (endpoint,) = read(RULES.parent / name)["spec"][endpoints]
    keep, job = endpoint[relabelling]
    assert (keep["action"], keep["regex"]) == ("keep", "skyserve-lb")
    assert job["targetLabel"] == "job"
    assert f'up{{job="{job["replacement"]}"}} == 0' == ALERTS["SkyserveLBDown"]["expr"]
    (scrape,) = read(RULES.parent / "prometheus.yaml")["scrape_configs"]
    assert scrape["job_name"] == job["replacement"]


def test_the_dashboard_in_the_resource_is_the_dashboard() -> None:
    resource = read(DEPLOY / "grafana" / "grafana-dashboard.yaml")
    dashboard = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text(encoding="utf-8"))
    assert json.loads(resource["spec"]["json"]) == dashboard


def test_the_dashboard_is_whole() -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text(encoding="utf-8"))
    assert [v["name"] for v in dashboard["templating"]["list"]] == [
        "datasource",
        "namespace",
        "service",
        "instance",
    ]
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not taken & cells, f"{panel['title']} lies on another"
        taken |= cells
        assert panel["type"] == "row" or panel["targets"]
