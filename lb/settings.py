"""Every option of the load balancer, once: flag, environment variable, unit, default, check, help.

`Settings` is the list: one field an option, its `Option` in the field's metadata. The command
line, the environment, `--help` and the README's table are all made from it. Nothing here reads
the environment or opens a file; `load` is given both sources as mappings, and names every fault
that it finds in them, not just the first.
"""

import difflib
import ipaddress
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

ENV_PREFIX = "SKYSERVE_LB_"
POLICIES = ("round_robin", "least_load", "instance_aware_least_load")

RetryMode = Literal["before-response", "safe"]
LogFormat = Literal["auto", "json", "console"]
LogLevel = Literal["debug", "info", "warning", "error"]
AccessLog = Literal["off", "errors", "all"]

# A grace period of one and a half intervals outlives one whole empty sync (design: "Ready list").
GRACE_INTERVALS = 1.5
ADMIN_PORT_OFFSET = 1000

_MAX_PORT = 65535
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
# The number of digits is bounded, so that no value can become infinite or slow to convert.
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([^\W\d]*)")
_SIZE = re.compile(r"([0-9]{1,15})\s*([^\W\d]*)")
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_.])?")


class SettingsError(ValueError):
    """The configuration is not usable. `faults` names every reason, each in one line."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = tuple(faults)


# --- kinds of value ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kind:
    """How the text of an option becomes a value.

    `parse` raises ValueError with what is wrong; `accepted` says what would have been right.
    """

    metavar: str
    accepted: str
    parse: Callable[[str], Any]


def _shown(text: str) -> str:
    """The text as it may stand in one line of an error, whatever it holds."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _near(text: str, known: Sequence[str]) -> str:
    """A hint at the known word that is most like `text`, or nothing."""
    matches = difflib.get_close_matches(text, known, n=1)
    return f", did you mean {matches[0]}?" if matches else ""


def _amount(text: str, pattern: re.Pattern[str], units: Mapping[str, float], what: str) -> float:
    match = pattern.fullmatch(text)
    if match is None:
        raise ValueError(f"{_shown(text)} is no {what}")
    number, unit = match.groups()
    if unit and unit not in units:
        raise ValueError(f"{_shown(text)} has the unknown unit {_shown(unit)}")
    return float(number) * units[unit] if unit else float(number)


def _duration(*, zero: bool) -> Kind:
    """A span of time in seconds; `zero` says whether 0 has a meaning."""

    def parse(text: str) -> float:
        seconds = _amount(text, _DURATION, _SECONDS, "duration")
        if seconds == 0 and not zero:
            raise ValueError(f"{_shown(text)} is not more than 0")
        return seconds

    least = "0 or more" if zero else "more than 0"
    return Kind(
        "DURATION",
        f"a number, {least}, with one of the units {', '.join(_SECONDS)} (seconds without one)",
        parse,
    )


def _size(text: str) -> int:
    return int(_amount(text, _SIZE, _BYTES, "size"))


def _whole(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if re.fullmatch(r"[0-9]{1,9}", text) is None:
            raise ValueError(f"{_shown(text)} is no whole number")
        if not low <= int(text) <= high:
            raise ValueError(f"{text} is out of range")
        return int(text)

    return parse


def _choice(what: str, words: Sequence[str]) -> Kind:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"{_shown(text)} is no {what}{_near(text, words)}")
        return text

    return Kind("|".join(words), ", ".join(words), parse)


def _boolean(text: str) -> bool:
    if text.lower() not in _BOOLEANS:
        raise ValueError(f"{_shown(text)} is neither yes nor no")
    return _BOOLEANS[text.lower()]


def _label(text: str) -> str:
    if not text or not text.isprintable():
        raise ValueError("it is empty" if not text else f"{_shown(text)} holds control characters")
    return text


def _path(text: str) -> str:
    if not text:
        raise ValueError("it is empty")
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
        raise ValueError(f"{_shown(text)} is no address and no host name")
    return text


def _url(text: str) -> str:
    """An http or https URL without a slash at its end. A password in it is never repeated."""
    shown = "it" if {"@", "?", "#"} & set(text) else _shown(text)
    # The stock balancer's flag is often given as host:port, so the scheme may be left out there.
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # a port out of range, brackets without an IPv6 address between them
        raise ValueError(f"{shown} is no URL") from None
    if any(not char.isprintable() or char.isspace() for char in text):
        raise ValueError(f"{shown} is no URL")
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"{shown} is no http or https URL")
    if "@" in parts.netloc:
        raise ValueError("it holds a user name or password")
    if "?" in text or "#" in text:
        raise ValueError("it holds a query or fragment")
    if not _is_host(parts.hostname or "") or port == 0 or (url != text and port is None):
        raise ValueError(f"{shown} is no URL")
    return url.rstrip("/")


