"""Which session a request belongs to, and which replica that makes it go to."""

from __future__ import annotations

import pytest

from lb.headers import Fields
from lb.policies import POLICIES
from lb.replicas import ReplicaTable
from lb.settings import SettingsError, load
from lb.stickiness import Sticky, affinity, session_of

URLS = [f"http://10.0.0.{number}:8000" for number in range(1, 6)]


class Entry:
    accelerator = None

    def __init__(self, url: str) -> None:
        self.url = url


@pytest.mark.parametrize(
    ("sticky", "headers", "session"),
    [
        (Sticky("header", "X-User"), [(b"x-user", b"ann")], b"ann"),
        (Sticky("header", "X-User"), [(b"X-User", b"")], None),
        (Sticky("header", "X-User"), [(b"Other", b"ann")], None),
        (Sticky("cookie", "sid"), [(b"Cookie", b"a=1; sid=ann; b=2")], b"ann"),
        (Sticky("cookie", "sid"), [(b"cookie", b"a=1"), (b"Cookie", b"sid=x=y")], b"x=y"),
        (Sticky("cookie", "sid"), [(b"Cookie", b"sid=; SID=no; xsid=no")], None),
        (Sticky("cookie", "sid"), [(b"Set-Cookie", b"sid=no")], None),
    ],
)
def test_where_the_session_is_found(
    sticky: Sticky, headers: list[tuple[bytes, bytes]], session: bytes | None
) -> None:
    assert session_of(Fields(headers), sticky) == session


def test_sessions_are_spread_and_move_only_with_their_replica() -> None:
    def home(session: bytes, urls: list[str]) -> str:
        return max(urls, key=affinity(session))

    sessions = [b"session-%d" % number for number in range(500)]
    homes = {session: home(session, URLS) for session in sessions}
    shares = [list(homes.values()).count(url) for url in URLS]
    assert min(shares) > 60, shares
    for session in sessions:
        left = home(session, URLS[1:])
        assert left == homes[session] or homes[session] == URLS[0]


def test_a_session_stays_and_falls_back_when_its_replica_is_set_aside() -> None:
    table = ReplicaTable(POLICIES["least_load"](None), grace_period=0, drain_timeout=60)
    table.apply([Entry(url) for url in URLS], 0.0)  # type: ignore[misc]
    leases = [table.lease(1.0, session=b"ann") for _ in range(20)]
    homes = {lease.replica for lease in leases if lease}
    assert len(homes) == 1
    first = leases[0]
    assert first is not None
    table.failed(first, 1.0, unreachable=True)
    elsewhere = table.lease(1.0, session=b"ann")
    assert elsewhere is not None
    assert elsewhere.replica not in homes


@pytest.mark.parametrize("text", ["cookie", "cookie:", "query:x", "header:a b"])
def test_what_names_no_session_is_refused(text: str) -> None:
    needed = {"controller_url": "http://127.0.0.1:1", "port": "0"}
    assert load({**needed, "sticky": "cookie:sid"}, {}).sticky == Sticky("cookie", "sid")
    assert load({**needed, "sticky": "header:X-User"}, {}).sticky == Sticky("header", "X-User")
    assert load(needed, {}).sticky is None
    with pytest.raises(SettingsError, match=r"--sticky: .* accepted: header: or cookie:"):
        load({**needed, "sticky": text}, {})
