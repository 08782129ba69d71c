"""The admin port: what operators and Prometheus ask. Clients never reach it."""

from __future__ import annotations

import json
from collections.abc import Callable
from html import escape
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from lb.access import Token, is_loopback, refusal

REFRESH_SECONDS = 5

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="refresh" content="{refresh}">
<title>{service} · skyserve-lb</title>
<style>
body {{ font-family: sans-serif; margin: 2em; }}
table {{ border-collapse: collapse; }}
th, td {{ border-bottom: 1px solid #ccc; padding: 0.3em 1em; text-align: left; }}
</style>
</head>
<body>
<h1>{service}</h1>
<p>{state}</p>
<table>
<tr>{head}</tr>
{rows}
</table>
<p><a href="/replicas">replicas</a> · <a href="/metrics">metrics</a> ·
<a href="/readyz">readyz</a> · <a href="/livez">livez</a></p>
</body>
</html>
"""
_COLUMNS = {
    "url": "replica",
    "state": "state",
    "ejected": "ejected",
    "accelerator": "accelerator",
    "in_flight": "in flight",
    "idle_connections": "idle connections",
    "active_connections": "active connections",
}
# Nothing from elsewhere, no scripts, in no frame: the page shows what a controller has named.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"


class Admin:
    """Serves `/livez`, `/readyz`, `/metrics`, `/replicas`, a page for people at `/`, and POST `/drain`.

    `not_ready` says why the balancer should get no new clients, or None; `replicas` is the table
    as rows; `render_metrics` is the exposition text; `drain` begins to shut down.
    """

    def __init__(
        self,
        *,
        service: str,
        not_ready: Callable[[], str | None],
        replicas: Callable[[], list[dict[str, Any]]],
        render_metrics: Callable[[], bytes],
        drain: Callable[[], None],
        token: Token | None = None,
    ) -> None:
        self._service = service
        self._not_ready = not_ready
        self._replicas = replicas
        self._render_metrics = render_metrics
        self._drain = drain
        self._token = token
        self._loopback = False  # until it listens
        app = web.Application()
        app.router.add_get("/", self._page)
        app.router.add_get("/livez", self._livez)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/replicas", self._table)
        app.router.add_post("/drain", self._start_drain)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0)

    async def start(self, host: str, port: int) -> list[tuple[str, int]]:
        """Listen; the addresses bound. Raises OSError where that cannot be."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        addresses = [name[:2] for name in self._runner.addresses]
        self._loopback = all(is_loopback(host) for host, _ in addresses)
        return addresses

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _page(self, _: web.Request) -> web.Response:
        return web.Response(
            text=page(self._service, self._not_ready(), self._replicas()),
            content_type="text/html",
            headers={"Content-Security-Policy": _POLICY},
        )

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

    async def _start_drain(self, request: web.Request) -> web.Response:
        headers = request.headers
        refused = refusal(
            token=self._token,
            loopback=self._loopback,
            hosts=headers.getall("Host", []),
            authorization=headers.get("Authorization"),
            from_browser="Origin" in headers or "Sec-Fetch-Site" in headers,
        )
        if refused is not None:
            extra = {"WWW-Authenticate": "Bearer"} if refused.status == 401 else {}
            return web.Response(status=refused.status, text=refused.text + "\n", headers=extra)
        self._drain()
        return web.Response(status=202, text="draining\n")


def page(service: str, not_ready: str | None, replicas: list[dict[str, Any]]) -> str:
    """The page for people: is it ready, and what are the replicas doing?"""
    state = "Ready." if not_ready is None else f"Not ready: {not_ready}."
    rows = [
        "<tr>" + "".join(f"<td>{escape(_shown(row[key]))}</td>" for key in _COLUMNS) + "</tr>"
        for row in replicas
    ]
    return _PAGE.format(
        refresh=REFRESH_SECONDS,
        service=escape(service),
        state=escape(state),
        head="".join(f"<th>{title}</th>" for title in _COLUMNS.values()),
        rows="\n".join(rows),
    )


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)