def _rate(value: object) -> float:
    """A JSON number above 0. JSON's `true` is a Python int, and its integers have no bound."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("a target QPS is no number")
    try:
        rate = float(value)
    except OverflowError:
        rate = math.inf
    if not 0 < rate < math.inf:
        raise ValueError("a target QPS is not more than 0 or not finite")
    return rate


def _target_qps(text: str) -> float | dict[str, float]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{_shown(text)} is no JSON") from None
    if not isinstance(value, dict):
        return _rate(value)
    if not value:
        raise ValueError("it names no accelerator")
    return {name: _rate(rate) for name, rate in value.items()}


_POSITIVE = _duration(zero=False)
_ZERO_OR_MORE = _duration(zero=True)
_SIZE_KIND = Kind(
    "SIZE",
    f"a whole number with one of the units {', '.join(_BYTES)} (bytes without one)",
    _size,
)
_PORT = Kind("PORT", f"a port from 0 to {_MAX_PORT}; 0 takes a free one", _whole(0, _MAX_PORT))
_COUNT = Kind("NUMBER", "a whole number from 1 to 999999999", _whole(1, 999_999_999))
_HOST = Kind("HOST", "an IPv4 or IPv6 address or a host name", _host)
_URL = Kind("URL", "http://HOST:PORT or https://HOST:PORT, a path may follow", _url)
_LABEL = Kind("NAME", "printable text", _label)
_PATH = Kind("FILE", "the path of a PEM file", _path)
_BOOLEAN = Kind("", ", ".join(_BOOLEANS), _boolean)
_QPS = Kind(
    "JSON", 'a JSON number above 0, or an object of them such as {"A100": 2.5}', _target_qps
)


# --- the options ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Option:
    """One option as users meet it.

    `default` is text in the form in which a user would give it. It is empty where the option is
    `required`, is off unless it is given, or is worked out from others; `default_note` says which.
    """

    name: str
    kind: Kind
    help: str
    group: str
    default: str
    default_note: str
    required: bool
    alias: str | None

    @property
    def flags(self) -> tuple[str, ...]:
        """The flag, then the one by which the stock load balancer knows the option, if any."""
        flag = "--" + self.name.replace("_", "-")
        return (flag,) if self.alias is None else (flag, self.alias)

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def takes_value(self) -> bool:
        """Whether the flag is followed by a value: a yes-or-no option's is not."""
        return self.kind is not _BOOLEAN


