"""The replicas in the order of a policy, so that the first is found without looking at all of them.

Pure. The cost of a choice grows with the logarithm of their number (a heap), not with the number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")


class Ranking(Generic[Item]):
    """Items by a key that changes: whoever makes it smaller calls `fell`; larger ones are noticed.

    Each item has one entry that counts, the one in `_entries`; an older one is dropped when it comes
    to the front, and all of them are when they are the majority.
    """

    def __init__(self, items: Iterable[Item], key: Callable[[Item], tuple[Any, ...]]) -> None:
        self._key = key
        self._numbers = 0  # of equal keys the older entry is first
        self._entries: dict[Item, tuple[tuple[Any, ...], int, Item]] = {}
        for item in items:
            self._entries[item] = self._entry(key(item), item)
        self._heap = list(self._entries.values())
        heapify(self._heap)

    def first(self) -> Item | None:
        """The item with the smallest key; None where there are none."""
        heap, entries = self._heap, self._entries
        while heap:
            entry = heap[0]
            item = entry[2]
            if entries[item] is not entry:
                heappop(heap)
                continue
            key = self._key(item)
            if key == entry[0]:
                return item
            entries[item] = entry = self._entry(key, item)
            heapreplace(heap, entry)
        return None

    def fell(self, item: Item) -> None:
        """The key of this item may be smaller than it was; an unknown one is ignored."""
        known = self._entries.get(item)
        if known is None or (key := self._key(item)) >= known[0]:
            return
        entry = self._entries[item] = self._entry(key, item)
        heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries):
            self._heap = list(self._entries.values())
            heapify(self._heap)

    def _entry(self, key: tuple[Any, ...], item: Item) -> tuple[tuple[Any, ...], int, Item]:
        self._numbers += 1
        return key, self._numbers, item
