"""What happens in the demo: two replicas, and for each run a controller, a balancer and clients."""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from lb.demo.children import DemoError, balancer, replica
from lb.demo.controller import Controller
from lb.demo.load import send_steadily
from lb.demo.run import UPDATES, Run


async def play(runs: Sequence[Run]) -> None:
    """Play the runs one after the other. Raises DemoError where something does not start or last."""
    async with replica() as first, replica() as second:
        for run in runs:
            await _play(run, (first, second))


async def _play(run: Run, replicas: Sequence[str]) -> None:
    began = anyio.current_time()  # anew below, when the load balancer is there

    def record(empty: bool) -> None:
        run.syncs.append((anyio.current_time() - began, empty))

    controller = Controller(replicas, record)
    async with (
        controller.serving() as controller_url,
        balancer(controller_url, run.options, replicas=len(replicas)) as (process, url),
    ):
        began = anyio.current_time()
        async with anyio.create_task_group() as together:
            together.start_soon(process.watch, together.cancel_scope.cancel)
            together.start_soon(_update, controller, began)
            await send_steadily(url, run, began)
            together.cancel_scope.cancel()
        if process.ended:
            raise DemoError(process.last_words)


async def _update(controller: Controller, began: float) -> None:
    for time in UPDATES:
        await anyio.sleep_until(began + time)
        controller.update()
