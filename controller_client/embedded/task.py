"""A SkyServe task file: what is in it, and what is wrong with it, by line and key. Pure."""

import difflib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

NAME = re.compile(r"[a-zA-Z]([-_.a-zA-Z0-9]{0,61}[a-zA-Z0-9])?")  # names files too
# A name and, on the next line, its value; the second by RFC 9110, section 5.
ENV = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*\n[^\0]*")
HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\n[^\x00-\x08\x0a-\x1f\x7f]*")
POLICIES = ("round_robin", "least_load", "instance_aware_least_load")

# SkyPilot's defaults.
TIMES = {"initial_delay_seconds": 1200, "timeout_seconds": 15}
SCALING = {"upscale_delay_seconds": 300, "downscale_delay_seconds": 1200}
FILES = ("workdir", "service.tls.keyfile", "service.tls.certfile")


class TaskError(Exception):
    """The file is no task that can be run here; `str` is one line that names file, line and key."""


class _FaultError(Exception):
    """A fault at a key; `parse` adds the file and the line."""

    def __init__(self, key: str, what: str) -> None:
        super().__init__(key, what)
        self.key = key
        self.what = what


# What a value must be: in words, its YAML types, and what else must hold.
Kind = tuple[str, tuple[str, ...], Callable[[Any], object]]

_text: Kind = ("a text", ("str",), lambda _: True)
_count: Kind = ("a whole number from 0 to 1000", ("int",), range(1001).__contains__)
_seconds: Kind = ("a number of seconds", ("int", "float"), lambda number: 0 <= number < math.inf)
_rates: Kind = (
    "a number or a map of numbers, each more than 0",
    ("int", "float", "map"),
    lambda rate: all(
        isinstance(each, int | float) and 0 < each < math.inf
        for each in (rate.values() if isinstance(rate, dict) else [rate])
    ),
)
_port: Kind = ("a port", ("int",), lambda number: 0 < number < 65536)
_name: Kind = ("a name of letters, digits and -_., 63 at the most", ("str",), NAME.fullmatch)
_policy: Kind = (f"one of {', '.join(POLICIES)}", ("str",), POLICIES.__contains__)
_values: Kind = (
    "a map of names and their texts or numbers",
    ("map",),
    lambda values: all(
        not isinstance(each, dict | list) and ENV.fullmatch(f"{key}\n{each}")
        for key, each in values.items()
    ),
)
_texts: Kind = (
    "a map of headers and their texts",
    ("map",),
    lambda values: all(
        isinstance(each, str) and HEADER.fullmatch(f"{key}\n{each}") for key, each in values.items()
    ),
)
_data: Kind = ("a map, or one as a text of JSON", ("str", "map"), lambda _: True)
_map: Kind = ("a map", ("map", "null"), lambda _: True)
_any: Kind = ("", (), lambda _: True)
_one: Kind = ("1: a replica here is one process on one machine", ("int",), {1}.__contains__)
_no_pool: Kind = ("possible here: a pool has no endpoint", (), lambda _: False)
_cloud: Kind = ("", (), lambda _: True)  # taken, and named as without effect

# Every key, and `*` for all others. A map is what has keys below it.
KEYS: dict[str, Kind] = {
    "name": _name, "workdir": _text, "setup": _text, "run": _text, "envs": _values, "secrets": _values,
    "resources.ports": _any, "resources.accelerators": _any, "resources.*": _cloud, "num_nodes": _one,
    "file_mounts": _map, "config": _cloud, "event_callback": _cloud, "experimental": _cloud,
    "inputs": _cloud, "outputs": _cloud, "volumes": _cloud, "pool": _no_pool,
    "service.readiness_probe.path": _text,
    "service.readiness_probe.post_data": _data,
    "service.readiness_probe.headers": _texts,
    "service.readiness_probe.initial_delay_seconds": _seconds,
    "service.readiness_probe.timeout_seconds": _seconds,
    "service.readiness_probe.endpoint_probe_interval_seconds": _cloud,
    "service.readiness_probe.consecutive_failure_threshold_timeout": _cloud,
    "service.replicas": _count,
    "service.replica_policy.min_replicas": _count,
    "service.replica_policy.max_replicas": _count,
    "service.replica_policy.num_overprovision": _cloud,
    "service.replica_policy.target_qps_per_replica": _rates,
    "service.replica_policy.upscale_delay_seconds": _seconds,
    "service.replica_policy.downscale_delay_seconds": _seconds,
    "service.replica_policy.dynamic_ondemand_fallback": _cloud,
    "service.replica_policy.base_ondemand_fallback_replicas": _cloud,
    "service.replica_policy.spot_placer": _cloud,
    "service.ports": _port, "service.load_balancing_policy": _policy, "service.load_balancer": _cloud,
    "service.tls.keyfile": _text, "service.tls.certfile": _text,
    "service.pool": _no_pool, "service.workers": _no_pool,
}  # fmt: skip
NEEDED = ("service", "run", "service.readiness_probe.path", "service.replica_policy.min_replicas")
NEEDED_TLS = ("service.tls.keyfile", "service.tls.certfile")


