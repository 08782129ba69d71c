"""A service of the demo: what `skyserve-lb up` starts, and what is known of it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import click
import yaml

from controller_client import embedded
from controller_client.embedded.store import Store
from controller_client.embedded.versions import Mode
from lb import services

EXAMPLE = Path(embedded.__file__).with_name("examples") / "http_server.yaml"
LOOK_SECONDS = 0.1
START_SECONDS = 20.0


class DemoError(Exception):
    """The demo cannot go on; `str` is one line for the user."""


class Service:
    """A running service in a state folder."""

    def __init__(self, state: Path, name: str, url: str) -> None:
        self.url = url
        self._state = state
        self._name = name
        self._store = Store(state)

    def row(self) -> dict[str, Any]:
        """What `status --json` prints."""
        (row,) = services.rows(self._store, self._state, self._name)
        return row

    async def wait_for_replicas(self, count: int) -> None:
        """Until so many are listed, and the balancer has the list."""
        async with aiohttp.ClientSession() as session:
            with anyio.move_on_after(START_SECONDS):
                while await self._known(session) != count:  # noqa: ASYNC110 - another process's doing
                    await anyio.sleep(LOOK_SECONDS)
                return
        raise DemoError(f"the replicas did not start within {START_SECONDS:g} s")

    async def _known(self, session: aiohttp.ClientSession) -> int:
        async with session.get(self.row()["admin"] + "/replicas") as answer:
            return len((await answer.json())["replicas"])

    async def update(self, task: Path, mode: str) -> None:
        try:
            await anyio.to_thread.run_sync(
                lambda: services.update(self._name, task, self._state, Mode(mode))
            )
        except click.ClickException as error:
            raise DemoError(error.message) from None

    async def last_sync(self, session: aiohttp.ClientSession) -> tuple[float, int] | None:
        """When the balancer last heard from the controller (Unix seconds), and how often of nothing.

        None while it does not answer.
        """
        try:
            async with session.get(self.row()["admin"] + "/metrics") as answer:
                lines = (await answer.text()).splitlines()
        except aiohttp.ClientError:
            return None
        sync, last = "skyserve_lb_sync_total", "skyserve_lb_sync_last_success_timestamp_seconds"
        empty = [line for line in lines if line.startswith(sync) and 'result="empty"' in line]
        when = [line for line in lines if line.startswith(last)]
        return _value(when), int(_value(empty))

    def close(self) -> None:
        self._store.close()


def _value(series: Sequence[str]) -> float:
    return float(series[0].split()[-1]) if series else 0.0


def write(path: Path, *, replicas: int, text: str = "Hello", staggered: bool = False) -> Path:
    """The example as a task file, run by this very Python; with replicas that start one by one."""
    task = yaml.safe_load(EXAMPLE.read_text())
    task["service"]["replicas"] = replicas
    task["envs"]["TEXT"] = text
    task["run"] = task["run"].replace("python3 ", f"exec '{sys.executable}' ")
    if staggered:
        task["setup"] = "sleep $(( (SKYPILOT_SERVE_REPLICA_ID - 1) % 3 )).5"
    path.write_text(yaml.safe_dump(task))
    return path


@asynccontextmanager
async def running(
    state: Path, name: str, task: Path, *, gap: float = 0.0, options: Sequence[str] = ()
) -> AsyncIterator[Service]:
    """A service that ends with the context, and with this process, however that ends."""
    reader, writer = os.pipe()
    try:
        url = await anyio.to_thread.run_sync(
            lambda: services.up(task, state, name=name, gap=gap, options=options, leash=reader)
        )
        service = Service(state, name, url)
        try:
            yield service
        finally:
            service.close()
    except click.ClickException as error:
        raise DemoError(error.message) from None
    except OSError as error:
        raise DemoError(f"cannot start {name}: {error.strerror}") from None
    finally:
        os.close(reader)
        os.close(writer)
        with anyio.CancelScope(shield=True), contextlib.suppress(click.ClickException):
            await anyio.to_thread.run_sync(services.down, name, state)
