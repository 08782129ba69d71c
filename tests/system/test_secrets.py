"""Header values, queries and bodies, of clients, replicas and controllers: none comes out in a log, on the
admin port or in an answer of our own, whatever fails and however much is logged."""

from __future__ import annotations

import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from controller_client.testing import (
    Behaviour,
    FakeController,
    ScriptedReplica,
    answer,
    cut,
    early,
    hang_up,
    raw,
    reset,
    stale,
    stall,
    stream,
)
from lb.frames import close_frame
from tests.net.harness import Closed, RawClient, RunningBalancer, request
from tests.net.test_hostile import ALL_BAD, BOMBS, NO_HTTP
from tests.net.test_tls import MakePair, make_pair
from tests.net.test_upgrades import handshake, switch
from tests.system.process import ROOT, command, environment

__all__ = ["make_pair"]  # a fixture

# Long, so that a part of it that is quoted has one of these; never in a path, which is logged.
SECRET = "s3cret"
LONG = SECRET * 8
PATIENCE_SECONDS = 20.0

SECRETS = {
    "Authorization": f"Bearer {LONG}",
    "Proxy-Authorization": f"Basic {LONG}",
    "Cookie": f"session={LONG}; b={LONG}",
    "X-Api-Key": LONG,
    f"X-{SECRET}": "name",
    "X-Request-Id": f"{LONG} {LONG}",  # not one that is safe to log
    "X-Forwarded-For": LONG,
    "X-Forwarded-Host": LONG,
    "Forwarded": f"for={LONG}",
    "Idempotency-Key": LONG,
    "Referer": f"http://x/?{LONG}",
    "User-Agent": LONG,
}
TELLS = [
    (b"Set-Cookie", f"a={LONG}".encode()),
    (b"X-Request-Id", LONG.encode()),
    (b"Location", f"/?{LONG}".encode()),
    (f"X-{SECRET}".encode(), LONG.encode()),
]


def asked(
    method: str = "GET",
    headers: Mapping[str, str] = SECRETS,
    *,
    target: str = f"/path?key={LONG}",
    body: bytes = b"",
) -> bytes:
    return request(method, target, {**SECRETS, "Connection": "close", **headers}, body)


POST = asked("POST", body=LONG.encode())
HALF_POST = asked("POST", {"Content-Length": "1000"}) + LONG.encode()
BAD_BODY = asked("POST", {"Transfer-Encoding": "chunked"}) + b"3\r\nabc\r\n" + LONG.encode()
OK = b"HTTP/1.1 200 OK\r\nSet-Cookie: " + LONG.encode() + b"\r\n"

# What a client sends, what the replica does, and whether the answer is ours alone.
Case = tuple[bytes, "Behaviour | None", bool]
CASES: dict[str, Case] = {
    "answered": (POST, answer(LONG.encode(), headers=TELLS), False),
    "404": (asked(), answer(LONG.encode(), status=404, headers=TELLS), False),
    "500 with a reason": (
        asked(),
        raw(b"HTTP/1.1 500 " + LONG.encode() + b"\r\nContent-Length: 0\r\n\r\n"),
        False,
    ),
    "early": (HALF_POST, early(413), False),
    "streamed": (POST, stream([LONG.encode()], headers=TELLS), False),
    "absolute target": (asked(target=f"http://u:{LONG}@x/?{LONG}"), answer(), False),
    "absolute target without a path": (asked(target=f"http://x?{LONG}"), answer(), False),
    "options": (asked("OPTIONS", target="*"), answer(), False),
    "fragment": (asked(target=f"/path#{LONG}"), answer(), False),
    "head": (asked("HEAD"), answer(headers=TELLS), False),
    "old": (asked().replace(b"HTTP/1.1", b"HTTP/1.0"), answer(headers=TELLS), False),
    "reset": (POST, reset(), True),
    "hung up": (POST, hang_up(), True),
    "stale": (POST, stale(), False),
    "timed out": (POST, stall(), True),
    "silent": (POST, stream([LONG.encode(), threading.Event()], headers=TELLS), False),
    "cut": (POST, cut(LONG.encode()), False),
    "reset in the body": (POST, cut(LONG.encode(), how="rst"), False),
    "cut in the head": (POST, raw(OK + b"X: " + LONG.encode(), close=True), True),
    "switched unasked": (
        asked(),
        raw(b"HTTP/1.1 101 " + LONG.encode() + b"\r\nUpgrade: " + LONG.encode() + b"\r\n\r\n"),
        True,
    ),
    "flood of hints": (
        asked(),
        raw((b"HTTP/1.1 102 Processing\r\nX: " + LONG.encode() + b"\r\n\r\n") * 200),
        False,
    ),
    "broken chunks": (
        asked(),
        raw(OK + b"Transfer-Encoding: chunked\r\n\r\nzz" + LONG.encode() + b"\r\n"),
        True,
    ),
    "bad body": (BAD_BODY, None, True),
    "expectation": (asked("GET", {"Expect": LONG}), None, True),
    "upgrade to the unknown": (
        asked("GET", {"Connection": "Upgrade", "Upgrade": LONG}),
        answer(b"", status=426, headers=[*TELLS, (b"Connection", b"close")]),
        False,
    ),
    **{f"bad: {name}": (data, None, True) for name, data in ALL_BAD.items()},
    **{f"bomb: {name}": (data, None, True) for name, (data, _) in BOMBS.items()},
    **{
        f"no HTTP: {name}": (asked(), raw(data, close=True), True) for name, data in NO_HTTP.items()
    },
}

