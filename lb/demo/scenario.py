"""What happens in the demo: two replicas, and for each run a controller, a balancer and clients."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import anyio

from controller_client.fakes.controller import FakeController
from lb.demo.children import DemoError, balancer, replica
from lb.demo.load import send_steadily
from lb.demo.run import EMPTY_LIST, UPDATES, Run


async def play(runs: Sequence[Run]) -> None:
    """Play the runs one after the other. Raises DemoError where something does not start or last."""
    async with replica("replica 1") as first, replica("replica 2") as second:
        for run in runs:
            with _controller((first, second)) as controller:
                await _play(run, controller, replicas=2)


async def _play(run: Run, controller: FakeController, *, replicas: int) -> None:
    async with balancer(controller.url, run.options, replicas=replicas) as (process, url):
        run.began, run.syncs = time.monotonic(), controller.syncs
        async with anyio.create_task_group() as together:
            together.start_soon(process.watch, together.cancel_scope.cancel)
            together.start_soon(_update, run, controller)
            await send_steadily(url, run)
            together.cancel_scope.cancel()
        if process.ended:
            raise DemoError(process.last_words)


async def _update(run: Run, controller: FakeController) -> None:
    """Make the sync after each update find an empty list, as one that lands in the gap does."""
    for seconds in UPDATES:
        await anyio.sleep_until(run.began + seconds)
        controller.answer_next(EMPTY_LIST)


@contextmanager
def _controller(replicas: Sequence[str]) -> Iterator[FakeController]:
    controller = FakeController(replicas)
    try:
        controller.start()
    except OSError as error:
        raise DemoError(f"cannot start the fake controller: {error.strerror}") from None
    try:
        yield controller
    finally:
        controller.close()
