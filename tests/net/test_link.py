"""What the control process and its workers tell each other."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from controller_client.protocol import ReadyReplica
from lb.link import Drain, Link, Listed, Loads, changed_loads


@pytest.mark.parametrize(
    ("told", "now", "changed"),
    [
        ({}, {}, {}),
        ({}, {"a": 1}, {"a": 1}),
        ({"a": 1}, {"a": 1}, {}),
        ({"a": 1, "b": 2}, {"a": 3, "b": 2}, {"a": 3}),
        ({"a": 1, "b": 2}, {"b": 2}, {"a": 0}),
        ({"a": 0}, {}, {}),
    ],
)
def test_only_changed_loads_are_told(
    told: dict[str, int], now: dict[str, int], changed: dict[str, int]
) -> None:
    assert changed_loads(told, now) == changed


def play(scene: Callable[[Link, Link], Awaitable[None]]) -> None:
    """With both ends of one link."""

    async def run() -> None:
        first, second = map(Link.over, socket.socketpair())
        ends = await first, await second
        await asyncio.wait_for(scene(*ends), 20)
        for end in ends:
            end.close()

    uvloop.run(run())


def test_messages_come_whole_and_in_order() -> None:
    many = tuple(ReadyReplica(f"http://10.0.0.{number}:8000", None) for number in range(5000))

    async def scene(one: Link, other: Link) -> None:
        sent = [Listed(many, 1.5), Loads({"http://10.0.0.1:8000": 3}), Drain()]
        for message in sent:
            one.send(message)
        assert [await other.receive() for _ in sent] == sent

    play(scene)


def test_an_end_that_takes_nothing_jams_the_link() -> None:
    async def scene(one: Link, other: Link) -> None:
        assert not one.jammed
        big = Loads({f"http://10.0.0.1:{number}": number for number in range(50_000)})
        while not one.jammed:
            one.send(big)
            await asyncio.sleep(0)  # it is written when the loop turns

    play(scene)


def test_the_end_of_one_is_told_to_the_other() -> None:
    async def scene(one: Link, other: Link) -> None:
        one.send(Drain())
        one.close()
        assert isinstance(await other.receive(), Drain)
        assert await other.receive() is None
        other.send(Drain())
        await other.flush()

    play(scene)
