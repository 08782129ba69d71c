"""The sync call of SkyServe's controller: what is sent, and what its answer means. Pure.

Two shapes of answer exist: `{"replica_info": {url: {"gpu_type": name}}}`, and
`{"ready_replica_urls": [url, ...]}` of older releases. Where both are present the first counts.

How strict each part is follows from what a mistake costs. An answer that is not understood as a
whole changes nothing, so any doubt about it is an error. A replica left out of a list is drained,
so one bad URL costs only itself, and an odd accelerator costs only its name. A list in which
*every* URL is bad is an error too: taken for an empty list it would, in the end, drain every
replica because of a fault in how the list was written.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv6Address

from controller_client.errors import SyncError

SYNC_PATH = "/controller/load_balancer_sync"

# The controller's word for "no accelerator known".
UNKNOWN_ACCELERATOR = "unknown"

DEFAULT_PORTS = {"http": 80, "https": 443}

URL = re.compile(
    r"(?P<scheme>https?)://"
    r"(?:\[(?P<ipv6>[0-9a-f:.]+)\]|(?P<host>(?:[a-z0-9_-]{1,63}\.)*[a-z0-9_-]{1,63}))"
    r"(?::(?P<port>[0-9]{1,5}))?/?",
    re.IGNORECASE | re.ASCII,
)
MAX_HOST_LENGTH = 253  # RFC 1035, 2.3.4, as text
MAX_ACCELERATOR_LENGTH = 64
MAX_SHOWN_LENGTH = 100


@dataclass(frozen=True, slots=True)
class ReadyReplica:
    """One replica that the controller calls ready.

    `url` is `scheme://host:port`: scheme and host in lower case, the port always written out,
    IPv6 addresses in brackets and in their short form. Equal replicas have equal URLs.
    `accelerator` is the name that SkyPilot gives it (`A100`), None where it knows none.
    """

    url: str
    accelerator: str | None


@dataclass(frozen=True, slots=True)
class ReadyList:
    """What the controller answers: the ready replicas, in its order, each once.

    `skipped` holds the entries that are no URL of a replica, in a form that may be logged.
    """

    replicas: tuple[ReadyReplica, ...]
    skipped: tuple[str, ...]


def encode_sync(timestamps: Sequence[float]) -> bytes:
    """Return the body of a sync call that reports these arrivals (Unix seconds).

    They are sent in ascending order: the autoscaler trims its window by bisection.
    Raises ValueError for a timestamp that is not finite.
    """
    report = {"request_aggregator": {"timestamps": sorted(timestamps)}}
    return json.dumps(report, allow_nan=False, separators=(",", ":")).encode("ascii")


def parse_sync(body: bytes) -> ReadyList:
    """Read the body of an answer to a sync call.

    Raises SyncError with result `bad_payload` for anything that is no ready list.
    """
    entries = _entries(_decode(body))
    accelerators: dict[str, str | None] = {}
    skipped: list[str] = []
    for entry, accelerator in entries:
        url = _normalised(entry)
        if url is None:
            skipped.append(_shown(entry))
        elif accelerators.get(url) is None:
            accelerators[url] = accelerator
    if skipped and not accelerators:
        raise SyncError(
            "bad_payload",
            f"none of the {len(skipped)} replicas in the controller's answer has a usable URL,"
            f" the first is {skipped[0]}",
        )
    return ReadyList(
        replicas=tuple(ReadyReplica(url, name) for url, name in accelerators.items()),
        skipped=tuple(skipped),
    )


def _decode(body: bytes) -> dict[str, object]:
    try:
        # Decoded here because json.loads would also guess at UTF-16 and UTF-32.
        answer = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise SyncError("bad_payload", "the controller's answer is not JSON") from None
    if not isinstance(answer, dict):
        raise SyncError("bad_payload", "the controller's answer is not a JSON object")
    return answer


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _entries(answer: dict[str, object]) -> Iterable[tuple[object, str | None]]:
    """Give each listed URL, not yet checked, with its accelerator."""
    if "replica_info" in answer:
        info = answer["replica_info"]
        if not isinstance(info, dict):
            raise SyncError("bad_payload", "replica_info in the controller's answer is not a map")
        return [(url, _accelerator(facts)) for url, facts in info.items()]
    if "ready_replica_urls" in answer:
        urls = answer["ready_replica_urls"]
        if not isinstance(urls, list):
            raise SyncError(
                "bad_payload", "ready_replica_urls in the controller's answer is not a list"
            )
        return [(url, None) for url in urls]
    raise SyncError("bad_payload", "the controller's answer holds no list of replicas")


def _accelerator(facts: object) -> str | None:
    name = facts.get("gpu_type") if isinstance(facts, dict) else None
    if not isinstance(name, str) or not 0 < len(name) <= MAX_ACCELERATOR_LENGTH:
        return None
    return name if name.isprintable() and name.lower() != UNKNOWN_ACCELERATOR else None


def _normalised(entry: object) -> str | None:
    """Return the replica's URL in the form that ReadyReplica describes, None if it is none.

    A path, query or user in a URL makes it a bad one: they would be lost without a word.
    """
    match = URL.fullmatch(entry) if isinstance(entry, str) else None
    if match is None:
        return None
    host = _host(match["ipv6"], match["host"])
    scheme = match["scheme"].lower()
    port = int(match["port"] or DEFAULT_PORTS[scheme])
    if host is None or not 0 < port <= 65535:
        return None
    return f"{scheme}://{host}:{port}"


def _host(ipv6: str | None, name: str) -> str | None:
    try:
        if ipv6 is not None:
            return f"[{IPv6Address(ipv6)}]"
        if name.rpartition(".")[2].isdigit():  # what ends in a number is an address or nothing
            return str(IPv4Address(name))
    except AddressValueError:
        return None
    return name.lower() if len(name) <= MAX_HOST_LENGTH else None


def _shown(entry: object) -> str:
    """Return a form of a bad URL that may be logged: short, quoted, escaped, without secrets.

    Where a user and a query end is not clear in a URL that is none: with an `@` anywhere
    nothing of it is shown, and what follows the first `?` or `#` never is.
    """
    if not isinstance(entry, str):
        return f"a value of type {type(entry).__name__}"
    if "@" in entry:
        return "a URL with a user in it"
    return ascii(re.split(r"[?#]", entry, maxsplit=1)[0][:MAX_SHOWN_LENGTH])
