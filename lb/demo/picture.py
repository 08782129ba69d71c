"""What the demo prints: what will run, how it goes, and what came of it.

Every colour has a character beside it, so that nothing is lost where there are none.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lb.demo.run import (
    CLIENT_TIMEOUT,
    DURATION,
    LATE,
    NO_REPLICA_WAIT,
    RATE,
    SCALE,
    SYNC_INTERVAL,
    UPDATES,
    Outcome,
    Run,
)

CELL_SECONDS = 0.25
CELLS = round(DURATION / CELL_SECONDS)
CELLS_PER_TICK = 8
NAME_WIDTH = 20
REFRESH_SECONDS = 0.1

MARKS = {
    Outcome.ANSWERED: ("=", "black on green"),
    Outcome.ANSWERED_LATE: ("~", "black on yellow"),
    Outcome.REFUSED: ("x", "bold white on red"),
    Outcome.FAILED: ("!", "bold white on red"),
    Outcome.HUNG: ("?", "bold white on magenta"),
}
EMPTY_LIST = "^"
MEANINGS = {
    Outcome.ANSWERED: "answered 200",
    Outcome.ANSWERED_LATE: f"answered 200, but after more than {LATE:g} s",
    Outcome.REFUSED: "answered 503",
    Outcome.FAILED: "failed in another way",
    Outcome.HUNG: f"no answer within {CLIENT_TIMEOUT:g} s (hung)",
}


def introduce(console: Console, runs: Sequence[Run]) -> None:
    """Say what the demo is about and what exactly will run."""
    console.print(
        "skyserve-lb demo: an empty ready list, and what a grace period makes of it\n", style="bold"
    )
    console.print(
        f"SkyServe's controller tells its load balancer every {SYNC_INTERVAL * SCALE:g} s which "
        "replicas are ready. When only the number of replicas is changed, this ready list can be "
        "empty for a while, although all of them still serve. A load balancer that takes it at "
        "its word then turns every request away until the next sync. skyserve-lb goes on with "
        "the replicas it knows, for a grace period.\n"
    )
    facts = Table.grid(padding=(0, 2))
    facts.add_row("replicas", "2 processes, both ready to answer all the time")
    facts.add_row("controller", f"a fake one; {len(UPDATES)} times a run, one ready list is empty")
    facts.add_row("load balancer", "skyserve-lb serve, a process of its own, new for each run")
    facts.add_row("clients", f"{RATE} requests a second for {DURATION:g} s, whatever is answered")
    facts.add_row(
        "times",
        f"a tenth of the usual: syncs {SYNC_INTERVAL:g} s apart, not {SYNC_INTERVAL * SCALE:g} s; "
        f"a request waits {NO_REPLICA_WAIT:g} s for a replica, not {NO_REPLICA_WAIT * SCALE:g} s; "
        f"its client gives up after {CLIENT_TIMEOUT:g} s, not {CLIENT_TIMEOUT * SCALE:g} s",
    )
    console.print(facts)
    console.print()
    for number, run in enumerate(runs, 1):
        console.print(f"Run {number}, {run.name}:")
        console.print(f"  skyserve-lb serve {' '.join(run.options)}")
    console.print()


@asynccontextmanager
async def progress(console: Console, runs: Sequence[Run]) -> AsyncIterator[None]:
    """Show how the runs go, while the context lasts, on a terminal that can."""
    if not (sys.stdout.isatty() and console.is_interactive):
        console.print(f"This takes about {len(runs) * DURATION + 4:.0f} s.\n")
        yield
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        async with anyio.create_task_group() as background:
            background.start_soon(_refresh, live, runs)
            yield
            background.cancel_scope.cancel()


async def _refresh(live: Live, runs: Sequence[Run]) -> None:
    while True:
        live.update(Group(_status(runs), timeline(runs)), refresh=True)
        await anyio.sleep(REFRESH_SECONDS)


def _status(runs: Sequence[Run]) -> str:
    number, run = max(
        ((number, run) for number, run in enumerate(runs, 1) if run.syncs),
        default=(1, runs[0]),
    )
    return (
        f"run {number} of {len(runs)}, {run.sent / RATE:4.1f} of {DURATION:g} s: "
        f"{run.sent} requests, {run.answered} answered 200, {run.count(Outcome.REFUSED)} x 503\n"
    )


def conclude(console: Console, runs: Sequence[Run]) -> None:
    """Show what came of the runs."""
    console.print(table(runs))
    console.print()
    console.print(timeline(runs))
    console.print()
    console.print(_legend(runs))
    console.print()
    console.print(
        "Both runs are skyserve-lb: this shows what the grace period does, and is no comparison "
        "with SkyPilot's own load balancer. What was measured of that one is in README.md."
    )


def table(runs: Sequence[Run]) -> Table:
    """The figures: one row a measure, one column a run."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("")
    for run in runs:
        shown.add_column(run.name, justify="right")
    rows = {
        "requests": [str(run.sent) for run in runs],
        "answered 200": [str(run.answered) for run in runs],
        f"  of these after more than {LATE:g} s": _counts(runs, Outcome.ANSWERED_LATE),
        **{
            MEANINGS[outcome]: _counts(runs, outcome)
            for outcome in (Outcome.REFUSED, Outcome.HUNG, Outcome.FAILED)
        },
        "longest time without an answer 200": [f"{run.longest_gap():.1f} s" for run in runs],
    }
    for name, cells in rows.items():
        shown.add_row(name, *cells)
    return shown


