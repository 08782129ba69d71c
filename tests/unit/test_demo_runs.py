"""The measures of the demo and the judgement over its two runs."""

import io

from rich.console import Console

from controller_client.fakes.controller import Answer, SyncRecord
from lb.demo.picture import CELL_SECONDS, table, timeline
from lb.demo.run import (
    EMPTY_LIST,
    GRACE_PERIOD,
    NO_REPLICA_WAIT,
    SCALE,
    SYNC_INTERVAL,
    UPDATES,
    Outcome,
    Result,
    Run,
    fault,
    plan,
)
from lb.settings import load


def played(*outcomes: Outcome, name: str = "a run", empty_lists: int = len(UPDATES)) -> Run:
    """A run with one request in each cell of the timeline."""
    run = Run(name, began=100.0, sent=len(outcomes))
    for number, outcome in enumerate(outcomes):
        sent = number * CELL_SECONDS
        run.results.append(Result(sent, sent + 0.01, outcome))
    run.syncs += [SyncRecord(101.0, (), EMPTY_LIST) for _ in range(empty_lists)]
    return run


def printed(renderable: object) -> list[str]:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


# --- the settings -----------------------------------------------------------------------------


def test_the_times_are_the_defaults_scaled() -> None:
    defaults = load({"controller_url": "http://127.0.0.1:1", "port": "0"}, {})
    assert defaults.sync_interval == SCALE * SYNC_INTERVAL
    assert defaults.no_replica_wait == SCALE * NO_REPLICA_WAIT
    assert defaults.grace_period == SCALE * GRACE_PERIOD


def test_the_runs_differ_in_the_grace_period_alone() -> None:
    assert [run.options for run in plan()] == [("--grace-period", "0"), ()]


# --- what is measured -------------------------------------------------------------------------


def test_the_longest_gap_lies_between_two_answers() -> None:
    run = Run("a run")
    run.results += [
        Result(0.0, 0.5, Outcome.ANSWERED),
        Result(0.1, 3.0, Outcome.ANSWERED_LATE),
        Result(0.2, 1.2, Outcome.REFUSED),
        Result(0.3, 2.0, Outcome.FAILED),
        Result(0.4, 6.4, Outcome.HUNG),
    ]
    assert run.longest_gap() == 2.5


def test_the_longest_gap_may_be_at_the_begin_or_at_the_end() -> None:
    late = Run("late", results=[Result(0.0, 4.0, Outcome.ANSWERED_LATE)])
    assert late.longest_gap() == 4.0
    early = Run("early", results=[Result(0.0, 1.0, Outcome.ANSWERED)])
    early.results.append(Result(9.0, 9.5, Outcome.REFUSED))
    assert early.longest_gap() == 8.0
    assert Run("nothing sent").longest_gap() == 0.0


def test_a_list_is_empty_until_the_next_that_is_not() -> None:
    run = Run("a run", began=100.0)
    assert not run.list_is_empty(0.0)
    run.syncs += [SyncRecord(102.0, (), EMPTY_LIST), SyncRecord(104.0, (), Answer())]
    assert [run.list_is_empty(time) for time in (1.9, 2.0, 3.9, 4.0)] == [False, True, True, False]
    assert run.empty_lists == 1


# --- what is shown ----------------------------------------------------------------------------


def test_each_outcome_has_a_row_and_they_add_up() -> None:
    run = played(*Outcome, Outcome.ANSWERED, name="one")
    rows = [line.rsplit(maxsplit=1) for line in printed(table([run]))[3:-2]]
    assert rows == [
        [" requests", "6"],
        [" answered 200", "3"],
        ["   of these after more than 0.5 s", "1"],
        [" answered 503", "1"],
        [" hung: no answer within 6 s", "1"],
        [" failed in another way", "1"],
    ]


def test_a_cell_shows_the_worst_of_its_requests() -> None:
    run = played(*Outcome, name="one")
    run.results.append(Result(0.0, 1.0, Outcome.REFUSED))
    run.results.append(Result(CELL_SECONDS * 4.5, 2.0, Outcome.ANSWERED))
    assert printed(timeline([run]))[1] == f"{'one':<20}x~x!?"


def test_empty_lists_are_marked_below_their_cells_and_not_ahead_of_time() -> None:
    run = Run("one", began=100.0, sent=60)  # 3 s of 14
    run.syncs += [SyncRecord(100.6, (), EMPTY_LIST), SyncRecord(101.3, (), Answer())]
    run.syncs.append(SyncRecord(102.4, (), EMPTY_LIST))
    assert printed(timeline([run]))[2] == " " * 20 + "  ^^^    ^^^"


# --- the judgement ----------------------------------------------------------------------------

GOOD = (Outcome.ANSWERED, Outcome.ANSWERED)
BAD = (Outcome.ANSWERED, Outcome.REFUSED)


def test_a_fault_without_and_none_with_a_grace_period_is_what_was_to_be_shown() -> None:
    assert fault([played(*BAD), played(*GOOD)]) is None
    assert fault([played(*BAD), played(*GOOD, Outcome.ANSWERED_LATE)]) is None


def test_a_request_lost_with_a_grace_period_is_a_fault() -> None:
    for lost in (Outcome.REFUSED, Outcome.FAILED, Outcome.HUNG):
        found = fault([played(*BAD), played(*GOOD, lost, name="with")])
        assert found == "with: 1 of 3 requests were not answered 200"


def test_a_run_in_which_nothing_happened_is_a_fault() -> None:
    found = fault([played(*GOOD, name="without"), played(*GOOD)])
    assert found == "without: no request was answered 503, so there was nothing to cure"
    found = fault([played(*BAD), played(*GOOD, name="with", empty_lists=2)])
    assert found == "with: 2 ready lists were empty, not 3"
