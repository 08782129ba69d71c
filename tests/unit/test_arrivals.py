"""Arrivals: none is lost to a failed sync, all are sorted, and those too old are counted."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from lb.arrivals import CAPACITY, WINDOW_SECONDS, Arrivals


def arrivals_of(*timestamps: float, capacity: int = CAPACITY) -> Arrivals:
    arrivals = Arrivals(capacity=capacity)
    for timestamp in timestamps:
        arrivals.record(timestamp)
    return arrivals


def dropped(arrivals: Arrivals) -> tuple[int, int]:
    return arrivals.dropped_expired, arrivals.dropped_overflow


def test_what_was_recorded_is_taken_once() -> None:
    arrivals = arrivals_of(1.0, 2.0, 2.0)
    assert len(arrivals) == 3
    assert arrivals.take(3.0) == [1.0, 2.0, 2.0]
    assert len(arrivals) == 0
    assert arrivals.take(3.0) == []
    assert dropped(arrivals) == (0, 0)


def test_a_batch_is_sorted_though_the_clock_was_set_back() -> None:
    assert arrivals_of(5.0, 6.0, 2.0, 3.0).take(7.0) == [2.0, 3.0, 5.0, 6.0]


def test_a_restored_batch_is_taken_again_before_what_came_meanwhile() -> None:
    arrivals = arrivals_of(1.0, 2.0)
    batch = arrivals.take(3.0)
    arrivals.record(4.0)
    arrivals.restore(batch)
    assert len(arrivals) == 3
    assert arrivals.take(5.0) == [1.0, 2.0, 4.0]


def test_a_taken_batch_that_is_not_restored_is_committed() -> None:
    arrivals = arrivals_of(1.0)
    arrivals.take(2.0)
    arrivals.record(3.0)
    arrivals.restore([])
    assert arrivals.take(4.0) == [3.0]


def test_arrivals_older_than_the_window_are_dropped_and_counted() -> None:
    assert WINDOW_SECONDS == 60.0  # SkyServe's autoscaler
    arrivals = arrivals_of(39.9, 40.0, 99.0)
    assert arrivals.take(100.0) == [40.0, 99.0]
    assert dropped(arrivals) == (1, 0)
    arrivals.restore([40.0, 99.0])
    assert arrivals.take(120.0) == [99.0]
    assert dropped(arrivals) == (2, 0)


def test_the_window_is_what_it_is_told_to_be() -> None:
    arrivals = Arrivals(window=5.0)
    arrivals.record(1.0)
    arrivals.record(6.0)
    assert arrivals.take(7.0) == [6.0]


def test_beyond_the_capacity_the_oldest_are_dropped_and_counted() -> None:
    arrivals = arrivals_of(1.0, 2.0, 3.0, 4.0, capacity=3)
    assert len(arrivals) == 3
    assert dropped(arrivals) == (0, 1)
    assert arrivals.take(5.0) == [2.0, 3.0, 4.0]


def test_a_restored_batch_beyond_the_capacity_loses_its_oldest() -> None:
    arrivals = arrivals_of(1.0, 2.0, 3.0, capacity=3)
    batch = arrivals.take(4.0)
    arrivals.record(5.0)
    arrivals.record(6.0)
    arrivals.restore(batch)
    assert dropped(arrivals) == (0, 2)
    assert arrivals.take(7.0) == [3.0, 5.0, 6.0]


TIMES = st.floats(0, 200)
STEP = st.one_of(
    st.tuples(st.just("record"), TIMES),
    st.tuples(st.sampled_from(["sync works", "sync fails"]), TIMES),
)


@given(st.lists(STEP), st.integers(1, 5))
def test_every_arrival_is_delivered_pending_or_counted_as_dropped(
    steps: list[tuple[str, float]], capacity: int
) -> None:
    arrivals = Arrivals(capacity=capacity)
    recorded: Counter[float] = Counter()
    delivered: Counter[float] = Counter()
    for step, time in steps:
        if step == "record":
            arrivals.record(time)
            recorded[time] += 1
            continue
        batch = arrivals.take(time)
        assert batch == sorted(batch)
        assert all(timestamp >= time - WINDOW_SECONDS for timestamp in batch)
        arrivals.record(time)  # one that comes during the call
        recorded[time] += 1
        if step == "sync works":
            delivered += Counter(batch)
        else:
            arrivals.restore(batch)
        assert len(arrivals) <= capacity
    assert delivered <= recorded
    given_up = sum(dropped(arrivals))
    assert recorded.total() == delivered.total() + len(arrivals) + given_up
