"""What a fake does next: items used once, then items used in turn for ever."""

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Script(Generic[Item]):
    """Hands out items: first those of `then`, in order, then those of `always`, in turn."""

    def __init__(self, default: Item) -> None:
        self._default = default
        self._once: deque[Item] = deque()
        self._always: Iterator[Item] = itertools.repeat(default)

    def then(self, *items: Item) -> None:
        """Add items that are used once each."""
        self._once.extend(items)

    def always(self, *items: Item) -> None:
        """Use these in turn whenever nothing of `then` is left; without items: the default."""
        self._always = itertools.cycle(items or (self._default,))

    def take(self) -> Item:
        """Return the item whose turn it is."""
        return self._once.popleft() if self._once else next(self._always)
