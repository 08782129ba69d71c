"""The history: differences of counts, on a clock that may be set."""

from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from lb.history import STEP_SECONDS, WINDOW_SECONDS, Counts, History

START = 1000.0


def counts(ok: int = 0, first_byte: Sequence[int] = (0, 0), **replicas: tuple[int, int]) -> Counts:
    return Counts({"ok": ok}, first_byte, first_byte, replicas)


def history() -> History:
    return History(START, counts())


def test_a_step_is_due_once() -> None:
    found = history()
    assert not found.due(START)
    assert not found.due(START + STEP_SECONDS - 0.1)
    assert found.due(START + STEP_SECONDS)
    found.sample(START + STEP_SECONDS + 0.1, counts(), 0)
    assert not found.due(START + STEP_SECONDS + 0.2)
    assert found.due(START + 2 * STEP_SECONDS)


def test_a_tick_is_what_was_counted_since_the_last() -> None:
    found = history()
    found.sample(1005.25, counts(ok=3, first_byte=[1, 2]), 7)
    found.sample(1010.0, counts(ok=4, first_byte=[1, 3]), 1)
    assert list(found) == [
        {
            "at": 1005,
            "seconds": 5.25,
            "outcomes": {"ok": 3},
            "first_byte": [1, 2],
            "duration": [1, 2],
            "in_flight": 7,
        },
        {
            "at": 1010,
            "seconds": 4.75,
            "outcomes": {"ok": 1},
            "first_byte": [0, 1],
            "duration": [0, 1],
            "in_flight": 1,
        },
    ]


def test_what_has_left_the_window_is_forgotten() -> None:
    found = history()
    for step in range(1, 1001):
        found.sample(START + step * STEP_SECONDS, counts(ok=step, a=(step, 0)), 0)
    assert len(list(found)) == WINDOW_SECONDS // STEP_SECONDS
    assert found.of_replica("a") == (WINDOW_SECONDS // STEP_SECONDS, 0)
    found.sample(START + 10_000, counts(ok=1001, a=(1001, 0)), 0)  # it slept
    (tick,) = found
    assert (tick["outcomes"], tick["seconds"]) == ({"ok": 1}, 5000)
    assert found.of_replica("a") == (1, 0)


def test_a_clock_that_is_set_back_begins_anew() -> None:
    found = history()
    found.sample(1005, counts(ok=1, a=(1, 1)), 0)
    assert found.due(500)
    found.sample(500, counts(ok=2, a=(2, 1)), 0)
    assert (list(found), found.of_replica("a")) == ([], (0, 0))
    found.sample(505, counts(ok=5, a=(5, 1)), 0)
    (tick,) = found
    assert (tick["at"], tick["outcomes"], found.of_replica("a")) == (505, {"ok": 3}, (3, 0))


def test_a_replica_that_was_forgotten_counts_anew() -> None:
    found = history()
    found.sample(1005, counts(a=(9, 2)), 0)
    found.sample(1010, counts(), 0)
    found.sample(1015, counts(a=(4, 1)), 0)
    assert found.of_replica("a") == (13, 3)
    found.sample(1020, counts(a=(1, 1)), 0)
    assert found.of_replica("a") == (14, 4)


@given(
    st.lists(
        st.tuples(
            st.integers(-3, 400),
            st.dictionaries(
                st.sampled_from("abc"), st.tuples(st.integers(0, 9), st.integers(0, 9))
            ),
        ),
        max_size=30,
    )
)
def test_the_sums_of_replicas_are_those_of_the_ticks(
    steps: list[tuple[int, Mapping[str, tuple[int, int]]]],
) -> None:
    """Against a plain list of what was counted when."""
    found, now = history(), START
    totals: dict[str, tuple[int, int]] = {}
    kept: list[tuple[float, Mapping[str, tuple[int, int]]]] = []
    for seconds, more in steps:
        now += seconds
        for name, (finished, failed) in more.items():
            old = totals.get(name, (0, 0))
            totals[name] = (old[0] + finished, old[1] + failed)
        found.sample(now, counts(**totals), 0)
        at = now // STEP_SECONDS * STEP_SECONDS
        kept = [] if seconds <= 0 else [*kept, (at, more)]
        kept = [(at, more) for at, more in kept if at > now - WINDOW_SECONDS]
        assert len(list(found)) == len(kept)
        for name in "abc":
            sums = [more.get(name, (0, 0)) for _, more in kept]
            assert found.of_replica(name) == (sum(f for f, _ in sums), sum(b for _, b in sums))
