"""Kinds of option value: from the text that a user gave to a checked value.

Every parser raises ValueError with what is wrong with the text, as the middle of one line:
`lb.settings` puts the option before it and what would have been accepted behind it.
"""

import difflib
import ipaddress
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from lb.stickiness import Sticky

MAX_PORT = 65535

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_BYTES = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
}
_BOOLEANS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
# The digits are bounded, so that no number is infinite or slow to convert.
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")  # RFC 9110, section 5.6.2
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([^\W\d_]*)")
_SIZE = re.compile(r"([0-9]{1,15}) ?([^\W\d_]*)")
_HOST_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_.])?")


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of value: its place-holder in help, what it accepts, and its parser."""

    metavar: str
    accepted: str
    parse: Callable[[str], Any]


def shown(text: str) -> str:
    """The text quoted, shortened and in one line, whatever it holds."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` is most likely a slip for."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1)), None)


def duration(*, zero: bool) -> Kind:
    """A span of time, in seconds as a float. `zero`: whether 0 has a meaning here."""

    def parse(text: str) -> float:
        number, factor = _amount(text, _DURATION, _SECONDS, "duration")
        if not zero and float(number) == 0:
            raise ValueError(f"{shown(text)} is not more than 0")
        return float(number) * factor

    least = "0 or more" if zero else "more than 0"
    units = ", ".join(_SECONDS)
    return Kind("DURATION", f"a number, {least}, with a unit of {units} (none: seconds)", parse)


def _sticky(text: str) -> Sticky:
    source, _, name = text.partition(":")
    if _TOKEN.fullmatch(name):
        if source == "header":
            return Sticky("header", name)
        if source == "cookie":
            return Sticky("cookie", name)
    raise ValueError(f"{shown(text)} names no header and no cookie")


def choice(what: str, words: Sequence[str]) -> Kind:
    """One of a few words; `what` names the thing chosen, for errors."""

    def parse(text: str) -> str:
        if text not in words:
            near = nearest(text, words)
            hint = f", did you mean {near}?" if near else ""
            raise ValueError(f"{shown(text)} is no {what}{hint}")
        return text

    return Kind("|".join(words), ", ".join(words), parse)


def _amount(
    text: str, pattern: re.Pattern[str], units: Mapping[str, float], what: str
) -> tuple[str, float]:
    """The digits and the factor of the unit behind them."""
    match = pattern.fullmatch(text)
    if match is None:
        raise ValueError(f"{shown(text)} is no {what}")
    number, unit = match.groups()
    if unit and unit not in units:
        raise ValueError(f"{shown(text)} has the unknown unit {shown(unit)}")
    return number, units[unit] if unit else 1


def _size(text: str) -> int:
    number, factor = _amount(text, _SIZE, _BYTES, "size")
    return int(number) * int(factor)


def _whole(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if re.fullmatch(r"[0-9]{1,9}", text) is None:
            raise ValueError(f"{shown(text)} is no whole number")
        if not low <= int(text) <= high:
            raise ValueError(f"{text} is out of range")
        return int(text)

    return parse


def _boolean(text: str) -> bool:
    if text.lower() not in _BOOLEANS:
        raise ValueError(f"{shown(text)} is neither yes nor no")
    return _BOOLEANS[text.lower()]


def _text(text: str) -> str:
    if not text:
        raise ValueError("it is empty")
    if not text.isprintable():
        raise ValueError(f"{shown(text)} holds unprintable characters")
    return text


def _is_host(text: str) -> bool:
    if ":" not in text:
        return _HOST_NAME.fullmatch(text) is not None
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _host(text: str) -> str:
    if not _is_host(text):
        raise ValueError(f"{shown(text)} is no address and no host name")
    return text


def _url(text: str) -> str:
    """An http or https URL with no slash at its end. HOST:PORT alone means http.

    What may be a secret (a password, a query) is not repeated in the error.
    """
    quoted = "it" if {"@", "?", "#"} & set(text) else shown(text)
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        port = parts.port
        if "[" in parts.netloc:  # Python 3.10 does not look between the brackets
            ipaddress.IPv6Address(parts.hostname or "")
    except ValueError:  # a port out of range, or brackets around what is no IPv6 address
        raise ValueError(f"{quoted} is no URL") from None
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"{quoted} is no http or https URL")
    if "@" in parts.netloc:
        raise ValueError("it holds a user name or password")
    if "?" in text or "#" in text:
        raise ValueError("it holds a query or a fragment")
    clean = all(char.isprintable() and not char.isspace() for char in text)
    # Without its scheme a URL needs a port: a bare word is more likely a slip than a host.
    port_fits = port != 0 and not parts.netloc.endswith(":") and (port or url == text)
    if not (clean and port_fits and _is_host(parts.hostname or "")):
        raise ValueError(f"{quoted} is no URL")
    return url.rstrip("/")


def _rate(value: object) -> float:
    # JSON's true is a Python int, its integers are unbounded, and Python reads NaN and Infinity.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("a target QPS in it is no number")
    try:
        rate = float(value)
    except OverflowError:
        rate = math.inf
    if not 0 < rate < math.inf:
        raise ValueError("a target QPS in it is not more than 0, or not finite")
    return rate


def _rates(text: str) -> float | dict[str, float]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{shown(text)} is no JSON") from None
    if not isinstance(value, dict):
        return _rate(value)
    if not value:
        raise ValueError("it names no accelerator")
    return {accelerator: _rate(rate) for accelerator, rate in value.items()}


SIZE = Kind("SIZE", f"a whole number with a unit of {', '.join(_BYTES)} (none: bytes)", _size)
PORT = Kind("PORT", f"a port from 0 (a free one) to {MAX_PORT}", _whole(0, MAX_PORT))
COUNT = Kind("NUMBER", "a whole number from 1 to 999999999", _whole(1, 999_999_999))
WORKERS = Kind("NUMBER", "a whole number from 1 to 64", _whole(1, 64))
BOOLEAN = Kind("", ", ".join(_BOOLEANS), _boolean)
NAME = Kind("NAME", "printable text", _text)
STICKY = Kind(
    "header:NAME|cookie:NAME", "header: or cookie: and a name, such as cookie:session", _sticky
)
FILE = Kind("FILE", "the path of a file", _text)
HOST = Kind("HOST", "an IPv4 or IPv6 address, or a host name", _host)
URL = Kind("URL", "http://HOST:PORT or https://HOST:PORT, with a path or without", _url)
TARGET_QPS = Kind(
    "JSON", 'a JSON number more than 0, or a JSON object of them such as {"A100": 2.5}', _rates
)
