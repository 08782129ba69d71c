"""Ours beside other proxies: one run, interleaved, on the same raw replicas.

    python -m tests.bench                                          all of it
    python -m tests.bench --quick                                  the picture
    python -m tests.bench --quick --only ours,envoy --columns get,post,sse    10 to 20 seconds
    python -m tests.bench --quick --only ours --base ../before     what a change is worth

The proxies have one core, and one of them works at a time; replicas, load and bench have the other
cores. In each round every column is measured on every proxy; the table gives medians, spread and
ratios to ours. The ratios are the result: the figures alone depend on the machine. CPU is user and
system time of all the proxy's processes.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress

from tests.bench.columns import COLUMNS, CONNECTIONS, QUICK, Scale
from tests.bench.machine import (
    LOAD_CORES,
    PROXY_CORE,
    BenchError,
    raise_file_limit,
    stay_off_the_proxy_core,
)
from tests.bench.proxies import FAIR, PROXIES, MissingError, Proxy, another_checkout, version_of
from tests.bench.report import as_json, markdown, tables
from tests.bench.rounds import measure_all

console = Console(stderr=True)


def chosen(text: str | None, names: list[str]) -> list[str]:
    """The names in a list with commas, in our order."""
    if text is None:
        return names
    wanted = text.split(",")
    if strangers := [name for name in wanted if name not in names]:
        raise click.BadParameter(f"{', '.join(strangers)}; there are {', '.join(names)}")
    return [name for name in names if name in wanted]


def found(proxies: list[Proxy]) -> dict[str, str]:
    """The program of each proxy that is here; of the others it is said why they are left out."""
    programs = {}
    for proxy in proxies:
        with console.status(f"looking for {proxy.name}"):
            try:
                programs[proxy.name] = proxy.find()
            except MissingError as missing:
                console.print(f"{proxy.name} is left out: {missing}")
    return programs


def about(programs: dict[str, str], proxies: list[Proxy], scale: Scale) -> dict[str, Any]:
    return {
        "machine": {
            "processor": processor(),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "proxy_core": PROXY_CORE,
            "load_cores": LOAD_CORES,
            "load_average_at_start": os.getloadavg()[0],
        },
        "scale": vars(scale) | {"connections": CONNECTIONS},
        "settings": FAIR,
        "proxies": {
            proxy.name: {
                "version": version_of(proxy, programs[proxy.name]),
                "settings": proxy.settings,
            }
            for proxy in proxies
        },
    }


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


@click.command(help="Measure skyserve-lb beside other proxies.")
@click.option("--quick", is_flag=True, help="One short round.")
@click.option("--only", metavar="NAME,...", help=", ".join(proxy.name for proxy in PROXIES))
@click.option("--columns", metavar="NAME,...", help=", ".join(column.name for column in COLUMNS))
@click.option(
    "--base",
    metavar="FOLDER",
    type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path),
    help="Another checkout of ours, to measure beside.",
)
@click.option("--rounds", type=click.IntRange(1))
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True))
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown, not a table.")
def main(
    quick: bool,
    only: str | None,
    columns: str | None,
    base: Path | None,
    rounds: int | None,
    seconds: float | None,
    json_file: Path | None,
    as_markdown: bool,
) -> None:
    names = chosen(only, [proxy.name for proxy in PROXIES])
    wanted = chosen(columns, [column.name for column in COLUMNS])
    scale = QUICK if quick else Scale()
    given = {"rounds": rounds, "seconds": seconds}
    scale = Scale(**vars(scale) | {key: value for key, value in given.items() if value})
    raise_file_limit()
    stay_off_the_proxy_core()
    proxies = [proxy for proxy in PROXIES if proxy.name in names]
    if base:
        proxies.append(another_checkout(base))
    try:
        programs = found(proxies)
        proxies = [proxy for proxy in proxies if proxy.name in programs]
        facts = about(programs, proxies, scale)
        with Progress(console=console) as progress:
            picked = [column for column in COLUMNS if column.name in wanted]
            results = measure_all(programs, proxies, picked, scale, progress)
    except BenchError as error:
        raise click.ClickException(str(error)) from None
    if as_markdown:
        print(markdown(results, facts))
    else:
        Console(width=None if sys.stdout.isatty() else 200).print(*tables(results, facts), sep="\n")
    for what, why in results.failures.items():
        console.print(f"no figure for {what}: {why}")
    if json_file:
        json_file.write_text(json.dumps(as_json(results, facts), indent=1) + "\n")


if __name__ == "__main__":
    main()
