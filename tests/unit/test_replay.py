"""The replay budget: what is kept fits, and what is let go of comes back."""

from hypothesis import given
from hypothesis import strategies as st

from lb.replay import ReplayBudget, ReplayBuffer


def test_chunks_are_kept_in_order_up_to_the_limit() -> None:
    budget = ReplayBudget(limit=6, total=100)
    buffer = ReplayBuffer(budget)
    assert buffer.complete  # nothing was read, so nothing is missing
    for chunk in (b"ab", b"", b"cdef"):
        buffer.keep(chunk)
    assert (b"".join(buffer.chunks), buffer.complete, budget.used) == (b"abcdef", True, 6)


def test_a_body_beyond_the_limit_is_let_go_of_whole_and_for_good() -> None:
    budget = ReplayBudget(limit=6, total=100)
    buffer = ReplayBuffer(budget)
    buffer.keep(b"abcdef")
    buffer.keep(b"g")
    assert (buffer.chunks, buffer.complete, budget.used) == ([], False, 0)
    buffer.keep(b"h")
    assert (buffer.chunks, buffer.complete, budget.used) == ([], False, 0)


def test_all_bodies_share_the_total() -> None:
    budget = ReplayBudget(limit=6, total=10)
    first, second = ReplayBuffer(budget), ReplayBuffer(budget)
    first.keep(b"123456")
    second.keep(b"1234")
    assert budget.used == 10
    second.keep(b"5")  # within its limit, beyond the total
    assert (first.complete, second.complete, budget.used) == (True, False, 6)
    third = ReplayBuffer(budget)
    third.keep(b"1234")
    assert (third.complete, budget.used) == (True, 10)


def test_released_bytes_come_back_once() -> None:
    budget = ReplayBudget(limit=6, total=10)
    first, second = ReplayBuffer(budget), ReplayBuffer(budget)
    first.keep(b"abc")
    second.keep(b"de")
    first.release()
    first.release()
    assert (first.chunks, first.complete, budget.used) == ([], False, 2)


def test_a_limit_of_0_keeps_nothing() -> None:
    budget = ReplayBudget(limit=0, total=10)
    buffer = ReplayBuffer(budget)
    buffer.keep(b"a")
    assert (buffer.chunks, buffer.complete, budget.used) == ([], False, 0)


@given(
    st.integers(0, 12),
    st.integers(0, 20),
    st.lists(st.tuples(st.integers(0, 3), st.none() | st.binary(max_size=8))),
)
def test_the_budget_always_equals_what_is_kept(
    limit: int, total: int, steps: list[tuple[int, bytes | None]]
) -> None:
    budget = ReplayBudget(limit=limit, total=total)
    buffers = [ReplayBuffer(budget) for _ in range(4)]
    read = [b""] * 4
    for number, chunk in steps:
        if chunk is None:
            buffers[number].release()
        else:
            buffers[number].keep(chunk)
            read[number] += chunk
        kept = [b"".join(buffer.chunks) for buffer in buffers]
        assert budget.used == sum(map(len, kept)) <= total
        assert all(len(body) <= limit for body in kept)
        for buffer, body, whole in zip(buffers, kept, read, strict=True):
            assert body == (whole if buffer.complete else b"")
