"""The admin port: what operators and Prometheus ask. Clients never reach it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from lb.access import Token, is_loopback, refusal
from lb.live import Live
from lb.snapshot import Snapshot, status

_FILES = Path(__file__).parent / "page"
_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# What the page may do: load and ask for things here, and nothing else. Trusted types: no text that
# came from a controller can become markup, even by a mistake in the script.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        *(f"{each}-src 'self'" for each in ("connect", "img", "script", "style")),
        *("base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"),
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_SAFE = {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
# The columns of /replicas.
_REPLICA = frozenset(
    (
        "url",
        "state",
        "ejected",
        "accelerator",
        "in_flight",
        "idle_connections",
        "active_connections",
    )
)
# Each takes a file descriptor from the data port: those that came before the newest so many are ended.
# A new one is always taken, so that nobody who holds many keeps probes and Prometheus out.
MAX_CONNECTIONS = 128
# How long those that are being answered may go on at the end; 0 would be for ever, with a page open.
_LAST_WORDS_SECONDS = 0.1

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Admin:
    """Serves `/livez`, `/readyz`, `/metrics`, `/replicas`, and POST `/drain`; for people the page at
    `/`, which reads `/status` and, again and again, `/events`.

    `not_ready` says why the balancer should get no new clients, or None; `refresh` gets what follows
    up to date; `snapshot` is what is known of it; `render_metrics` is the exposition text; `drain` begins to shut down. With a `token` only
    who has it may drain.
    """

    def __init__(
        self,
        *,
        not_ready: Callable[[], str | None],
        refresh: Callable[[], Awaitable[None]],
        snapshot: Callable[[], Snapshot],
        render_metrics: Callable[[], bytes],
        drain: Callable[[], None],
        token: Token | None = None,
    ) -> None:
        self._not_ready = not_ready
        self._refresh = refresh
        self._snapshot = snapshot
        self._render_metrics = render_metrics
        self._drain = drain
        self._token = token
        self._loopback = False  # until it listens
        app = web.Application()
        app.router.add_get("/livez", self._livez)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/replicas", self._replicas)
        app.router.add_get("/status", self._status)
        app.router.add_get("/events", Live(self._render_status).serve, allow_head=False)
        app.router.add_post("/drain", self._start_drain)
        app.router.add_get("/", _file(_FILES / "index.html", "text/html"))
        for file in sorted(_FILES.iterdir()):
            if content_type := _TYPES.get(file.suffix):
                app.router.add_get(f"/page/{file.name}", _file(file, content_type))
        app.on_response_prepare.append(_add_headers)
        self._listener: asyncio.Server | None = None
        self._runner = web.AppRunner(
            app, access_log=None, handle_signals=False, shutdown_timeout=_LAST_WORDS_SECONDS
        )

    async def start(self, host: str, port: int) -> list[tuple[str, int]]:
        """Listen; the addresses bound. Raises OSError where that cannot be."""
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._connect, host, port)
        addresses = [each.getsockname()[:2] for each in self._listener.sockets]
        self._loopback = all(is_loopback(host) for host, _ in addresses)
        return addresses

    async def stop(self) -> None:
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()

    def _connect(self) -> asyncio.Protocol:
        """What serves the connection that comes; the oldest ones make room for it."""
        server = self._runner.server
        assert server is not None  # set up before it listens
        for oldest in server.connections[: 1 - MAX_CONNECTIONS]:
            if oldest.transport is not None:
                oldest.transport.abort()
        return server()

    async def _livez(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        reason = self._not_ready()
        if reason is None:
            return web.Response(text="ok\n")
        return web.Response(status=503, text=reason + "\n")

    async def _metrics(self, _: web.Request) -> web.Response:
        await self._refresh()
        return web.Response(
            body=self._render_metrics(), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    async def _replicas(self, _: web.Request) -> web.Response:
        await self._refresh()
        rows = [
            {key: value for key, value in each.items() if key in _REPLICA}
            for each in self._snapshot()["replicas"]
        ]
        return _json(json.dumps({"replicas": rows}, indent=2))

    async def _status(self, _: web.Request) -> web.Response:
        await self._refresh()
        return _json(self._render_status())

    def _render_status(self) -> str:
        return json.dumps(status(self._snapshot()), separators=(",", ":"))

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


def _file(path: Path, content_type: str) -> Handler:
    """A handler for a file of the page, which is read now."""
    text = path.read_text(encoding="utf-8")

    async def serve(_: web.Request) -> web.Response:
        return web.Response(text=text, content_type=content_type)

    return serve


def _json(text: str) -> web.Response:
    return web.Response(text=text + "\n", content_type="application/json")


async def _add_headers(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_SAFE)
    response.headers.setdefault("Cache-Control", "no-store")
