"""What the demo prints: what will run, how it goes, and what came of it.

Every colour goes with a character of its own, so that nothing is lost where there are none.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lb.demo.run import (
    CLIENT_TIMEOUT,
    DURATION,
    GAP,
    GRACE_PERIOD,
    LATE,
    NO_REPLICA_WAIT,
    OPTIONS,
    RATE,
    SCALE,
    SYNC_INTERVAL,
    UPDATES,
    Outcome,
    Run,
    Step,
)
from lb.syncer import URGENT_INTERVAL_SECONDS
from lb.tables import tables

CELL_SECONDS = 0.25
CELLS = round(DURATION / CELL_SECONDS)
START_AND_END_SECONDS = 7
CELLS_PER_TICK = 8
NAME_WIDTH = 20
REFRESHES_PER_SECOND = 10

EMPTY_LIST = "^"
UPDATE = "|"
BOTH = "+"
MARKS = {
    Outcome.ANSWERED: ("=", "black on green"),
    Outcome.ANSWERED_LATE: ("~", "black on yellow"),
    Outcome.REFUSED: ("x", "bold white on red"),
    Outcome.FAILED: ("!", "bold white on red"),
    Outcome.HUNG: ("?", "bold white on magenta"),
}
MEANINGS = {
    Outcome.ANSWERED: "answered 200",
    Outcome.ANSWERED_LATE: f"answered 200, but after more than {LATE:g} s",
    Outcome.REFUSED: f"answered 503, after {NO_REPLICA_WAIT:g} s without a replica",
    Outcome.FAILED: "failed in another way",
    Outcome.HUNG: f"hung: no answer within {CLIENT_TIMEOUT:g} s",
}


# --- before ---------------------------------------------------------------------------------------


def introduce(console: Console, runs: Sequence[Run]) -> None:
    """Say what the demo is about and what exactly will run."""
    console.print(
        "skyserve-lb demo: what a grace period makes of an empty ready list", style="bold"
    )
    console.print(
        "\nA SkyServe service is a number of replicas behind one load balancer, which asks the "
        f"service's controller every {SYNC_INTERVAL * SCALE:g} s which of them are ready. While "
        "the number of replicas is being changed, that ready list can be empty although every "
        "replica still serves. A load balancer that takes it at its word turns requests away "
        "until its next sync. skyserve-lb goes on with the replicas that it knows, for a grace "
        "period.\n"
    )
    console.print(_facts())
    console.print("\nThere are two runs, which differ in one option:")
    default = f"no option: {GRACE_PERIOD / SYNC_INTERVAL:g} x sync interval is the default"
    for number, run in enumerate(runs, 1):
        own = " ".join(run.options[len(OPTIONS) :])
        console.print(f"  {number}. {run.name} ({own or default})")
    console.print(
        "\nBeside them such a service is updated three times without the fault: a new number of "
        "replicas, and a new text of theirs in a rolling and in a blue-green update.\n"
    )


def _facts() -> Table:
    facts = Table.grid(padding=(0, 2, 0, 0))
    for name, fact in {
        "service": "skyserve-lb up: two replicas, local processes that answer at once",
        "fault": (
            f"--gap {GAP:g}s: for so long after an update the ready list goes by the versions from "
            f"before it; {len(UPDATES)} updates of 2 replicas to 3 or back, each just before a sync"
        ),
        "load balancer": f"skyserve-lb serve {' '.join(OPTIONS)}",
        "clients": f"{RATE} requests a second for {DURATION:g} s, whatever becomes of the earlier ones",
        "times": (
            f"a tenth of the usual ones: {SYNC_INTERVAL:g} s from sync to sync, not "
            f"{SYNC_INTERVAL * SCALE:g} s; a request waits {NO_REPLICA_WAIT:g} s for a replica, not "
            f"{NO_REPLICA_WAIT * SCALE:g} s; its client gives up after {CLIENT_TIMEOUT:g} s, not "
            f"{CLIENT_TIMEOUT * SCALE:g} s"
        ),
    }.items():
        facts.add_row(name, fact)
    return facts


# --- meanwhile ------------------------------------------------------------------------------------


@contextmanager
def progress(console: Console, runs: Sequence[Run]) -> Iterator[None]:
    """While the context lasts, show how the runs go on a terminal; elsewhere say how long it takes."""
    if not (sys.stdout.isatty() and console.is_interactive):
        console.print(f"This takes about {DURATION + START_AND_END_SECONDS:.0f} s.\n")
        yield
        return
    with Live(
        get_renderable=lambda: Group(_status(runs), timeline(runs)),
        console=console,
        refresh_per_second=REFRESHES_PER_SECOND,
        transient=True,
    ):
        yield


def _status(runs: Sequence[Run]) -> str:
    lines = [
        f"{run.name}: {run.sent} requests, {run.answered} answered 200, "
        f"{run.count(Outcome.REFUSED)} answered 503\n"
        for run in runs
        if run.sent
    ]
    return "".join(lines) or "Starting.\n"


# --- after ----------------------------------------------------------------------------------------


def conclude(console: Console, runs: Sequence[Run]) -> None:
    """Show what came of the runs."""
    console.print(table(runs))
    console.print(timeline(runs))
    console.print()
    console.print(_legend(runs))
    without, with_grace = runs
    console.print(
        f"\nNot answered 200: {without.sent - without.answered} of {without.sent} requests without a "
        f"grace period, {with_grace.sent - with_grace.answered} of {with_grace.sent} with one.",
        style="bold",
    )
    console.print(
        "\nBoth runs are skyserve-lb: they show what the grace period does, and not how SkyPilot's "
        "own load balancer fares. That was measured too: see README.md. One pause is not scaled: "
        f"after an empty list skyserve-lb syncs again in {URGENT_INTERVAL_SECONDS:g} s, even where "
        f"it otherwise does so every {SYNC_INTERVAL * SCALE:g} s."
    )


def conclude_updates(console: Console, run: Run, steps: Sequence[Step]) -> None:
    """Show the updates: the tables of `skyserve-lb status` on the way and at the end, and the timeline."""
    for step in steps:
        console.print(f"\n{step.title}\n", style="bold")
        for frame in step.shown:
            console.print(f"{frame.time - step.began:.1f} s after it began:")
            console.print(tables([frame.row]), "", soft_wrap=True)
    console.print(timeline([run], steps))
    console.print(
        f"\nIn the row of versions a digit is the one that serves, {BOTH} stands for two, {UPDATE} "
        f"for an update.\n{run.answered} of {run.sent} requests were answered 200."
    )


def table(runs: Sequence[Run]) -> Table:
    """The figures: a row for each measure, a column for each run."""
    figures = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    figures.add_column()
    for run in runs:
        figures.add_column(run.name, justify="right")
    figures.add_row("requests", *(str(run.sent) for run in runs))
    figures.add_row("answered 200", *(str(run.answered) for run in runs))
    for outcome, name in {
        Outcome.ANSWERED_LATE: f"  of these after more than {LATE:g} s",
        Outcome.REFUSED: "answered 503",
        Outcome.HUNG: MEANINGS[Outcome.HUNG],
        Outcome.FAILED: MEANINGS[Outcome.FAILED],
    }.items():
        figures.add_row(name, *(str(run.count(outcome)) for run in runs))
    figures.add_row("longest time without a 200", *(f"{run.longest_gap():.1f} s" for run in runs))
    return figures


def timeline(runs: Sequence[Run], steps: Sequence[Step] = ()) -> Text:
    """All runs over time: a row of cells each, and below it where the ready list was empty.

    With `steps` the row below has the versions that serve.
    """
    longest = max([DURATION, *(run.sent / RATE for run in runs if steps)])
    seconds = CELL_SECONDS * -(-longest // DURATION)
    ticks = (f"{cell * seconds:<{CELLS_PER_TICK}g}" for cell in range(0, CELLS, CELLS_PER_TICK))
    rows = [_row("seconds", Text("".join(ticks)))]
    for run in runs:
        worst = run.worst(seconds)
        cells = [MARKS[worst[cell]] if cell in worst else " " for cell in range(CELLS)]
        rows.append(_row(run.name, Text.assemble(*cells)))
        rows.append(
            _row("versions", _versions(run, steps, seconds))
            if steps
            else _row("", _empty_lists(run))
        )
    return Text("\n", no_wrap=True, overflow="crop").join(rows)


def _empty_lists(run: Run) -> Text:
    begun = min(CELLS, int(run.sent / RATE / CELL_SECONDS))
    ends = ((cell + 1) * CELL_SECONDS for cell in range(begun))
    return Text("".join(EMPTY_LIST if run.list_is_empty(end) else " " for end in ends), "bold")


def _versions(run: Run, steps: Sequence[Step], seconds: float) -> Text:
    """What served at the end of each cell, and where an update began."""
    frames = [frame for step in steps for frame in step.frames]
    begun = {int(step.began / seconds) for step in steps}
    cells = []
    for cell in range(min(CELLS, int(run.sent / RATE / seconds))):
        past = [frame.row["version"] for frame in frames if frame.time <= (cell + 1) * seconds]
        active = past[-1] if past else [1]
        mark = BOTH if len(active) > 1 else "".join(map(str, active)) or " "
        cells.append(UPDATE if cell in begun else mark)
    return Text("".join(cells))


def _row(name: str, cells: Text) -> Text:
    cells.rstrip()
    return Text.assemble(f"{name:<{NAME_WIDTH}}", cells)


def _legend(runs: Sequence[Run]) -> Group:
    """What the characters mean, as far as they occur."""
    marks = Table.grid(padding=(0, 1, 0, 0))
    for outcome, mark in MARKS.items():
        if any(run.count(outcome) for run in runs):
            marks.add_row(Text(*mark), MEANINGS[outcome])
    marks.add_row(Text(EMPTY_LIST, "bold"), "the ready list was empty")
    return Group(
        f"One character stands for the requests sent in {CELL_SECONDS:g} s: the worst of them.",
        Padding(marks, (0, 0, 0, 2)),
    )