# What a controller may answer instead of a list.
LISTED = b"HTTP/1.1 200 OK\r\nSet-Cookie: " + LONG.encode() + b"\r\n"
SYNCS: dict[str, Behaviour] = {
    "status": answer(LONG.encode(), status=500),
    "reason": raw(b"HTTP/1.1 500 " + LONG.encode() + b"\r\nContent-Length: 0\r\n\r\n", close=True),
    "redirect": answer(LONG.encode(), status=302, headers=TELLS),
    "no HTTP": raw(LONG.encode() + b"\r\n\r\n", close=True),
    "bad header": raw(LISTED + LONG.encode() + b"\r\n\r\n", close=True),
    "bad length": raw(LISTED + b"Content-Length: " + LONG.encode() + b"\r\n\r\n", close=True),
    "bad chunks": raw(LISTED + b"Transfer-Encoding: chunked\r\n\r\n" + LONG.encode(), close=True),
    "cut": raw(LISTED + b"Content-Length: 1000\r\n\r\n" + LONG.encode(), close=True),
    "no JSON": answer(LONG.encode()),
    "no text": answer(b"\xff" + LONG.encode()),
    "no map": answer(f'["{LONG}"]'.encode()),
    "no list": answer(f'{{"replica_info": "{LONG}"}}'.encode()),
    "no key": answer(f'{{"{LONG}": "{LONG}"}}'.encode()),
    "a user": answer(f'{{"replica_info": {{"http://u:{LONG}@x:1": {{}}}}}}'.encode()),
    "a query": answer(f'{{"replica_info": {{"http://x:1?{LONG}": {{}}}}}}'.encode()),
    "a fragment": answer(f'{{"ready_replica_urls": ["http://x:1#{LONG}"]}}'.encode()),
    "one of two": answer(f'{{"ready_replica_urls": ["http://x:1", "http://x:1?{LONG}"]}}'.encode()),
}


class Process:
    """A balancer whose output, all of it, is kept as it is."""

    def __init__(self, folder: Path, controller_url: str, *options: str) -> None:
        self._out, self._err = folder / "stdout", folder / "stderr"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                command(controller_url, *options),
                cwd=ROOT,
                env=environment(),
                stdout=out,
                stderr=err,
            )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.wait()

    def text(self) -> str:
        return self._out.read_text("utf-8", "replace") + self._err.read_text("utf-8", "replace")

    def wait_for(self, pattern: str, count: int = 1) -> list[str]:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(found := re.findall(pattern, self.text())) < count:
            assert time.monotonic() < deadline, f"no {pattern} in:\n{self.text()}"
            time.sleep(0.02)
        return found

    def addresses(self) -> tuple[tuple[str, int], tuple[str, int]]:
        """Of the data port and of the admin port; the log is at level info, then."""
        (admin,) = self.wait_for(r"admin\W+127\.0\.0\.1:(\d+)")
        (data,) = self.wait_for(r"address\W+127\.0\.0\.1:(\d+)")
        return ("127.0.0.1", int(data)), ("127.0.0.1", int(admin))


