"""The last few events of the log, for the status page. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import TypedDict

KEPT = 100
# What a field may hold at the most: the controller's words come in them, and it may be talkative.
LONGEST_VALUE = 200


class EventFacts(TypedDict):
    """One event: when (Unix time), how bad, its name and its fields as text."""

    at: float
    level: str
    event: str
    fields: dict[str, str]


class RecentEvents:
    """A ring of the newest `KEPT` events, oldest first."""

    def __init__(self) -> None:
        self._events: deque[EventFacts] = deque(maxlen=KEPT)

    def __iter__(self) -> Iterator[EventFacts]:
        return iter(self._events)

    def take(self) -> list[EventFacts]:
        """All of them; none are left."""
        events = list(self._events)
        self._events.clear()
        return events

    def extend(self, events: Iterable[EventFacts]) -> None:
        """Those that another process has kept."""
        self._events.extend(events)

    def add(self, at: float, level: str, event: str, fields: Mapping[str, object]) -> None:
        texts = {name: _text(value) for name, value in fields.items() if value is not None}
        self._events.append({"at": at, "level": level, "event": event, "fields": texts})


def _text(value: object) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."
