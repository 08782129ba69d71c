"""One limit of time for many, by the clock of a real loop."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from lb.deadlines import Deadlines


@pytest.mark.anyio
async def test_what_starts_anew_as_it_comes_due_adds_no_timer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else those of clients that stall a stream would grow in number, and never end."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    timers: list[asyncio.TimerHandle] = []
    call_later = loop.call_later

    def counted(*call: Any) -> asyncio.TimerHandle:
        timers.append(call_later(*call))
        return timers[-1]

    monkeypatch.setattr(loop, "call_later", counted)
    came: list[str] = []

    def due(item: str) -> None:
        came.append(item)
        if len(came) < 20:
            deadlines.start(item, time.monotonic())
        else:
            over.set()

    deadlines = Deadlines[str](0.001, due)
    deadlines.start("a", time.monotonic())
    await asyncio.wait_for(over.wait(), 20)
    assert came == ["a"] * 20
    # One a turn, and one more wherever the loop's clock was a tick ahead of ours.
    assert len(timers) <= 2 * 20 + 1


@pytest.mark.anyio
async def test_a_limit_is_told_of_in_order_and_not_for_what_was_stopped() -> None:
    over = asyncio.Event()
    came: list[int] = []

    def due(item: int) -> None:
        came.append(item)
        if item == 3:
            over.set()

    deadlines = Deadlines[int](0.01, due)
    for item in (1, 2, 3):
        deadlines.start(item, time.monotonic())
    deadlines.stop(2)
    await asyncio.wait_for(over.wait(), 20)
    assert came == [1, 3]
