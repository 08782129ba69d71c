"""`skyserve-lb status`: what the status page shows, in a terminal.

It reads the same `/status`. What came from outside (addresses, names, causes) is printed as plain
text: no markup, and no control characters.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import sys
import time
from collections.abc import Sequence
from typing import cast
from urllib.parse import urlsplit

from rich.console import Console, ConsoleRenderable, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lb.events import EventFacts
from lb.history import WINDOW_SECONDS
from lb.kinds import URL
from lb.snapshot import FAILED, ReplicaStatus, Series, Status

EXIT_OK = 0
EXIT_NO_ANSWER = 1
EXIT_BAD_URL = 2

TIMEOUT_SECONDS = 5.0
REFRESH_SECONDS = 1.0
MAX_BYTES = 64 * 2**20
EVENTS_SHOWN = 12
WIDE = 100  # columns, from which on there is room for more words and longer plots
_BARS = " ▁▂▃▄▅▆▇█"
_ASCII_BARS = " .:-=+*#@"

_GOOD, _WARN, _BAD, _QUIET = "green", "yellow", "bold red", "dim"
_STATES = {"serving": _GOOD, "held": _WARN, "draining": _WARN}
_LEVELS = {"warning": _WARN, "error": _BAD}


class NoAnswer(Exception):
    """The status cannot be had; `str` is one line for the operator."""


def show(url: str, *, watch: bool, as_json: bool) -> int:
    """Print the status of the balancer whose admin port is at `url`; the exit code.

    `watch`: again and again, until interrupted, on a terminal or as JSON, a line each time. A fault
    is one line on stderr: exit code 1 if nothing fit answers there, 2 for what is no URL.
    """
    try:
        address = URL.parse(url)
    except ValueError as error:
        return _fault(f"--balancer: {error}; accepted: {URL.accepted}", EXIT_BAD_URL)
    try:
        if as_json:
            _print_json(address, watch=watch)
        else:
            _print(address, watch=watch)
    except NoAnswer as error:
        return _fault(str(error), EXIT_NO_ANSWER)
    except KeyboardInterrupt:
        pass  # how one ends watching
    except BrokenPipeError:  # whoever read us has seen enough; Python must not try again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_OK


def _fault(text: str, exit_code: int) -> int:
    print(f"skyserve-lb: {_clean(text)}", file=sys.stderr)  # noqa: T201 - the operator's terminal
    return exit_code


def _print_json(url: str, *, watch: bool) -> None:
    while True:
        status = fetch(url)
        print(json.dumps(status, indent=None if watch else 2), flush=True)  # noqa: T201
        if not watch:
            return
        time.sleep(REFRESH_SECONDS)


def _print(url: str, *, watch: bool) -> None:
    console = Console(highlight=False)
    bars = _BARS if console.encoding.startswith("utf") else _ASCII_BARS
    status, lost = fetch(url), ""
    if not (watch and console.is_terminal):
        console.print(picture(status, bars, console.width))
        return
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            live.update(picture(status, bars, console.width, lost=lost), refresh=True)
            time.sleep(REFRESH_SECONDS)
            try:
                status, lost = fetch(url), ""
            except NoAnswer as error:
                lost = str(error)


def fetch(url: str) -> Status:
    """The status from the admin port at `url`. Raises `NoAnswer`."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=TIMEOUT_SECONDS)
    try:
        connection.request("GET", f"{parts.path}/status")
        response = connection.getresponse()
        body = response.read(MAX_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswer(
            f"{url}: no answer ({_reason(error)}); --balancer is the admin port, which the balancer "
            "names in the line that it logs at its start"
        ) from None
    finally:
        connection.close()
    try:
        status = json.loads(body)
    except (ValueError, RecursionError):
        status = None
    if response.status != 200 or not isinstance(status, dict) or "about" not in status:
        raise NoAnswer(
            f"{url}: what answers there (with {response.status}) is not the admin port of a "
            "skyserve-lb; that is by default the data port + 1000"
        )
    return cast("Status", status)


def _reason(error: OSError | http.client.HTTPException) -> str:
    if isinstance(error, TimeoutError):
        return f"none within {TIMEOUT_SECONDS:g} s"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):  # its `errno` is none of the system's
        return "it speaks no TLS; try http://"
    if isinstance(error, OSError) and error.errno and not isinstance(error, socket.gaierror):
        return os.strerror(error.errno)
    if isinstance(error, OSError):
        return str(error.strerror or error)
    return "it speaks no HTTP"


