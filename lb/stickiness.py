"""Stickiness: the requests of one client session go to one replica, while that is there. Pure.

A session is what a header or a cookie says it is. Its replica is the one that scores highest for it
(rendezvous hashing), so that no table is kept, balancers side by side agree, and a change of the list
moves only the sessions of the replicas that left or came.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

from lb.headers import Fields


@dataclass(frozen=True, slots=True)
class Sticky:
    """Where the session's name is found: in the header or in the cookie of this name."""

    source: Literal["header", "cookie"]
    name: str


def session_of(fields: Fields, sticky: Sticky) -> bytes | None:
    """The session that a request belongs to; None if it names none."""
    name = sticky.name.encode()
    if sticky.source == "header":
        return fields.first.get(name.lower()) or None
    for value in fields.all(b"cookie"):
        for pair in value.split(b";"):
            cookie, _, content = pair.strip().partition(b"=")
            if cookie == name and content:
                return content
    return None


def affinity(session: bytes) -> Callable[[str], bytes]:
    """The score of a replica, by its URL, for this session; the highest has it."""
    return lambda url: blake2b(url.encode(), key=blake2b(session).digest(), digest_size=8).digest()
