"""The bench works: every column gives figures for our own balancer. What they are is not judged."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.progress import Progress

from tests.bench.__main__ import main
from tests.bench.columns import COLUMNS, Scale
from tests.bench.proxies import PROXIES
from tests.bench.report import as_json
from tests.bench.rounds import measure_all
from tests.system.process import ROOT

TINY = Scale(
    rounds=1, seconds=0.1, rate=1000, mib=32, open_streams=50, streams=5, replicas=2, some=2
)
needs_gcc = pytest.mark.skipif(
    shutil.which("gcc") is None, reason="the bench compiles its load and its replica with gcc"
)


@needs_gcc
def test_every_column_measures() -> None:
    (ours,) = (proxy for proxy in PROXIES if proxy.name == "ours")
    # "many" is "some" on another stage, which would cost a second.
    columns = [column for column in COLUMNS if column.name != "many"]
    results = measure_all({"ours": ours.find()}, [ours], columns, TINY, Progress(disable=True))
    assert results.failures == {}
    figures = as_json(results, {})["figures"]
    for title, by_proxy in figures.items():
        (measured,) = by_proxy["ours"]["rounds"]
        # Added latency is a difference, of two small numbers here, and so may memory be.
        assert measured > 0 or title.startswith(("added latency", "KiB per")), title


@needs_gcc
def test_workers_are_measured() -> None:
    command = [sys.executable, "-m", "tests.bench.workers", "--seconds", "0.2", "--rounds", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.split("│") for line in done.stdout.splitlines() if line.startswith("│")]
    assert [row[1].strip() for row in rows] == ["1", "2", "1", "2", "4"]


@needs_gcc
def test_the_command_writes_markdown_and_json(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    command = [
        *(sys.executable, "-m", "tests.bench", "--quick", "--only", "ours"),
        *("--columns", "download", "--markdown", "--json", str(file)),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("| download"))
    written = json.loads(file.read_text())
    measured = written["figures"]["download, CPU us/MiB"]["ours"]
    assert measured["rounds"] == [measured["median"]]
    assert row == f"| download, CPU us/MiB | {measured['median']:.3g} |"
    assert written["proxies"]["ours"]["version"].startswith("skyserve-lb ")


def test_a_name_that_is_none_is_refused() -> None:
    refused = CliRunner().invoke(main, ["--only", "ours,squid"])
    assert refused.exit_code == 2
    assert "squid; there are ours, nginx, haproxy, envoy, vllm-router, stock" in refused.output