# --- the picture ----------------------------------------------------------------------------------


def picture(status: Status, bars: str, width: int, *, lost: str = "") -> Group:
    """All of it. `bars`: nine characters from empty to full; `lost`: why it is not of now."""
    wide = width >= WIDE
    plots = _plots(status, bars, 60 if wide else 24)
    parts: list[ConsoleRenderable] = [_head(status), _facts(status), Text(), plots, Text()]
    if lost:
        since = f"{lost}. What is below was so at {_clock(status['now'])}; trying again."
        parts.insert(0, Text(_clean(since), _BAD))
    parts += [_replicas(status, wide=wide), Text(), _events(status["events"], status["now"])]
    return Group(*parts)


def _head(status: Status) -> Text:
    about = status["about"]
    up = _age(status["now"] - about["started"])
    processes = f", {status['processes']} processes" if status["processes"] > 1 else ""
    return Text.assemble(
        (_clean(about["service"]), "bold"),
        "  ",
        _verdict(status),
        "  ",
        (_clean(f"skyserve-lb {about['version']}, {about['mode']}{processes}, up {up}"), _QUIET),
    )


def _verdict(status: Status) -> tuple[str, str]:
    if status["draining"]:
        return "Draining", _WARN
    if status["not_ready"] is None:
        return "Ready", _GOOD
    return _clean(f"Not ready: {status['not_ready']}"), _BAD


def _facts(status: Status) -> Table:
    table = Table.grid(padding=(0, 2))
    about, recent = status["about"], status["recent"]
    sticky = f", sticky by {about['sticky']}" if about["sticky"] else ""
    counts = [f"{count:,} {state}" for state, count in status["counts"].items() if count]
    failed = "" if recent["failed"] is None else f", {_percent(recent['failed'])} failed"
    waiting = f", oldest {_span(status['oldest_seconds'])}" if status["in_flight"] else ""
    for name, value in (
        ("policy", f"{about['policy']}{sticky}"),
        ("sync", _sync(status)),
        ("list held", _held(status)),
        ("replicas", ", ".join(counts) or "none known"),
        ("last minute", f"{_rate(recent['rate'])}{failed}"),
        ("first byte", _percentiles(recent["first_byte"])),
        ("duration", _percentiles(recent["duration"])),
        ("in flight", f"{status['in_flight']:,}{waiting}"),
    ):
        table.add_row(Text(name, _QUIET), Text(_clean(value)))
    return table


def _sync(status: Status) -> str:
    sync, now = status["sync"], status["now"]
    last = sync["last_answer"]
    answered = "never answered" if last is None else f"answered {_age(now - last)} ago"
    if sync["failing_since"] is not None:
        failing = _age(now - sync["failing_since"])
        return f"FAILING for {failing} ({sync['result']}: {sync['cause']}), {answered}"
    if sync["result"] is None:
        return "the first call is on its way"
    return f"{sync['result']}, {answered}, every {_span(sync['interval'])}"


def _held(status: Status) -> str:
    held, now = status["held"], status["now"]
    if held is None:
        return "no"
    left = _age(held["until"] - now)
    return f"HELD for {_age(now - held['since'])}, released in {left} if it stays empty"


def _percentiles(found: dict[str, float | None]) -> str:
    return ", ".join(f"{name} {_span(value)}" for name, value in found.items())


