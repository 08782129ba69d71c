"""What happens in the demo: two services with the fault and one without it, side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import anyio

from lb.demo.load import send_steadily
from lb.demo.run import UPDATE_AFTER_SYNC, UPDATES, Frame, Run, Step, Sync, full
from lb.demo.service import LOOK_SECONDS, DemoError, Service, running, write

PATIENCE_SECONDS = 20.0
# Between updates, so that each can be told from the next in the timeline.
PAUSE_SECONDS = 0.7


async def play(folder: Path, runs: Sequence[Run], updated: Run, steps: Sequence[Step]) -> None:
    """Play all of it. Raises DemoError where something does not start."""
    async with anyio.create_task_group() as together:
        for number, run in enumerate(runs, 1):
            together.start_soon(_play_fault, folder, run, f"fault-{number}")
        together.start_soon(_play_updates, folder, updated, steps)


async def _play_fault(folder: Path, run: Run, name: str) -> None:
    tasks = {count: write(folder / f"{name}-{count}.yaml", replicas=count) for count in (2, 3)}
    async with running(folder, name, tasks[2], gap=run.gap, options=run.options) as service:
        await service.wait_for_replicas(2)
        run.began = time.monotonic()
        async with anyio.create_task_group() as meanwhile:
            meanwhile.start_soon(_watch_syncs, service, run)
            meanwhile.start_soon(_update_in_time, service, run, tasks)
            await send_steadily(service.url, run, full)
            meanwhile.cancel_scope.cancel()


async def _watch_syncs(service: Service, run: Run) -> None:
    """Note when the balancer was told a list, and whether it was empty."""
    known, empties = 0.0, 0
    async with aiohttp.ClientSession() as session:
        while True:
            when, empty = await service.last_sync(session) or (known, empties)
            if when != known:
                now = time.monotonic() - run.began
                run.syncs.append(Sync(now - (time.time() - when), empty > empties))
            known, empties = when, empty
            await anyio.sleep(LOOK_SECONDS)


async def _update_in_time(service: Service, run: Run, tasks: dict[int, Path]) -> None:
    """Update so that the next sync meets the gap: if one does not, once more."""
    count = 2
    for number, seconds in enumerate(UPDATES, 1):
        await anyio.sleep_until(run.began + seconds)
        while run.empty_lists < number:
            known = len(run.syncs)
            while len(run.syncs) == known:  # noqa: ASYNC110 - it is another process's doing
                await anyio.sleep(LOOK_SECONDS / 2)
            if run.empty_lists < number:
                await anyio.sleep_until(run.began + run.syncs[-1].time + UPDATE_AFTER_SYNC)
                count = 5 - count
                await service.update(tasks[count], "rolling")


async def _play_updates(folder: Path, run: Run, steps: Sequence[Step]) -> None:
    first = write(folder / "updated.yaml", replicas=2, staggered=True)
    async with running(folder, "http-server", first) as service:
        await service.wait_for_replicas(2)
        run.began = time.monotonic()
        over = anyio.Event()
        async with anyio.create_task_group() as meanwhile:
            meanwhile.start_soon(send_steadily, service.url, run, lambda _: over.is_set())
            await anyio.sleep(PAUSE_SECONDS)
            for step in steps:
                task = write(first, replicas=step.count, text=step.text, staggered=True)
                step.began = time.monotonic() - run.began
                await service.update(task, step.mode)
                await _watch(service, run, step)
                await anyio.sleep(PAUSE_SECONDS)
            over.set()


async def _watch(service: Service, run: Run, step: Step) -> None:
    """Keep each state that the service passes through, until the update is done."""
    with anyio.move_on_after(PATIENCE_SECONDS):
        while not step.done:
            frame = Frame(time.monotonic() - run.began, service.row())
            if not step.frames or frame.state != step.frames[-1].state:
                step.frames.append(frame)
            await anyio.sleep(LOOK_SECONDS / 2)
        return
    raise DemoError(f"{step.title}: not done within {PATIENCE_SECONDS:g} s")
