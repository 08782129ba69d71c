"""A real Prometheus scrapes a running balancer, and is asked all that rules and dashboard ask."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from controller_client.testing import FakeController, ScriptedReplica, answer, cut, reset, stream
from tests.net.harness import Closed, request
from tests.net.test_tls import MakePair, Pair, TlsClient, make_pair, pair
from tests.system.process import ROOT, Serve

__all__ = ["make_pair", "pair"]  # fixtures

PROMETHEUS = shutil.which("prometheus")
pytestmark = pytest.mark.skipif(
    PROMETHEUS is None, reason="prometheus (Debian: prometheus) is not installed"
)

RULES: dict[str, Any] = yaml.safe_load((ROOT / "deploy/prometheus/rules.yaml").read_text())
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/dashboard.json").read_text())
ALL_RULES: list[dict[str, Any]] = [rule for group in RULES["groups"] for rule in group["rules"]]
ALERTS = [rule for rule in ALL_RULES if "alert" in rule]
PATIENCE_SECONDS = 30.0

Found = TypeVar("Found")


def wait_for(look: Callable[[], Found], what: str) -> Found:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        if found := look():
            return found
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


# --- what runs ----------------------------------------------------------------------------------


class Prometheus:
    """`with Prometheus(folder, target) as prometheus: ...`; our rules, without their pauses."""

    def __init__(self, folder: Path, target: tuple[str, int]) -> None:
        self._folder = folder
        quick = [
            {"name": group["name"], "rules": [*map(without_pause, group["rules"])]}
            for group in RULES["groups"]
        ]
        shown = {"name": "shown", "rules": [firing(rule) for rule in ALERTS]}
        config = {
            "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
            "rule_files": ["rules.yaml"],
            "scrape_configs": [
                {
                    "job_name": "skyserve-lb",
                    "static_configs": [
                        {"targets": [f"{target[0]}:{target[1]}"], "labels": {"namespace": "ml"}}
                    ],
                }
            ],
        }
        (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": [*quick, shown]}))
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))

    def __enter__(self) -> Prometheus:
        self._process = subprocess.Popen(
            [
                str(PROMETHEUS),
                *("--config.file", str(self._folder / "prometheus.yaml")),
                *("--storage.tsdb.path", str(self._folder / "data")),
                *("--web.listen-address", "127.0.0.1:0"),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr is not None
        said = []
        for line in self._process.stderr:
            said.append(line)
            if found := re.search(r'msg="Listening on" address=(\S+)', line):
                self._address = found[1]
                break
        else:
            pytest.fail("Prometheus ended: " + "".join(said))
        self._reader = threading.Thread(target=self._process.stderr.read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stderr is not None
        self._process.stderr.close()

    def get(self, path: str, **query: str) -> Any:
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=20) as answered:
                return json.load(answered)["data"]
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 503:  # it is still starting
                    return None
                pytest.fail(f"{query}: {error.read().decode()}")

    def values(self, query: str) -> list[float]:
        """The numbers that a query finds; one that is NaN shows nothing, and is none."""
        data = self.get("query", query=query)
        if data is None:
            return []
        if data["resultType"] == "scalar":
            return [float(data["result"][1])]
        found = [float(each["value"][1]) for each in data["result"]]
        return [value for value in found if value == value]


def without_pause(rule: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in rule.items() if key != "for"}


def firing(rule: dict[str, Any]) -> dict[str, Any]:
    """An alert that fires at once, with the same text."""
    expression = "vector(0.5)"
    for label in ("service", "instance", "replica", "reason"):
        expression = f'label_replace({expression}, "{label}", "the {label}", "", "")'
    notes = rule["annotations"]
    return {"alert": f"Shown{rule['alert']}", "expr": expression, "annotations": notes}


@contextmanager
def traffic(serve: Serve, pair: Pair) -> Iterator[None]:
    """Requests of all kinds, over and over."""
    over = threading.Event()
    asked = [
        request(),
        request("POST", body=b"question"),
        b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    ]

    def ask() -> None:
        while not over.wait(0.01):
            for data in asked:
                with contextlib.suppress(Closed), TlsClient(serve.address, pair) as client:
                    client.ask(data)
            with TlsClient(serve.address, pair) as client:
                client.send(request())  # and leave

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    yield
    over.set()
    thread.join(PATIENCE_SECONDS)


@pytest.fixture(scope="module")
def serve(make_pair: MakePair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """A balancer with TLS that answers, fails and is left, and whose list is held in the end."""
    pair = make_pair()
    options = {
        "--service-name": "chat",
        "--grace-period": "1h",
        "--tls-keyfile": str(pair.key),
        "--tls-certfile": str(pair.certificate),
    }
    with ExitStack() as stack:
        controller = stack.enter_context(FakeController())
        a, b = (stack.enter_context(ScriptedReplica(name)) for name in "ab")
        a.behave_always(answer(status=500), answer(status=404), cut(), reset(), answer())
        b.behave_always(answer(), stream([b"some", b"thing"], every=0.01))
        controller.set_ready([a.url, b.url])
        words = [word for pair_ in options.items() for word in pair_]
        serve = stack.enter_context(Serve(controller.url, *words))
        serve.wait_for_replicas(2)
        stack.enter_context(traffic(serve, pair))
        serve.log.wait_for("request.finished", 20)
        controller.set_ready([])
        serve.log.wait_for("list.held")
        yield serve


@pytest.fixture(scope="module")
def prometheus(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with Prometheus(tmp_path_factory.mktemp("prometheus"), serve.admin) as prometheus:
        yield prometheus


# --- the queries --------------------------------------------------------------------------------

VARIABLES = {
    "$__rate_interval": "10s",
    "$__range": "1m",
    "$namespace": "ml",
    "$service": "chat",
    "$instance": ".*",
}


def dashboard_queries() -> list[tuple[str, str]]:
    """Each query of each panel, with a name."""
    return [
        (f"{panel['title']} {target['refId']}", target["expr"])
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", [])
    ]


def filled_in(query: str) -> str:
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    assert "$" not in query
    return query


OPERATORS = re.compile(r"\s(?:and|unless|or)\s|\s(?:[<>]=?|==|!=)\s")


def parts(expression: str) -> Iterator[str]:
    """What an alert compares: when all is well the comparison finds nothing, but its parts do."""
    if inner := re.fullmatch(r"absent\((.+)\)", expression):
        expression = inner[1]
    depth = begin = 0
    for index, char in enumerate(expression):
        depth += (char in "({[") - (char in ")}]")
        if depth == 0 and (operator := OPERATORS.match(expression, index)):
            yield expression[begin:index].strip()
            begin = operator.end()
    yield expression[begin:].strip()


def test_an_alert_is_taken_apart() -> None:
    expression = 'a > 2 * 3 and sum(b{x!="a > b"} == 1) / c <= (d and e)'
    assert list(parts(expression)) == ["a", "2 * 3", 'sum(b{x!="a > b"} == 1) / c', "(d and e)"]
    assert list(parts("absent(a)")) == ["a"]


def finds_nothing(prometheus: Prometheus, queries: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those of the queries that have no answer, however long one waits."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        queries = [(name, query) for name, query in queries if not prometheus.values(query)]
        if not queries or time.monotonic() > deadline:
            return queries
        time.sleep(0.5)


def test_each_query_of_the_dashboard_finds_something(prometheus: Prometheus) -> None:
    queries = [(name, filled_in(query)) for name, query in dashboard_queries()]
    assert len(queries) > 40
    assert not finds_nothing(prometheus, queries)


def test_each_part_of_each_rule_finds_something(prometheus: Prometheus) -> None:
    queries = [
        (rule.get("alert") or rule["record"], part)
        for rule in ALL_RULES
        for part in (parts(rule["expr"]) if "alert" in rule else [rule["expr"]])
    ]
    assert not finds_nothing(prometheus, queries)
    recorded = [(rule["record"], rule["record"]) for rule in ALL_RULES if "record" in rule]
    assert not finds_nothing(prometheus, recorded)


def test_the_variables_of_the_dashboard_have_values(prometheus: Prometheus) -> None:
    for variable in DASHBOARD["templating"]["list"][1:]:
        found = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"])
        assert found
        query, label = filled_in(found[1]), found[2]
        assert not finds_nothing(prometheus, [(variable["name"], query)])
        series = prometheus.get("series", **{"match[]": query})
        assert [each[label] for each in series]


def test_a_rule_fires_with_its_labels(prometheus: Prometheus) -> None:
    def fired() -> list[dict[str, Any]]:
        alerts = prometheus.get("alerts")["alerts"]
        return [each for each in alerts if each["labels"]["alertname"] == "SkyserveLBListHeld"]

    (alert,) = wait_for(fired, "the list is held")
    assert alert["state"] == "firing"
    labels = alert["labels"]
    assert (labels["namespace"], labels["service"], labels["job"]) == ("ml", "chat", "skyserve-lb")
    assert "of service chat has held 2 replicas" in alert["annotations"]["summary"]


def test_the_text_of_each_alert_is_filled_in(prometheus: Prometheus) -> None:
    def shown() -> dict[str, dict[str, str]]:
        found = {
            each["labels"]["alertname"].removeprefix("Shown"): each["annotations"]
            for each in prometheus.get("alerts")["alerts"]
            if each["labels"]["alertname"].startswith("Shown")
        }
        return found if len(found) == len(ALERTS) else {}

    for name, notes in wait_for(shown, "all alerts are shown").items():
        text = " ".join(notes.values())
        assert not re.search(r"\{\{|<error|<no value>|%!", text), (name, text)
        if "{{ $labels.service" in str(next(r for r in ALERTS if r["alert"] == name)):
            assert "the service" in text


# --- the names ----------------------------------------------------------------------------------


def all_queries() -> list[str]:
    return [query for _, query in dashboard_queries()] + [rule["expr"] for rule in ALL_RULES]


@pytest.fixture
def exported(serve: Serve) -> dict[str, dict[str, set[str]]]:
    """The labels, and their values, of each sample that the balancer exports."""
    found: dict[str, dict[str, set[str]]] = {}
    for family in text_string_to_metric_families(serve.ask_admin("/metrics").body.decode()):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found


def test_each_metric_that_is_asked_for_is_exported(
    exported: dict[str, dict[str, set[str]]],
) -> None:
    known = exported.keys() | {rule["record"] for rule in ALL_RULES if "record" in rule}
    asked = {name for query in all_queries() for name in re.findall(r"\bskyserve_lb[\w:]+", query)}
    assert asked <= known


def test_a_balancer_beside_its_controller_says_so(
    exported: dict[str, dict[str, set[str]]],
) -> None:
    assert exported["skyserve_lb_info"]["mode"] == {"sidecar"}


def test_all_that_is_exported_is_shown_or_watched(exported: dict[str, dict[str, set[str]]]) -> None:
    asked = " ".join(all_queries())
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in exported}
    assert [name for name in families if name not in asked] == []


def test_each_label_that_is_asked_for_is_exported_with_that_value(
    exported: dict[str, dict[str, set[str]]],
) -> None:
    looked_at = 0
    for query in all_queries():
        for name, selector in re.findall(r"\b(skyserve_lb_\w+)\{([^}]*)\}", query):
            for label, pattern in re.findall(r'(\w+)(?:=~|!=|!~|=)"([^"]*)"', selector):
                if pattern.startswith("$"):
                    continue
                for value in pattern.replace(r"\\", "\\").split("|"):
                    values = exported[name][label]
                    assert any(re.fullmatch(value, each) for each in values), (query, value)
                    looked_at += 1
    assert looked_at > 50