def all_of(address: tuple[str, int], data: bytes) -> bytes:
    """Send this; the answer, or what comes of it."""
    with RawClient(address) as client:
        try:
            client.send(data)
            received = b""
            while True:
                answered = client.answer(head_only=data.startswith(b"HEAD"))
                received += answered.head + answered.raw_body
                if answered.status >= 200:
                    return received
        except Closed as closed:
            return received + closed.received
        except (BrokenPipeError, ConnectionResetError):
            return b""


Start = Callable[..., Process]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a balancer that logs all it can."""
    with ExitStack() as stack:

        def start(controller_url: str, log_format: str, *options: str) -> Process:
            words = ("--log-format", log_format, "--log-level", "debug", "--access-log", "all")
            return stack.enter_context(Process(tmp_path, controller_url, *words, *options))

        yield start


# The levels only leave lines out, so that the lowest shows all that can be seen.
every_format = pytest.mark.parametrize("log_format", ["json", "console"])


PATHS = ("/", "/status", "/metrics", "/replicas", "/readyz", "/livez")


def assert_silent(process: Process, admin: tuple[str, int] | None = None) -> None:
    text = process.text()
    assert SECRET not in text.lower(), [
        line for line in text.splitlines() if SECRET in line.lower()
    ]
    for path in PATHS if admin else ():
        assert admin is not None
        with RawClient(admin) as client:
            page = client.ask(request("GET", path, host="localhost"))
        assert SECRET.encode() not in (page.head + page.body).lower(), path


@every_format
def test_what_passes_through_is_kept_to_oneself(log_format: str, start: Start) -> None:
    """Every request ends in some way here; none of those ways tells."""
    limits = {
        "--total-timeout": "500ms",
        "--no-replica-wait": "200ms",
        "--stream-idle-timeout": "200ms",
        "--sticky": "cookie:session",
    }
    words = [word for pair in limits.items() for word in pair]
    with ScriptedReplica("a") as a, FakeController([a.url]) as controller:
        process = start(controller.url, log_format, *words)
        data, admin = process.addresses()
        process.wait_for("replica.added")
        for name, (sent, behaviour, ours) in CASES.items():
            if behaviour is not None:
                a.behave_always(behaviour)
            received = all_of(data, sent)
            assert not (ours and SECRET.encode() in received.lower()), (name, received)
            assert received or not ours, name
        a.behave_always()
        leave_in_each_phase(data, a)
        talk_over_a_tunnel(data, a)
        a.refuse()
        for _ in range(2):
            assert SECRET.encode() not in all_of(data, POST)
        a.faults.clear()
        process.wait_for(r"request\.finished", 40)
        process.wait_for(r"request\.refused", len(ALL_BAD) // 2)
        process.wait_for(r"request\.retried", 3)
        process.wait_for(r"replica\.ejected")
        assert_silent(process, admin)
        process.process.send_signal(signal.SIGTERM)
        assert process.process.wait(PATIENCE_SECONDS) == 0
        assert_silent(process)


def leave_in_each_phase(data: tuple[str, int], a: ScriptedReplica) -> None:
    for sent, behaviour, until in (
        (POST[:-20], answer(), None),
        (POST, stall(), None),
        (POST, stream([LONG.encode(), threading.Event()], headers=TELLS), LONG.encode()),
    ):
        a.behave(behaviour)
        a.requests.clear()
        with RawClient(data) as client:
            client.send(sent)
            a.wait_for(lambda: a.requests)
            if until is not None:
                client.read_until(until)


def talk_over_a_tunnel(data: tuple[str, int], a: ScriptedReplica) -> None:
    upgrade = handshake(target=f"/chat?{LONG}").replace(
        b"\r\n\r\n", f"\r\nAuthorization: {LONG}\r\nCookie: {LONG}\r\n\r\n".encode()
    )
    a.behave(switch(early=LONG.encode()))
    with RawClient(data) as client:
        client.send(upgrade)
        client.read_until(LONG.encode())
        client.send(LONG.encode() + close_frame(1000))
        client.read_until(LONG.encode())
    a.behave(switch(protocol=LONG.encode()))
    with RawClient(data) as client:
        client.send(upgrade)
        client.read_until(b"\r\n\r\n")


@every_format
def test_what_a_controller_says_is_kept_to_oneself(log_format: str, start: Start) -> None:
    with ScriptedReplica("controller") as controller:
        controller.behave(*SYNCS.values())
        controller.behave_always(answer(b'{"replica_info": {}}'))
        often = ("--sync-interval", "20ms", "--no-replica-wait", "0")
        process = start(controller.url, log_format, *often)
        data, admin = process.addresses()
        controller.wait_for(lambda: len(controller.requests) > len(SYNCS))
        process.wait_for(r"sync\.failed")
        assert SECRET.encode() not in all_of(data, POST)
        assert_silent(process, admin)


# --- files --------------------------------------------------------------------------------------

# In its middle: a file is not quoted, neither by its first line nor by its last.
JUNK = f"-----BEGIN PRIVATE KEY-----\n{LONG}\n-----END PRIVATE KEY-----\n"


def test_files_that_cannot_be_used_are_not_quoted(make_pair: MakePair, tmp_path: Path) -> None:
    good, junk = make_pair(), tmp_path / "junk"
    long = tmp_path / "long"
    junk.write_text(JUNK)
    long.write_text(f"{LONG} {LONG}")
    for option, value, more in (
        ("--tls-keyfile", str(junk), ("--tls-certfile", str(good.certificate))),
        ("--tls-certfile", str(junk), ("--tls-keyfile", str(good.key))),
        ("--upstream-ca", str(junk), ()),
        ("--admin-token-file", str(long), ()),
        ("--controller-url", f"http://u:{LONG}@x:1", ()),
        ("--controller-url", f"http://x:1?{LONG}", ()),
    ):
        with Process(tmp_path, "http://127.0.0.1:1", option, value, *more) as process:
            assert process.process.wait(PATIENCE_SECONDS) == 2
            assert option in process.text()
            assert_silent(process)


def test_files_that_are_replaced_by_junk_are_not_quoted(
    start: Start, make_pair: MakePair, tmp_path: Path
) -> None:
    pair, token = make_pair(), tmp_path / "token"
    token.write_text(LONG)
    token.chmod(0o600)
    options = {
        "--tls-keyfile": str(pair.key),
        "--tls-certfile": str(pair.certificate),
        "--admin-token-file": str(token),
    }
    words = [word for pair in options.items() for word in pair]
    process = start("http://127.0.0.1:1", "console", *words)
    _, admin = process.addresses()
    pair.key.write_text(JUNK)
    process.wait_for(r"tls\.reload_failed")
    pair.certificate.write_text(JUNK)
    process.wait_for(r"tls\.reload_failed", 2)
    token.write_text(f"{LONG} {LONG}")
    process.wait_for(r"admin\.token_reload_failed")
    token.write_text(LONG * 2)
    process.wait_for(r"admin\.token_reloaded")
    assert_silent(process, admin)


# --- the admin port -----------------------------------------------------------------------------


def test_what_the_admin_port_is_sent_is_kept_to_oneself(start: Start, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("the-real-one")
    token.chmod(0o600)
    process = start("http://127.0.0.1:1", "json", "--admin-token-file", str(token))
    _, admin = process.addresses()
    for path in (*PATHS, "/nowhere", "/drain"):
        for method in ("GET", "POST", "HEAD", "DELETE"):
            body = LONG.encode() if method == "POST" else b""
            received = all_of(admin, asked(method, target=f"{path}?{LONG}", body=body))
            assert SECRET.encode() not in received.lower(), (method, path)
    for name, data in ALL_BAD.items():
        # aiohttp answers a malformed request with the part of it that it could not read.
        assert all_of(admin, data + b"\r\n\r\n"), name
    assert process.process.poll() is None
    assert_silent(process, admin)


# --- faults of ours -----------------------------------------------------------------------------


def test_a_fault_of_ours_tells_its_place_and_not_its_cause(
    fake_controller: FakeController, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> bytes:
        raise ValueError(LONG)

    with ScriptedReplica() as replica:
        fake_controller.set_ready([replica.url])
        with RunningBalancer(fake_controller.url) as balancer:
            balancer.wait_for_replicas(1)
            for name in ("request_head", "response_head"):
                with monkeypatch.context() as patched:
                    patched.setattr(f"lb.proxy.{name}", fail)
                    received = all_of(balancer.address, POST)
                assert received.startswith(b"HTTP/1.1 500 ")
                assert SECRET.encode() not in received
            failed = balancer.log.named("request.failed")
            assert [line["error"] for line in failed] == ["ValueError"] * 2
            assert all("fail" in line["where"][-1] for line in failed)
            assert SECRET not in str(balancer.log.events)
            assert balancer.metric("requests_total", outcome="lb_error") == 2
            balancer.log.events.clear()