def _option(
    kind: Kind,
    group: str,
    text: str,
    *,
    default: str = "",
    note: str = "",
    required: bool = False,
    alias: str | None = None,
) -> Any:
    return field(metadata={"option": (kind, text, group, default, note, required, alias)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The checked configuration. Times are seconds, sizes are bytes. Made by `load`."""

    controller_url: str = _option(
        _URL,
        "Service",
        "SkyServe controller to sync with",
        required=True,
        alias="--controller-addr",
    )
    service_name: str = _option(
        _LABEL, "Service", "name of the service, a label on every metric", default="default"
    )
    host: str = _option(_HOST, "Ports", "address that serves clients", default="0.0.0.0")
    port: int = _option(
        _PORT,
        "Ports",
        "port that serves clients; 0 takes a free one",
        required=True,
        alias="--load-balancer-port",
    )
    admin_host: str = _option(
        _HOST, "Ports", "address of health, metrics and the status page", default="127.0.0.1"
    )
    admin_port: int = _option(
        _PORT,
        "Ports",
        "port of health, metrics and the status page; 0 takes a free one",
        note=f"--port + {ADMIN_PORT_OFFSET}, or 0 with --port 0",
    )
    tls_keyfile: str | None = _option(
        _PATH, "Ports", "private key (PEM) to serve clients over TLS", note="no TLS"
    )
    tls_certfile: str | None = _option(
        _PATH, "Ports", "certificate chain (PEM) that goes with the key", note="no TLS"
    )
    sync_interval: float = _option(
        _POSITIVE, "Ready list", "time between two syncs with the controller", default="20s"
    )
    grace_period: float = _option(
        _ZERO_OR_MORE,
        "Ready list",
        "how long an empty ready list leaves the replicas in use; 0 turns that off",
        note=f"{GRACE_INTERVALS} x --sync-interval",
    )
    policy: str = _option(
        _choice("policy", POLICIES),
        "Choice of a replica",
        "how a replica is chosen",
        default="least_load",
        alias="--load-balancing-policy",
    )
    target_qps: Mapping[str, float] | float | None = _option(
        _QPS,
        "Choice of a replica",
        "requests per second that a replica is good for: a number, or an object of numbers by "
        "accelerator, which instance_aware_least_load needs",
        note="none",
    )
    total_timeout: float = _option(
        _POSITIVE,
        "Requests",
        "from a request's arrival to the head of its response, over all attempts",
        default="285s",
    )
    connect_timeout: float = _option(
        _POSITIVE, "Requests", "to connect to a replica, each attempt", default="5s"
    )
    no_replica_wait: float = _option(
        _ZERO_OR_MORE,
        "Requests",
        "how long a request waits in all while no replica can take it",
        default="10s",
    )
    retry: RetryMode = _option(
        _choice("retry mode", get_args(RetryMode)),
        "Requests",
        "which requests may be sent again when they were lost before the response began: all, "
        "or the safe ones (idempotent, or with an Idempotency-Key)",
        default="before-response",
    )
    replay_limit: int = _option(
        _SIZE_KIND,
        "Requests",
        "request bodies up to this size are kept to be sent again; larger ones get one attempt",
        default="16MiB",
    )
    replay_budget: int = _option(
        _SIZE_KIND, "Requests", "memory for kept request bodies in all", default="512MiB"
    )
    stream_idle_timeout: float = _option(
        _ZERO_OR_MORE, "Requests", "longest silence within a response; 0 sets no limit", default="0"
    )
    header_timeout: float = _option(
        _POSITIVE, "Clients", "for a client to send the head of a request", default="30s"
    )
    keepalive_timeout: float = _option(
        _POSITIVE, "Clients", "after which an idle client connection is closed", default="75s"
    )
    max_connections: int = _option(
        _COUNT, "Clients", "client connections at the same time", default="10000"
    )
    drain_timeout: float = _option(
        _ZERO_OR_MORE,
        "Clients",
        "for running requests to finish on shutdown, or on a replica that leaves",
        default="600s",
    )
    # uvicorn closes an idle connection after 5 s: ours goes first, so that no request meets it.
    upstream_keepalive: float = _option(
        _POSITIVE, "Replicas", "after which an idle connection to a replica is closed", default="4s"
    )
    upstream_ca: str | None = _option(
        _PATH,
        "Replicas",
        "certificates (PEM) to trust for https replicas",
        note="the system's",
    )
    upstream_insecure: bool = _option(
        _BOOLEAN, "Replicas", "do not verify the certificates of https replicas", default="no"
    )
    log_format: LogFormat = _option(
        _choice("log format", get_args(LogFormat)),
        "Logs",
        "auto is console on a terminal, else json",
        default="auto",
    )
    log_level: LogLevel = _option(
        _choice("log level", get_args(LogLevel)), "Logs", "least level to log", default="info"
    )
    access_log: AccessLog = _option(
        _choice("access log", get_args(AccessLog)),
        "Logs",
        "which finished requests get a line",
        default="errors",
    )


OPTIONS = tuple(Option(item.name, *item.metadata["option"]) for item in fields(Settings))
_BY_NAME = {option.name: option for option in OPTIONS}

# A limit that is given by hand and can never be reached is a mistake. One that is left at its
# default is not: who lowers the total time-out alone need not lower the others with it.
_AT_MOST = (
    ("connect_timeout", "total_timeout"),
    ("no_replica_wait", "total_timeout"),
    ("replay_limit", "replay_budget"),
)


# --- loading ----------------------------------------------------------------------------------


def load(values: Mapping[str, str], environ: Mapping[str, str]) -> Settings:
    """The settings from `values` (by field name, as given with flags) and the environment.

    A flag beats its variable; an empty variable counts as unset. Raises SettingsError with every
    fault, and TypeError for a name in `values` that is no field.
    """
    if not values.keys() <= _BY_NAME.keys():
        raise TypeError(f"no such settings: {', '.join(sorted(values.keys() - _BY_NAME.keys()))}")
    variables = _own_variables(environ)
    faults = [_unknown_variable(name) for name in variables if name not in _VARIABLES]
    sources: dict[str, str] = {}  # by field name: the flag or variable that was given
    parsed: dict[str, Any] = {}
    for option in OPTIONS:
        text = option.default
        if option.name in values:
            text, sources[option.name] = values[option.name], " / ".join(option.flags)
        elif option.variable in variables:
            text, sources[option.name] = variables[option.variable], option.variable
        elif not text:
            parsed[option.name] = None
            if option.required:
                faults.append(_missing(option))
            continue
        try:
            parsed[option.name] = option.kind.parse(text.strip())
        except ValueError as error:
            faults.append(f"{sources[option.name]}: {error}; accepted: {option.kind.accepted}")
    faults += _derive(parsed, sources)
    faults += _contradictions(parsed, sources)
    if faults:
        raise SettingsError(faults)
    return Settings(**parsed)


_VARIABLES = {option.variable: option for option in OPTIONS}
# These belong to the add-on for SkyPilot's controller, which shares the prefix.
_HOOK_VARIABLE = re.compile(ENV_PREFIX + r"HOOK(_\w+)?")
# Kubernetes puts such variables into every container, made from the names of the Services around
# it: a Service called skyserve-lb gives SKYSERVE_LB_PORT=tcp://10.0.0.1:80 and six more.
_SERVICE_LINK = re.compile(
    r"\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)=.*"
    r"|\w+_PORT=(tcp|udp|sctp)://.*",
    re.DOTALL,
)


def _own_variables(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(ENV_PREFIX)
        and value
        and not _HOOK_VARIABLE.fullmatch(name)
        and not _SERVICE_LINK.fullmatch(f"{name}={value}")
    }


def _unknown_variable(name: str) -> str:
    return f"{name}: there is no such setting{_near(name, list(_VARIABLES))}"


def _missing(option: Option) -> str:
    flags = " / ".join(option.flags)
    return f"{flags} (or {option.variable}) is missing; accepted: {option.kind.accepted}"


def _derive(parsed: dict[str, Any], sources: Mapping[str, str]) -> Iterator[str]:
    """Fill in the defaults that follow from other settings, where those are sound themselves."""
    if "grace_period" not in sources and "sync_interval" in parsed:
        parsed["grace_period"] = GRACE_INTERVALS * parsed["sync_interval"]
    port = parsed.get("port")
    if "admin_port" not in sources and port is not None:
        parsed["admin_port"] = port + ADMIN_PORT_OFFSET if port else 0
        if parsed["admin_port"] > _MAX_PORT:
            yield (
                f"--admin-port (or {ENV_PREFIX}ADMIN_PORT) is needed with port {port}: "
                f"{parsed['admin_port']}, its default, is out of range"
            )


def _contradictions(parsed: Mapping[str, Any], sources: Mapping[str, str]) -> Iterator[str]:
    """Settings that are sound one by one and not together. A faulty one is not in `parsed`."""
    for low, high in _AT_MOST:
        if low in sources and {low, high} <= parsed.keys() and parsed[low] > parsed[high]:
            yield f"{sources[low]}: it exceeds {_BY_NAME[high].flags[0]} and could never be reached"
    if (
        "admin_port" in sources
        and parsed.get("admin_port")
        and (parsed["admin_port"] == parsed.get("port"))
    ):
        yield f"{sources['admin_port']}: it is the port for clients too; give it one of its own"
    for given, absent in (("tls_keyfile", "tls_certfile"), ("tls_certfile", "tls_keyfile")):
        if given in sources and absent not in sources:
            yield f"{sources[given]}: {_BY_NAME[absent].flags[0]} is missing; give both or neither"
    if parsed.get("upstream_insecure") and "upstream_ca" in sources:
        yield f"{sources['upstream_insecure']}: it would leave --upstream-ca unused; give one"
    if parsed.get("policy") == "instance_aware_least_load" and (
        "target_qps" in parsed and not isinstance(parsed["target_qps"], dict)
    ):
        yield (
            f"{sources.get('target_qps', '--target-qps')}: instance_aware_least_load needs it by "
            'accelerator; accepted: a JSON object such as {"A100": 2.5}'
        )


# --- documentation ----------------------------------------------------------------------------


def option_table() -> str:
    """All options as a Markdown table, for the README."""
    rows = ["| flag | variable | default | meaning |", "| --- | --- | --- | --- |"]
    for option in OPTIONS:
        flag, *aliases = option.flags
        value = f" {option.kind.metavar}" if option.takes_value else ""
        flag = f"`{flag}{value}`".replace("|", "\\|")
        stock = "".join(f" (stock: `{alias}`)" for alias in aliases)
        default = f"`{option.default}`" if option.default else option.default_note or "required"
        rows.append(f"| {flag}{stock} | `{option.variable}` | {default} | {option.help} |")
    return "\n".join(rows)
