"""Logging: JSON lines for machines, colours for people; every event name, declared once.

Events are named in the past tense: `replica.added`, `sync.failed`, `request.finished`.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal, TextIO

import structlog

from lb.settings import LogFormat, LogLevel

Event = Literal[
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
    "request.retried",
    "server.started",
    "server.stopped",
    "sync.failed",
    "sync.recovered",
    "tls.reload_failed",
    "tls.reloaded",
]


class Log:
    """The logger of one balancer."""

    def __init__(
        self, *, log_format: LogFormat, level: LogLevel, stream: TextIO | None = None
    ) -> None:
        stream = stream or sys.stdout
        terminal = stream.isatty()
        as_json = log_format == "json" or (log_format == "auto" and not terminal)
        render: Any = (
            structlog.processors.JSONRenderer()
            if as_json
            else structlog.dev.ConsoleRenderer(colors=terminal)
        )
        self._logger = structlog.wrap_logger(
            structlog.WriteLogger(stream),
            processors=[
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                structlog.processors.format_exc_info,
                render,
            ],
            wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
            cache_logger_on_first_use=True,
        )

    def info(self, event: Event, **fields: object) -> None:
        self._logger.info(event, **fields)

    def warning(self, event: Event, **fields: object) -> None:
        self._logger.warning(event, **fields)

    def error(self, event: Event, **fields: object) -> None:
        self._logger.error(event, **fields)