def _plots(status: Status, bars: str, cells: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, header_style=_QUIET)
    table.add_column("", no_wrap=True)
    table.add_column(f"last {WINDOW_SECONDS // 60} minutes", no_wrap=True)
    table.add_column("now", justify="right", no_wrap=True)
    table.add_column("highest", justify="right", no_wrap=True)
    history, now = status["history"], status["now"]
    rates = history["rate"]
    failed = [sum(each) for each in zip(*(rates.get(name, []) for name in FAILED), strict=False)]
    rows: list[tuple[str, Sequence[float | None], str]] = [
        ("answered", rates.get("ok", []), "rate"),
        ("failed", failed, "rate"),
        ("first byte p50", history["first_byte"]["p50"], "span"),
        ("first byte p95", history["first_byte"]["p95"], "span"),
        ("duration p95", history["duration"]["p95"], "span"),
        ("in flight", history["in_flight"], "count"),
    ]
    formats = {"rate": _rate, "span": _span, "count": _count}
    for name, values, kind in rows:
        known = [value for value in values if value is not None]
        shown = formats[kind]
        table.add_row(
            Text(name, _QUIET),
            Text(spark(history, values, now, bars, cells)),
            shown(values[-1]) if values else "-",
            shown(max(known)) if known else "-",
        )
    return table


def spark(
    history: Series, values: Sequence[float | None], now: float, bars: str, cells: int
) -> str:
    """The values as a line of so many bars, each the highest of its time."""
    highest = [0.0] * cells
    for at, value in zip(history["at"], values, strict=False):
        cell = int(cells * (1 - (now - at) / WINDOW_SECONDS))
        if value and cell >= 0:
            cell = min(cell, cells - 1)
            highest[cell] = max(highest[cell], value)
    top = max(highest) or 1.0
    full = len(bars) - 1
    # What is not 0 shows, however small.
    return "".join(bars[max(round(full * each / top), int(each > 0))] for each in highest)


def _replicas(status: Status, *, wide: bool) -> Table:
    table = Table(
        box=None, padding=(0, 2 if wide else 1, 0, 0), pad_edge=False, header_style=_QUIET
    )
    table.add_column("replica", overflow="fold")
    table.add_column("state", no_wrap=True)
    table.add_column("accelerator", no_wrap=True)
    for name in ("in flight" if wide else "in\nflight", "requests", "share", "errors", "since"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in status["replicas"]:
        share = each["share"]
        table.add_row(
            Text(_clean(each["name"])),
            _state(each, status["now"], wide=wide),
            Text(_clean(each["accelerator"] or "")),
            f"{each['in_flight']:,}",
            f"{each['finished']:,}",
            "-" if share is None else _percent(share),
            Text(f"{each['failed']:,}", _BAD if each["failed"] else ""),
            _when(each["since"], status["now"]),
        )
    return table


def _state(each: ReplicaStatus, now: float, *, wide: bool) -> Text:
    text = Text(_clean(each["state"]), _STATES.get(each["state"], _WARN))
    if each["ejected"]:
        text.append(" ejected", _BAD)
    if each["ejected"] and wide:
        left = (each["ejected_until"] or now) - now
        again = f"tried again in {_age(left + 1)}" if left > 0 else "the next request tries it"
        text.append(f" ({each['failures']} in a row, {again})", _QUIET)
    return text


def _events(events: Sequence[EventFacts], now: float) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for no_wrap in (True, True, False, False):
        table.add_column(no_wrap=no_wrap, overflow="fold")
    for each in events[: -EVENTS_SHOWN - 1 : -1]:
        level = each["level"] if each["level"] in _LEVELS else ""
        fields = " ".join(f"{name}={value}" for name, value in each["fields"].items())
        table.add_row(
            Text(_when(each["at"], now), _QUIET),
            Text(level, _LEVELS.get(level, "")),
            Text(_clean(each["event"])),
            Text(_clean(fields)),
        )
    return table


# --- how values read ------------------------------------------------------------------------------


def _clean(text: str) -> str:
    """The text without what would steer a terminal."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def _when(at: float, now: float) -> str:
    return _clock(at) if now - at < 86400 else time.strftime("%Y-%m-%d", time.localtime(at))


def _age(seconds: float) -> str:
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def _span(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 99.5 else _age(seconds)


def _count(value: float | None) -> str:
    return f"{value or 0:,.0f}"


def _rate(value: float | None) -> str:
    return f"{value or 0:.3g} /s" if (value or 0) < 999 else f"{value:,.0f} /s"


def _percent(part: float) -> str:
    return "<0.1 %" if 0 < part < 0.0005 else f"{part * 100:.1f} %"
