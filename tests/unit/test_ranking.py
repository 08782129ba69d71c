"""The ranking against a look at each item."""

from hypothesis import given
from hypothesis import strategies as st

from lb.ranking import Ranking

ITEMS = 5
# Each step sets one item's key; then the first is asked for, or not.
STEPS = st.lists(
    st.tuples(st.integers(0, ITEMS - 1), st.integers(0, 9), st.booleans()), max_size=200
)


def test_without_items_there_is_no_first() -> None:
    assert Ranking([], lambda item: (item,)).first() is None


def test_of_equal_keys_the_older_entry_is_first() -> None:
    keys = {"a": (1,), "b": (1,), "c": (2,)}
    ranking = Ranking(keys, keys.__getitem__)
    assert ranking.first() == "a"
    keys["a"] = (2,)
    assert ranking.first() == "b"
    keys["b"] = (2,)
    assert ranking.first() == "c", "a and b came to this key later"


def test_an_unknown_item_is_ignored() -> None:
    ranking = Ranking(["a"], lambda item: (0,))
    ranking.fell("b")
    assert ranking.first() == "a"


@given(STEPS)
def test_the_first_has_the_smallest_key(steps: list[tuple[int, int, bool]]) -> None:
    keys = [(5, item) for item in range(ITEMS)]
    ranking = Ranking(range(ITEMS), keys.__getitem__)
    for item, key, asked in steps:
        keys[item] = (key, item)
        ranking.fell(item)
        if asked:
            assert ranking.first() == min(range(ITEMS), key=keys.__getitem__)


def test_it_does_not_grow_while_nobody_asks() -> None:
    keys = {"a": (0,), "b": (1000,)}
    ranking = Ranking(keys, keys.__getitem__)
    for key in range(999, 0, -1):
        keys["b"] = (key,)
        ranking.fell("b")
    assert len(ranking._heap) <= 5
    assert ranking.first() == "a"
