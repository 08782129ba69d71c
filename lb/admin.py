"""The admin port: what operators and Prometheus ask. Clients never reach it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST


class Admin:
    """Serves `/livez`, `/readyz`, `/metrics` and `/replicas`.

    `not_ready` says why the balancer should get no new clients, or None; `replicas` is the table
    as rows; `render_metrics` is the exposition text.
    """

    def __init__(
        self,
        *,
        not_ready: Callable[[], str | None],
        replicas: Callable[[], list[dict[str, Any]]],
        render_metrics: Callable[[], bytes],
        drain: Callable[[], None],
    ) -> None:
        self._not_ready = not_ready
        self._replicas = replicas
        self._render_metrics = render_metrics
        self._drain = drain
        app = web.Application()
        app.router.add_get("/livez", self._livez)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/replicas", self._table)
        app.router.add_post("/drain", self._start_drain)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0)

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen; the address bound. Raises OSError where that cannot be."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        name = self._runner.addresses[0]
        return name[0], name[1]

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _livez(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        reason = self._not_ready()
        if reason is None:
            return web.Response(text="ok\n")
        return web.Response(status=503, text=reason + "\n")

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            body=self._render_metrics(), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    async def _table(self, _: web.Request) -> web.Response:
        return web.Response(
            text=json.dumps({"replicas": self._replicas()}, indent=2) + "\n",
            content_type="application/json",
        )

    async def _start_drain(self, _: web.Request) -> web.Response:
        self._drain()
        return web.Response(status=202, text="draining\n")
