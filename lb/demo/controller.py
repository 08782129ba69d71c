"""A stand-in for SkyServe's controller: it answers syncs, after an update once with nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from aiohttp import web

from controller_client.protocol import SYNC_PATH
from lb.demo.children import DemoError


class Controller:
    """Its ready list names all replicas, but for one sync after each `update`.

    `on_sync` is told whether the list that is given out is empty.
    """

    def __init__(self, replicas: Sequence[str], on_sync: Callable[[bool], None]) -> None:
        self._info = {url: {"gpu_type": "unknown"} for url in replicas}
        self._on_sync = on_sync
        self._updated = False

    def update(self) -> None:
        """Make the next ready list empty, as a change of the replica count can."""
        self._updated = True

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Listen on a free port; the URL."""
        app = web.Application()
        app.router.add_post(SYNC_PATH, self._sync)
        runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await runner.setup()
        try:
            await _listen(runner)
            yield "http://{}:{}".format(*runner.addresses[0])
        finally:
            await runner.cleanup()

    async def _sync(self, request: web.Request) -> web.Response:
        await request.read()
        empty, self._updated = self._updated, False
        self._on_sync(empty)
        return web.json_response({"replica_info": {} if empty else self._info})


async def _listen(runner: web.AppRunner) -> None:
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, shutdown_timeout=0).start()
    except OSError as error:
        raise DemoError(f"the fake controller cannot listen: {error.strerror}") from None
