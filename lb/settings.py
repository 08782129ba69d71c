"""Every option of the load balancer, once: flag, variable, unit, default, check and meaning.

The fields of `Settings` are the list. The command line, the environment, `--help` and the
README's table are made from it. Nothing here reads the environment or opens a file: `load` is
given both sources as mappings, and names every fault that it finds in them, not just the first.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_args, get_type_hints

from lb.kinds import (
    BOOLEAN,
    COUNT,
    FILE,
    HOST,
    MAX_PORT,
    NAME,
    PORT,
    SIZE,
    STICKY,
    TARGET_QPS,
    URL,
    WORKERS,
    Kind,
    choice,
    duration,
    nearest,
)
from lb.policies import POLICIES, TargetQps
from lb.stickiness import Sticky

ENV_PREFIX = "SKYSERVE_LB_"
# One whole empty sync is outlived, with the longest gap that was seen inside (25 s of 30 s).
GRACE_INTERVALS = 1.5
ADMIN_PORT_OFFSET = 1000

RetryMode = Literal["before-response", "safe"]
LogFormat = Literal["auto", "json", "console"]
LogLevel = Literal["debug", "info", "warning", "error"]
AccessLog = Literal["off", "errors", "all"]


class SettingsError(ValueError):
    """The configuration cannot be used; `faults` says why, one line each."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = tuple(faults)


@dataclass(frozen=True, slots=True)
class Option:
    """One option as users meet it.

    `default` is in the form in which a user would give it. It is empty where the option is
    required, and where `unset` says in words what happens without it.
    """

    kind: Kind
    group: str
    meaning: str
    default: str = ""
    unset: str = ""
    alias: str | None = None
    name: str = ""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def flags(self) -> tuple[str, ...]:
        """The flag, then the stock load balancer's name for it, if it has one."""
        return (self.flag,) if self.alias is None else (self.flag, self.alias)

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def required(self) -> bool:
        return not self.default and not self.unset

    @property
    def takes_value(self) -> bool:
        """Whether a value follows the flag: not so for yes-or-no options."""
        return self.kind is not BOOLEAN


_SERVICE = "Service"
_PORTS = "Ports"
_LIST = "Ready list"
_CHOICE = "Choice of a replica"
_REQUESTS = "Requests"
_CLIENTS = "Clients"
_REPLICAS = "Replicas"
_LOGS = "Logs"