@dataclass(frozen=True)
class Task:
    """A task as it is run here. `config` is what decides whether replicas are reused."""

    config: dict[str, Any]

    @property
    def probe(self) -> dict[str, Any]:
        return {**TIMES, **self.config["service"]["readiness_probe"]}

    @property
    def policy(self) -> dict[str, Any]:
        """The `replica_policy` in full, with the rate of this task's accelerator."""
        policy = {**SCALING, **self.config["service"]["replica_policy"]}
        rate = policy.get("target_qps_per_replica")
        if isinstance(rate, dict):
            rate = next((rate[key] for key in rate if key.split(":")[0] == self.accelerator), None)
        return {"max_replicas": policy["min_replicas"], **policy, "target_qps_per_replica": rate}

    @property
    def accelerator(self) -> str:
        """The name that the ready list gives for its replicas."""
        asked = self.config["resources"].get("accelerators") or "unknown"
        return str(next(iter(asked)) if isinstance(asked, dict | list) else asked).split(":")[0]

    @property
    def envs(self) -> dict[str, str]:
        both = {**self.config.get("envs", {}), **self.config.get("secrets", {})}
        return {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in both.items()
        }


def parse(
    text: str, file: str, environ: Mapping[str, str], find: Callable[[str], str | None]
) -> tuple[Task, list[str]]:
    """The task in a file's text, and a line for each thing in it that has no effect here.

    `environ` gives the values of `envs` that have none; `find` the full path of a folder or file,
    None if there is none. Raises TaskError.
    """
    lines = {"": 1}
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        notes = list(_check(loader, node, "", lines))
        config = loader.construct_document(node)
        _check_whole(config, lines)
        _normalise(config, environ, find)
        shared = json.dumps(config, default=str, skipkeys=True, ensure_ascii=False)
        shared.encode()  # half a character cannot be written anywhere
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise TaskError(f"{file}:{line}: cannot be read as YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        first = str(error).partition("\n")[0]
        raise TaskError(f"{file}: cannot be read as YAML: {first}") from None
    except _FaultError as fault:
        where = f"{file}:{lines.get(fault.key) or lines[fault.key.rpartition('.')[0]]}"
        key = repr(fault.key)[1:-1]
        raise TaskError(f"{where}: {key}{key and ': '}{fault.what}") from None
    if not re.search(r"\{port\}|SKYPILOT_SERVE_PORT", config["run"]):
        notes.append("run: names neither {port} nor $SKYPILOT_SERVE_PORT, where it has to listen")
    return Task(json.loads(shared)), [f"{file}: {note}" for note in notes]


def _check(loader: yaml.SafeLoader, node: Any, key: str, lines: dict[str, int]) -> Iterator[str]:
    """Check a value and all below it, note the lines of keys, and name what has no effect."""
    tag = node.tag.rpartition(":")[2] if node else "null"
    kind = KEYS.get(key) or (KEYS.get(f"{key.rpartition('.')[0]}.*") if key else None)
    if key == "service.readiness_probe" and tag == "str":
        kind = _text
    if tag == "map":
        _note_lines(node, key, lines)
    if kind is None:
        yield from _check_map(loader, node, key, lines, is_map=tag == "map")
        return
    what, tags, fits = kind
    if (tags and tag not in tags) or not fits(loader.construct_document(node)):
        shown = f"{node.value[:60]!r} " if isinstance(node, yaml.ScalarNode) else ""
        raise _FaultError(key, f"{shown}is not {what}")
    if kind is _cloud or (key == "file_mounts" and node.value):
        yield f"{key}: has no effect on one machine"


def _note_lines(node: Any, key: str, lines: dict[str, int]) -> None:
    for name, _ in node.value:
        if not isinstance(name, yaml.ScalarNode):
            raise _FaultError(key, "holds a key that is no text")
        below = f"{key}.{name.value}" if key else name.value
        twice, lines[below] = below in lines, name.start_mark.line + 1
        if twice:
            raise _FaultError(below, "is there twice")


def _check_map(
    loader: yaml.SafeLoader, node: Any, key: str, lines: dict[str, int], *, is_map: bool
) -> Iterator[str]:
    if not is_map:
        raise _FaultError(key, "is not a map" if key else "the file holds no map of keys")
    prefix = f"{key}." if key else ""
    known = dict.fromkeys(
        each.removeprefix(prefix).split(".")[0] for each in KEYS if each.startswith(prefix)
    )
    for name, value in node.value:
        below = f"{prefix}{name.value}"
        if name.value not in known and "*" not in known:
            near = difflib.get_close_matches(name.value, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise _FaultError(below, f"no such key, {hint}")
        yield from _check(loader, value, below, lines)


def _check_whole(config: dict[str, Any], lines: Mapping[str, int]) -> None:
    """Check what is about more than one key."""
    service = config.get("service", {})
    short = isinstance(service.get("readiness_probe"), str)
    for key in (*NEEDED, *NEEDED_TLS):
        section = key.rpartition(".")[0]
        if key not in lines and section in lines and not (short and "probe" in key):
            raise _FaultError(section, f"{key.rpartition('.')[2]} is missing")
    policy = service.get("replica_policy", {})
    if policy and "replicas" in service:
        raise _FaultError("service.replicas", "is there beside replica_policy: use one of them")
    if policy.get("max_replicas", math.inf) < policy.get("min_replicas", 0):
        raise _FaultError("service.replica_policy.max_replicas", "is less than min_replicas")
    by_accelerator = isinstance(policy.get("target_qps_per_replica"), dict)
    if by_accelerator != (service.get("load_balancing_policy") == POLICIES[-1]):
        what = f"{POLICIES[-1]} and a map of target_qps_per_replica go together"
        raise _FaultError("service.load_balancing_policy", what)


def _normalise(
    config: dict[str, Any], environ: Mapping[str, str], find: Callable[[str], str | None]
) -> None:
    """Write short forms out, as SkyPilot does before it compares two tasks."""
    service = config["service"]
    for key in FILES:
        section = config if key == "workdir" else service.get("tls", {})
        name = key.rpartition(".")[2]
        if name in section and (path := find(section[name])) is None:
            raise _FaultError(key, f"there is no {section[name]}")
        if name in section:
            section[name] = path
    probe = service.get("readiness_probe", "/")
    probe = service["readiness_probe"] = {"path": probe} if isinstance(probe, str) else probe
    if not probe["path"].startswith("/"):
        raise _FaultError("service.readiness_probe", "its path does not begin with /")
    if isinstance(data := probe.get("post_data"), str):
        try:
            probe["post_data"] = json.loads(data)
        except ValueError:
            raise _FaultError("service.readiness_probe.post_data", "is not JSON") from None
    service.setdefault("replica_policy", {"min_replicas": service.get("replicas", 1)})
    config.setdefault("resources", {})
    mounts = config.get("file_mounts") or {}
    # SkyPilot mounts the working directory too, so that it forbids reuse as a mount does.
    where = {"workdir": config["workdir"]} if "workdir" in config else {}
    config["file_mounts"] = {**mounts, **where}
    for section in ("envs", "secrets"):
        for key, value in config.get(section, {}).items():
            if value is None and key not in environ:
                raise _FaultError(f"{section}.{key}", "has no value, here or in the environment")
            config[section][key] = environ[key] if value is None else value
