"""The measures of the demo and the judgement over its runs."""

import io
from typing import Any

from rich.console import Console

from lb.demo.picture import CELL_SECONDS, table, timeline
from lb.demo.run import (
    DURATION,
    GRACE_PERIOD,
    NO_REPLICA_WAIT,
    OPTIONS,
    RATE,
    SCALE,
    SYNC_INTERVAL,
    UPDATES,
    Frame,
    Outcome,
    Result,
    Run,
    Step,
    Sync,
    fault,
    full,
    plan,
    steps,
)
from lb.settings import load


def played(*outcomes: Outcome, name: str = "a run", empty_lists: int = len(UPDATES)) -> Run:
    """A run with one request in each cell of the timeline."""
    run = Run(name, began=100.0, sent=len(outcomes))
    for number, outcome in enumerate(outcomes):
        sent = number * CELL_SECONDS
        run.results.append(Result(sent, sent + 0.01, outcome))
    run.syncs += [Sync(1.0, empty=True) for _ in range(empty_lists)]
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
    without, with_grace = plan()
    assert without.options == (*OPTIONS, "--grace-period", "0")
    assert with_grace.options == OPTIONS
    assert without.gap == with_grace.gap > 0


def test_a_run_is_full_after_its_time() -> None:
    assert not full(Run("a run", sent=round(RATE * DURATION) - 1))
    assert full(Run("a run", sent=round(RATE * DURATION)))


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
    run = Run("a run")
    assert not run.list_is_empty(0.0)
    run.syncs += [Sync(2.0, empty=True), Sync(4.0, empty=False)]
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
    run = Run("one", sent=60)  # 3 s of 14
    run.syncs += [Sync(0.6, empty=True), Sync(1.3, empty=False), Sync(2.4, empty=True)]
    assert printed(timeline([run]))[2] == " " * 20 + "  ^^^    ^^^"


# --- updates ----------------------------------------------------------------------------------


def frame(time: float, active: list[int], *states: tuple[int, str]) -> Frame:
    replicas: list[dict[str, Any]] = [
        {"id": number, "version": version, "status": status}
        for number, (version, status) in enumerate(states, 1)
    ]
    return Frame(time, {"version": active, "replicas": replicas})


OLD, NEW, COMING, GOING = (1, "READY"), (2, "READY"), (2, "STARTING"), (1, "SHUTTING_DOWN")


def a_step(*frames: Frame) -> Step:
    return Step("A step", 2, 2, "Hi", "rolling", began=1.0, frames=list(frames))


def test_an_update_is_done_when_nothing_but_the_new_is_there() -> None:
    assert not a_step().done
    assert not a_step(frame(1.0, [1], OLD, OLD)).done
    assert not a_step(frame(1.0, [2], GOING, NEW, NEW)).done
    assert not a_step(frame(1.0, [2], NEW, COMING)).done
    assert a_step(frame(1.0, [2], NEW, NEW)).done


def test_shown_are_the_middle_of_an_update_and_its_end() -> None:
    begun = frame(1.0, [1], OLD, OLD, COMING, COMING)
    mixed = frame(2.0, [1, 2], OLD, OLD, NEW, COMING)
    later = frame(3.0, [1, 2], GOING, OLD, NEW, NEW)
    done = frame(4.0, [2], NEW, NEW)
    assert a_step(begun, mixed, later, done).shown == [mixed, done]
    assert a_step(begun, done).shown == [done]


def test_a_frame_is_new_when_versions_or_replicas_changed() -> None:
    assert frame(1.0, [1], OLD).state == frame(2.0, [1], OLD).state
    assert frame(1.0, [1], OLD).state != frame(1.0, [1, 2], OLD).state
    assert frame(1.0, [1], OLD).state != frame(1.0, [1], GOING).state


def test_the_row_of_versions() -> None:
    run = Run("one", sent=40)  # 2 s
    step = a_step(
        frame(1.0, [1], OLD), frame(1.3, [1, 2], OLD, NEW), frame(1.6, [], COMING), frame(1.8, [2])
    )
    assert printed(timeline([run], [step]))[2] == f"{'versions':<20}1111|+ 2"


def test_a_longer_run_has_longer_cells() -> None:
    run = Run("one", sent=RATE * 20, results=[Result(19.9, 20.0, Outcome.ANSWERED)])
    ticks, cells, _ = printed(timeline([run], steps()))
    assert ticks.split() == ["seconds", *(str(4 * number) for number in range(7))]
    assert cells == f"{'one':<20}{'=':>40}"


# --- the judgement ----------------------------------------------------------------------------

GOOD = (Outcome.ANSWERED, Outcome.ANSWERED)
BAD = (Outcome.ANSWERED, Outcome.REFUSED)
DONE = [a_step(frame(1.0, [2], NEW, NEW))]


def test_a_fault_without_and_none_with_a_grace_period_is_what_was_to_be_shown() -> None:
    assert fault([played(*BAD), played(*GOOD)], played(*GOOD), DONE) is None
    late = played(*GOOD, Outcome.ANSWERED_LATE)
    assert fault([played(*BAD), late], late, DONE) is None


def test_a_request_lost_with_a_grace_period_or_in_an_update_is_a_fault() -> None:
    for lost in (Outcome.REFUSED, Outcome.FAILED, Outcome.HUNG):
        bad = played(*GOOD, lost, name="this")
        message = "this: 1 of 3 requests were not answered 200"
        assert fault([played(*BAD), bad], played(*GOOD), DONE) == message
        assert fault([played(*BAD), played(*GOOD)], bad, DONE) == message


def test_a_run_in_which_nothing_happened_is_a_fault() -> None:
    updated = played(*GOOD)
    found = fault([played(*GOOD, name="without"), played(*GOOD)], updated, DONE)
    assert found == "without: no request was answered 503, so there was nothing to cure"
    few = played(*GOOD, name="with", empty_lists=2)
    assert fault([played(*BAD), few], updated, DONE) == "with: 2 ready lists were empty, not 3"
    halfway = [a_step(frame(1.0, [1, 2], OLD, NEW))]
    found = fault([played(*BAD), played(*GOOD)], updated, halfway)
    assert found == "A step: it did not end"
