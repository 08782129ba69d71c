"""Logging: JSON lines for machines, colours for people; every event name, declared once.

Events are named in the past tense: `replica.added`, `sync.failed`, `request.finished`.
"""

from __future__ import annotations

import io
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any, Literal, TextIO, get_args

import structlog
from aiohttp.http_exceptions import HttpProcessingError

from lb.events import RecentEvents
from lb.settings import LogFormat, LogLevel

Event = Literal[
    "admin.token_exposed",
    "admin.token_reload_failed",
    "admin.token_reloaded",
    "drain.started",
    "drain.finished",
    "drain.forced",
    "list.entry_skipped",
    "list.held",
    "list.released",
    "list.restored",
    "replica.added",
    "replica.ejected",
    "replica.removed",
    "replica.restored",
    "replica.retired",
    "replica.revived",
    "request.failed",
    "request.finished",
    "request.refused",
    "request.retried",
    "server.few_descriptors",
    "server.started",
    "server.stopped",
    "sync.failed",
    "sync.recovered",
    "tls.reload_failed",
    "tls.reloaded",
    "worker.died",
    "worker.silent",
    "worker.started",
]
_OF_REQUESTS = frozenset(event for event in get_args(Event) if event.startswith("request."))


class _Discreet(logging.Filter):
    """Drops what aiohttp's server says of a malformed request, for it quotes what it could not read."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


# Of the admin port; its client has the answer 400.
logging.getLogger("aiohttp.server").addFilter(_Discreet())


class Log:
    """The logger of one balancer; `recent` has the last events for the status page."""

    def __init__(
        self,
        *,
        log_format: LogFormat,
        level: LogLevel,
        stream: TextIO | None = None,
        worker: int | None = None,
    ) -> None:
        """`worker`: its number, which each line of one tells."""
        self.recent = RecentEvents()
        stream = stream or sys.stdout
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # whatever the terminal can show
        terminal = stream is not None and stream.isatty()
        as_json = log_format == "json" or (log_format == "auto" and not terminal)
        render: Any = (
            structlog.processors.JSONRenderer()
            if as_json
            else structlog.dev.ConsoleRenderer(colors=terminal)
        )
        self._logger = structlog.wrap_logger(
            structlog.WriteLogger(_Sink(stream)),  # type: ignore[arg-type]
            processors=[
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                render,
            ],
            wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
            cache_logger_on_first_use=True,
        )
        if worker is not None:
            self._logger = self._logger.bind(worker=worker)

    def info(self, event: Event, **fields: object) -> None:
        self._logger.info(event, **fields)
        self._keep("info", event, fields)

    def warning(self, event: Event, **fields: object) -> None:
        self._logger.warning(event, **fields)
        self._keep("warning", event, fields)

    def error(self, event: Event, **fields: object) -> None:
        self._logger.error(event, **fields)
        self._keep("error", event, fields)

    def _keep(self, level: str, event: Event, fields: Mapping[str, object]) -> None:
        if event not in _OF_REQUESTS:
            self.recent.add(time.time(), level, event, fields)


class _Sink:
    """Where the lines go: a log that cannot be written must not end what it tells of."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream  # None: the process was started with its stdout closed

    def write(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, UnicodeError):  # nobody reads it, the disk is full: the next may find room
            pass

    def flush(self) -> None:
        """Nothing is left to do: `write` has done it, and seen to what can fail."""
