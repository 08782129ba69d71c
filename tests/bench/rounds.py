"""The order of a run: rounds, in each of them every column, in each of those every proxy."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.progress import Progress

from tests.bench.columns import Column, Scale
from tests.bench.machine import BenchError
from tests.bench.proxies import Proxy
from tests.bench.report import Results
from tests.bench.stage import Stage, stage


def measure_all(
    programs: dict[str, str],
    proxies: list[Proxy],
    columns: list[Column],
    scale: Scale,
    progress: Progress,
) -> Results:
    """What changes on the machine while it runs changes for all proxies alike."""
    results = Results([proxy.name for proxy in proxies])
    task = progress.add_task("", total=scale.rounds * len(columns) * len(proxies))
    with tempfile.TemporaryDirectory() as folder:
        for count in sorted({column.replicas(scale) for column in columns}):
            here = [column for column in columns if column.replicas(scale) == count]
            with stage(programs, count, Path(folder)) as on:
                for turn in range(scale.rounds):
                    for column in here:
                        # Who comes first changes, so that none is always after the same other.
                        first = turn % len(proxies)
                        for proxy in proxies[first:] + proxies[:first]:
                            doing = f"round {turn + 1}, {column.name}: {proxy.name}"
                            progress.update(task, description=doing)
                            measure_one(results, column, proxy, on, scale)
                            progress.advance(task)
    return results


def measure_one(results: Results, column: Column, proxy: Proxy, on: Stage, scale: Scale) -> None:
    try:
        if why := dict(proxy.lacks).get(column.name):
            raise BenchError(why)
        results.add(proxy.name, column.run(on, proxy, scale))
    except BenchError as error:
        results.failures[f"{column.name}: {proxy.name}"] = str(error)
