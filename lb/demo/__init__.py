"""`skyserve-lb demo`: an empty ready list, met without and with a grace period, on this machine."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence

import anyio
from rich.console import Console

from lb.demo import picture
from lb.demo.children import DemoError
from lb.demo.run import Run, fault, plan
from lb.demo.scenario import play

FAILED = 1


def demo() -> int:
    """Play both runs and print what came of them; the exit code of the process.

    0: they showed what they should. 1: they did not, or something could not start; one line on
    stderr says why. 128 + the number of a signal: that ended them early.
    """
    console = Console(highlight=False)
    runs = plan()
    picture.introduce(console, runs)
    try:
        with picture.progress(console, runs):
            ended_by = asyncio.run(_play_until_signalled(runs))
    except DemoError as error:
        return _failed(str(error))
    if ended_by:
        return 128 + ended_by
    picture.conclude(console, runs)
    failure = fault(runs)
    return _failed(failure) if failure else 0


async def _play_until_signalled(runs: Sequence[Run]) -> int:
    """Play the runs; the number of the signal that ended them early, or 0.

    Not left to KeyboardInterrupt, which knows only SIGINT and may arise anywhere.
    """
    received: list[int] = []
    loop = asyncio.get_running_loop()
    with anyio.CancelScope() as scope:

        def stop(number: int) -> None:
            received.append(number)
            scope.cancel()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, stop, number)
        await play(runs)
    return received[0] if received else 0


def _failed(why: str) -> int:
    print(f"skyserve-lb demo: {why}", file=sys.stderr)  # noqa: T201 - the user's terminal
    return FAILED