def _counts(runs: Sequence[Run], outcome: Outcome) -> list[str]:
    return [str(run.count(outcome)) for run in runs]


def timeline(runs: Sequence[Run]) -> Text:
    """Both runs over time: a row of cells each, and below it where the ready list was empty."""
    ticks = (
        f"{cell * CELL_SECONDS:<{CELLS_PER_TICK}g}" for cell in range(0, CELLS, CELLS_PER_TICK)
    )
    lines = [_line("seconds", Text("".join(ticks).rstrip()))]
    for run in runs:
        begins = [cell * CELL_SECONDS for cell in range(CELLS)]
        lines.append(_line(run.name, Text.assemble(*(_mark(run, begin) for begin in begins))))
        now = run.sent / RATE
        empty = [
            EMPTY_LIST if begin < now and run.list_is_empty(begin) else " " for begin in begins
        ]
        lines.append(_line("", Text("".join(empty).rstrip(), style="bold")))
    return Text("\n", no_wrap=True, overflow="crop").join(lines)


def _line(name: str, cells: Text) -> Text:
    return Text.assemble(f"{name:<{NAME_WIDTH}}", cells)


def _mark(run: Run, begin: float) -> tuple[str, str]:
    worst = run.worst(begin, begin + CELL_SECONDS)
    return (" ", "") if worst is None else MARKS[worst]


def _legend(runs: Sequence[Run]) -> Table:
    """What the characters mean, as far as they occur."""
    legend = Table.grid(padding=(0, 1))
    legend.add_row(
        "",
        f"One character stands for the requests sent in {CELL_SECONDS:g} s, and tells of the worst:",
    )
    for outcome, mark in MARKS.items():
        if any(run.count(outcome) for run in runs):
            legend.add_row(Text(*mark), MEANINGS[outcome])
    legend.add_row(EMPTY_LIST, "the ready list that the load balancer got last was empty")
    return legend


def fault(runs: Sequence[Run]) -> str | None:
    """Why the runs did not show what they should, or None if they did."""
    without, with_grace = runs
    for run in runs:
        if run.empty_lists != len(UPDATES):
            return f"{run.name}: {run.empty_lists} ready lists were empty, not {len(UPDATES)}"
    if with_grace.answered != with_grace.sent:
        lost = with_grace.sent - with_grace.answered
        return f"{with_grace.name}: {lost} of {with_grace.sent} requests were not answered 200"
    if not without.count(Outcome.REFUSED):
        return f"{without.name}: no request was answered 503, so there was nothing to cure"
    return None
