"""`skyserve-lb demo`: an empty ready list met without and with a grace period, and three updates."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import anyio
from rich.console import Console

from lb.demo import picture
from lb.demo.run import Run, Step, fault, plan, steps
from lb.demo.scenario import play
from lb.demo.service import DemoError
from lb.settings import ENV_PREFIX

FAILED = 1


def demo() -> int:
    """Play all runs and print what came of them; the exit code of the process.

    0: they showed what they should. 1: they did not, or something could not start; one line on
    stderr says why. 128 + the number of a signal: that ended them early.
    """
    # The user's own settings would make what the labels say untrue.
    for name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
        del os.environ[name]
    console = Console(highlight=False)
    runs, updated, changes = plan(), Run("updates"), steps()
    picture.introduce(console, runs)
    try:
        with (
            picture.progress(console, [*runs, updated]),
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        ):
            ended_by = asyncio.run(_play_until_signalled(Path(folder), runs, updated, changes))
    except Exception as error:
        if cause := _demo_error(error):
            return _failed(str(cause))
        raise
    if ended_by:
        return 128 + ended_by
    picture.conclude(console, runs)
    picture.conclude_updates(console, updated, changes)
    failure = fault(runs, updated, changes)
    return _failed(failure) if failure else 0


async def _play_until_signalled(
    folder: Path, runs: Sequence[Run], updated: Run, changes: Sequence[Step]
) -> int:
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
        await play(folder, runs, updated, changes)
    return received[0] if received else 0


def _demo_error(error: BaseException) -> DemoError | None:
    """The first DemoError in what a group of tasks has raised."""
    if isinstance(error, DemoError):
        return error
    parts: Sequence[BaseException] = getattr(error, "exceptions", ())
    return next((found for part in parts if (found := _demo_error(part))), None)


def _failed(why: str) -> int:
    print(f"skyserve-lb demo: {why}", file=sys.stderr)  # noqa: T201 - the user's terminal
    return FAILED
