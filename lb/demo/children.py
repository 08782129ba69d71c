"""The processes that the demo starts, each of which ends with it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio

import lb
from lb.demo.run import OPTIONS
from lb.settings import ENV_PREFIX

START_SECONDS = 15.0
# Where a child finds this very package, whatever lies in the working directory.
ROOT = Path(lb.__file__).parents[1]


class DemoError(Exception):
    """The demo cannot go on; `str` is one line for the user."""


class Child:
    """A process whose output is read; `name` is what people call it."""

    def __init__(self, name: str, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.ended = False
        self._name = name
        self._process = process
        self._leash = process.stdin
        self._output = process.stdout
        self._last_line = ""

    @property
    def last_words(self) -> str:
        """What to say when it has ended unasked."""
        return f"the {self._name} ended by itself; its last line: {self._last_line or 'none'}"

    async def line(self) -> str:
        """The next line of its output; empty when it has ended."""
        line = (await self._output.readline()).decode(errors="replace")
        self.ended = not line
        self._last_line = line.strip() or self._last_line
        return line.strip()

    async def event(self, name: str) -> dict[str, str]:
        """The next event of this name in its log. Raises DemoError if it ends before."""
        while line := await self.line():
            if line.startswith("{"):
                event: dict[str, str] = json.loads(line)
                if event["event"] == name:
                    return event
        raise DemoError(self.last_words)

    async def watch(self, on_end: Callable[[], None]) -> None:
        """Read on, so that it never waits for its reader; `on_end` is called when it ends."""
        while not self.ended:
            await self.line()
        on_end()

    async def end(self) -> None:
        """End it by its leash and return when it is gone.

        Not with a signal: asyncio would look whether it is there still, and so take its exit code
        away from under the thread that waits for that.
        """
        with anyio.CancelScope(shield=True):
            self._leash.close()
            await self._output.read()
            await self._process.wait()


@asynccontextmanager
async def replica(name: str) -> AsyncIterator[str]:
    """A replica; its URL."""
    async with _child(name, "lb.demo.replica", name) as process:
        with _starting(name):
            url = await process.line()
        if not url.startswith("http://"):
            raise DemoError(process.last_words)
        yield url


@asynccontextmanager
async def balancer(
    controller_url: str, options: Sequence[str], *, replicas: int
) -> AsyncIterator[tuple[Child, str]]:
    """A load balancer that knows so many replicas; the process and its URL."""
    options = ("--controller-url", controller_url, *OPTIONS, *options)
    async with _child("load balancer", "lb", "serve", *options) as process:
        with _starting("load balancer"):
            address = (await process.event("server.started"))["address"]
            for _ in range(replicas):
                await process.event("replica.added")
        yield process, f"http://{address}"


@asynccontextmanager
async def _child(name: str, *args: str) -> AsyncIterator[Child]:
    """Run `python -m ARGS` for as long as the context lasts."""
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "lb.demo.leash", *args),
            cwd=ROOT,
            # The user's own settings would make what the labels say untrue.
            env={key: text for key, text in os.environ.items() if not key.startswith(ENV_PREFIX)},
            stdin=PIPE,
            stdout=PIPE,
            stderr=STDOUT,
            # Ctrl-C is for the demo alone, which then ends the others.
            start_new_session=True,
        )
    except OSError as error:
        raise DemoError(f"cannot start the {name}: {error.strerror}") from None
    child = Child(name, process)
    try:
        yield child
    finally:
        await child.end()


@contextmanager
def _starting(name: str) -> Iterator[None]:
    try:
        with anyio.fail_after(START_SECONDS):
            yield
    except TimeoutError:
        raise DemoError(f"the {name} did not start within {START_SECONDS:g} s") from None