_POSITIVE = duration(zero=False)
_ZERO_OR_MORE = duration(zero=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The checked configuration, made by `load`. Durations are in seconds, sizes in bytes."""

    controller_url: Annotated[
        str,
        Option(
            URL,
            _SERVICE,
            "the service's SkyServe controller, which knows the ready replicas",
            alias="--controller-addr",
        ),
    ]
    service_name: Annotated[
        str, Option(NAME, _SERVICE, "name of the service: a label on every metric", "default")
    ]
    host: Annotated[
        str,
        Option(HOST, _PORTS, "address that clients connect to", "0.0.0.0"),
    ]
    port: Annotated[
        int,
        Option(
            PORT,
            _PORTS,
            "port that clients connect to; 0 takes a free one",
            alias="--load-balancer-port",
        ),
    ]
    admin_host: Annotated[
        str, Option(HOST, _PORTS, "address of health, metrics and status page", "127.0.0.1")
    ]
    admin_port: Annotated[
        int,
        Option(
            PORT,
            _PORTS,
            "port of health, metrics and status page; 0 takes a free one",
            unset=f"port + {ADMIN_PORT_OFFSET}, or 0 where the port is 0",
        ),
    ]
    admin_token_file: Annotated[
        str | None,
        Option(
            FILE,
            _PORTS,
            "file with the token that POST /drain must bring as `Authorization: Bearer`; "
            "without one it works on a loopback address alone",
            unset="no token",
        ),
    ]
    tls_keyfile: Annotated[
        str | None,
        Option(FILE, _PORTS, "private key, to serve clients over TLS", unset="no TLS"),
    ]
    tls_certfile: Annotated[
        str | None,
        Option(FILE, _PORTS, "certificate chain that goes with the key", unset="no TLS"),
    ]
    workers: Annotated[
        int,
        Option(
            WORKERS,
            _PORTS,
            "processes that serve the port, each with its share of connections and memory",
            "1",
        ),
    ]
    sync_interval: Annotated[
        float, Option(_POSITIVE, _LIST, "time between two syncs with the controller", "20s")
    ]
    grace_period: Annotated[
        float,
        Option(
            _ZERO_OR_MORE,
            _LIST,
            "how long replicas stay in use while the ready list is empty; 0: not at all",
            unset=f"{GRACE_INTERVALS} x sync interval",
        ),
    ]
    policy: Annotated[
        str,
        Option(
            choice("policy", tuple(POLICIES)),
            _CHOICE,
            "how a replica is chosen",
            "least_load",
            alias="--load-balancing-policy",
        ),
    ]
    target_qps: Annotated[
        TargetQps,
        Option(
            TARGET_QPS,
            _CHOICE,
            "requests per second that a replica is good for: a number, or numbers by accelerator, "
            "which instance_aware_least_load needs",
            unset="unknown",
        ),
    ]
    sticky: Annotated[
        Sticky | None,
        Option(
            STICKY,
            _CHOICE,
            "requests with the same value of this header or cookie go to the same replica; "
            "those without go by the policy",
            unset="off",
        ),
    ]
    total_timeout: Annotated[
        float,
        Option(
            _POSITIVE,
            _REQUESTS,
            "longest time from arrival to response head, over all attempts and waits",
            "285s",
        ),
    ]
    connect_timeout: Annotated[
        float, Option(_POSITIVE, _REQUESTS, "longest time to connect, for each attempt", "5s")
    ]
    no_replica_wait: Annotated[
        float,
        Option(
            _ZERO_OR_MORE,
            _REQUESTS,
            "how long a request waits in all while no replica can take it",
            "10s",
        ),
    ]
    retry: Annotated[
        RetryMode,
        Option(
            choice("retry mode", get_args(RetryMode)),
            _REQUESTS,
            "what is sent again if lost before the response began: any request, or only safe ones "
            "(idempotent method, or an Idempotency-Key)",
            "before-response",
        ),
    ]
    replay_limit: Annotated[
        int,
        Option(
            SIZE,
            _REQUESTS,
            "largest request body kept for another attempt; above it there is only one",
            "16MiB",
        ),
    ]
    replay_budget: Annotated[
        int, Option(SIZE, _REQUESTS, "memory for all request bodies kept", "512MiB")
    ]
    stream_idle_timeout: Annotated[
        float,
        Option(_ZERO_OR_MORE, _REQUESTS, "longest silence within a response; 0: no limit", "0"),
    ]
    header_timeout: Annotated[
        float, Option(_POSITIVE, _CLIENTS, "longest time to send a request's head", "30s")
    ]
    keepalive_timeout: Annotated[
        float, Option(_POSITIVE, _CLIENTS, "idle client connections are closed after this", "75s")
    ]
    max_connections: Annotated[
        int, Option(COUNT, _CLIENTS, "most client connections at one time", "10000")
    ]
    drain_timeout: Annotated[
        float,
        Option(
            _ZERO_OR_MORE,
            _CLIENTS,
            "how long running requests may go on at shutdown, or on a replica that has left",
            "600s",
        ),
    ]
    # uvicorn closes idle connections after 5 s; ours must close first, or a request meets the end.
    upstream_keepalive: Annotated[
        float, Option(_POSITIVE, _REPLICAS, "idle replica connections are closed after this", "4s")
    ]
    upstream_ca: Annotated[
        str | None,
        Option(
            FILE,
            _REPLICAS,
            "certificates to trust for https replicas",
            unset="those of the system",
        ),
    ]
    upstream_insecure: Annotated[
        bool, Option(BOOLEAN, _REPLICAS, "do not verify https replicas", "no")
    ]
    log_format: Annotated[
        LogFormat,
        Option(
            choice("log format", get_args(LogFormat)),
            _LOGS,
            "form of a log line; auto: console on a terminal, else json",
            "auto",
        ),
    ]
    log_level: Annotated[
        LogLevel,
        Option(choice("log level", get_args(LogLevel)), _LOGS, "lowest level logged", "info"),
    ]
    access_log: Annotated[
        AccessLog,
        Option(
            choice("access log", get_args(AccessLog)),
            _LOGS,
            "which finished requests are logged",
            "errors",
        ),
    ]


OPTIONS: tuple[Option, ...] = tuple(
    replace(hint.__metadata__[0], name=name)
    for name, hint in get_type_hints(Settings, include_extras=True).items()
)
_BY_NAME = {option.name: option for option in OPTIONS}
_VARIABLES = {option.variable for option in OPTIONS}

# A limit that was given and can never be reached is a mistake. One left at its default is none:
# who lowers the total time-out alone need not lower the others with it.
_AT_MOST = (
    ("connect_timeout", "total_timeout"),
    ("no_replica_wait", "total_timeout"),
    ("replay_limit", "replay_budget"),
)

# These belong to the add-on for SkyPilot's controller, which shares the prefix.
_ADD_ON = frozenset({ENV_PREFIX + "HOOK", ENV_PREFIX + "REQUIREMENT"})
# Kubernetes gives every container variables made of the names of the Services around it: one
# called skyserve-lb makes SKYSERVE_LB_PORT=tcp://10.0.0.1:80 and six more. None is meant for us.
_SERVICE_LINK = re.compile(
    r"\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)=.*"
    r"|\w+_PORT=(tcp|udp|sctp)://.*",
    re.DOTALL,
)


def load(values: Mapping[str, str], environ: Mapping[str, str]) -> Settings:
    """The settings from `values` (by field name, as given with flags) and the environment.

    A flag beats its variable; an empty variable counts as unset. Raises SettingsError with every
    fault found, an unknown SKYSERVE_LB_ variable included, and TypeError for a name in `values`
    that is no field.
    """
    if unknown := sorted(values.keys() - _BY_NAME.keys()):
        raise TypeError(f"no such settings: {', '.join(unknown)}")
    variables = _variables(environ)
    faults = []
    parsed: dict[str, Any] = {}  # by field name; one with a fault is left out
    sources: dict[str, str] = {}  # by field name: the flag or the variable that gave it
    for option in OPTIONS:
        text = option.default
        if option.name in values:
            text, sources[option.name] = values[option.name], " / ".join(option.flags)
        elif option.variable in variables:
            text, sources[option.name] = variables[option.variable], option.variable
        elif option.required:
            faults.append(_missing(option))
            continue
        elif not text:
            parsed[option.name] = None
            continue
        try:
            parsed[option.name] = option.kind.parse(text.strip())
        except ValueError as error:
            faults.append(f"{sources[option.name]}: {error}; accepted: {option.kind.accepted}")
    faults += _derive(parsed, sources)
    faults += _contradictions(parsed, sources)
    faults += _strangers(variables)
    if faults:
        raise SettingsError(faults)
    return Settings(**parsed)


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that are set and meant for the load balancer."""
    return {
        name: text
        for name, text in environ.items()
        if name.startswith(ENV_PREFIX)
        and text
        and name not in _ADD_ON
        and not _SERVICE_LINK.fullmatch(f"{name}={text}")
    }


def _missing(option: Option, why: str = "") -> str:
    flags = " / ".join(option.flags)
    return f"{flags} (or {option.variable}) is missing{why}; accepted: {option.kind.accepted}"


def _derive(parsed: dict[str, Any], sources: Mapping[str, str]) -> Iterator[str]:
    """Fill in the defaults that follow from other settings; yield what is wrong with them."""
    if "grace_period" not in sources and "sync_interval" in parsed:
        parsed["grace_period"] = GRACE_INTERVALS * parsed["sync_interval"]
    if "admin_port" not in sources and "port" in parsed:
        port = parsed["port"] + ADMIN_PORT_OFFSET if parsed["port"] else 0
        parsed["admin_port"] = port
        if port > MAX_PORT:
            yield _missing(_BY_NAME["admin_port"], f", and its default, {port}, is out of range")


def _contradictions(parsed: Mapping[str, Any], sources: Mapping[str, str]) -> Iterator[str]:
    """Settings that are sound one by one, but not together."""
    for low, high in _AT_MOST:
        if low in sources and {low, high} <= parsed.keys() and parsed[low] > parsed[high]:
            yield f"{sources[low]}: it is beyond {_BY_NAME[high].flag} and could never be reached"
    if parsed.get("port") and parsed["port"] == parsed.get("admin_port"):
        yield f"{sources['admin_port']}: it is the port for clients; accepted: any other"
    for one, other in (("tls_keyfile", "tls_certfile"), ("tls_certfile", "tls_keyfile")):
        if one in sources and other not in sources:
            yield f"{sources[one]}: it needs {_BY_NAME[other].flag}; accepted: both or neither"
    if parsed.get("upstream_insecure") and "upstream_ca" in sources:
        yield f"{sources['upstream_insecure']}: it leaves --upstream-ca unused; accepted: one of them"
    fits = "target_qps" not in parsed or isinstance(parsed["target_qps"], Mapping)
    if parsed.get("policy") == "instance_aware_least_load" and not fits:
        yield (
            f"{sources.get('target_qps', '--target-qps')}: instance_aware_least_load needs it by "
            'accelerator; accepted: a JSON object such as {"A100": 2.5}'
        )


def _strangers(variables: Mapping[str, str]) -> Iterator[str]:
    """A misspelt variable must not pass in silence: its setting would keep its default."""
    for name in sorted(variables.keys() - _VARIABLES):
        # Without the prefix, which would make all names alike.
        near = nearest(name.removeprefix(ENV_PREFIX), [*map(str.upper, _BY_NAME), "HOOK"])
        hint = f", did you mean {ENV_PREFIX}{near}?" if near else "; see --help for those there are"
        yield f"{name}: no such setting{hint}"


def option_table() -> str:
    """The options as a Markdown table, for the README."""
    rows = ["| flag | variable | default | meaning |", "| --- | --- | --- | --- |"]
    for option in OPTIONS:
        flag = f"{option.flag} {option.kind.metavar}".strip().replace("|", r"\|")
        stock = f" (stock: `{option.alias}`)" if option.alias else ""
        default = f"`{option.default}`" if option.default else option.unset or "required"
        rows.append(f"| `{flag}`{stock} | `{option.variable}` | {default} | {option.meaning} |")
    return "\n".join(rows)
