"""`lb.terminal.show`: the status in a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller_client.testing import ReplicaFactory, answer
from lb.terminal import show
from tests.net.canned import CannedAdmin, busy_ticks, replica, snapshot
from tests.net.conftest import StartBalancer

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 20.0
EVIL = "\x1b[31m\x07[bold]x[/bold]\x9b1m\r\n"
SHOW = "import sys; from lb.terminal import show; sys.exit(show({!r}, watch=True, as_json={}))"


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


@pytest.mark.usefixtures("wide")
def test_it_prints_what_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    now = time.time()
    busy = snapshot(
        replica("a:1", accelerator="L4", in_flight=3, finished=75, failed=2, since=now - 100),
        replica("b:1", finished=25, ejected=True, ejected_until=now + 60, failures=2, since=0.0),
        in_flight=3,
        oldest_seconds=1.5,
        ticks=busy_ticks(now),
        events=[
            {"at": now, "level": "info", "event": "replica.added", "fields": {"replica": "a:1"}},
            {"at": now, "level": "warning", "event": "list.held", "fields": {"replicas": "2"}},
        ],
    )
    with CannedAdmin(busy) as url:
        assert show(url, watch=False, as_json=False) == 0
    printed = lines(capsys.readouterr().out)
    assert printed[0] == "chat Ready skyserve-lb 0.1.0, standalone, up 1 h 1 min"
    assert "policy least_load" in printed
    assert "sync ok, answered 4 s ago, every 20 s" in printed
    assert "list held no" in printed
    assert "replicas 2 serving, 1 ejected" in printed
    assert "in flight 3, oldest 1.5 s" in printed
    clock = time.strftime("%H:%M:%S", time.localtime(now - 100))
    assert f"a:1 serving L4 3 75 75.0 % 2 {clock}" in printed
    assert (
        "b:1 serving ejected (2 in a row, tried again in 1 min 0 s) 0 25 25.0 % 0 1970-01-01"
        in printed
    )
    assert [line.split(" ", 1)[1] for line in printed[-2:]] == [
        "warning list.held replicas=2",
        "replica.added replica=a:1",
    ]
    (answered,) = (line for line in printed if line.startswith("answered "))
    assert re.fullmatch(r"answered [▁▂▃▄▅▆▇█ ]{40,} [0-9.]+ /s [0-9.]+ /s", answered)


@pytest.mark.usefixtures("wide")
def test_it_prints_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    now = time.time()
    bad = snapshot(replica("a:1", state="held"), not_ready="no routable replica", processes=2)
    bad["about"] = {**bad["about"], "sticky": "cookie:sid"}
    bad["sync"] = {
        **bad["sync"],
        "failing_since": now - 70,
        "empty_since": now - 12,
        "result": "timeout",
        "cause": "slow",
    }
    admin = CannedAdmin(bad)
    with admin as url:
        assert show(url, watch=False, as_json=False) == 0
        first = lines(capsys.readouterr().out)
        bad["sync"] = {**bad["sync"], "failing_since": None, "result": None}
        bad["draining"] = True
        assert show(url, watch=False, as_json=False) == 0
    assert first[0].startswith("chat Not ready: no routable replica skyserve-lb")
    assert "2 processes" in first[0]
    assert "policy least_load, sticky by cookie:sid" in first
    (sync,) = (line for line in first if line.startswith("sync "))
    assert re.fullmatch(r"sync FAILING for 1 min 1\d s \(timeout: slow\), answered \d+ s ago", sync)
    (held,) = (line for line in first if line.startswith("list held "))
    assert re.fullmatch(r"list held HELD for 1\d s, released in 1\d s if it stays empty", held)
    second = lines(capsys.readouterr().out)
    assert second[0].startswith("chat Draining ")
    assert "sync the first call is on its way" in second


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_it_fits_and_nothing_steers_the_terminal(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    evil = snapshot(
        replica(EVIL, accelerator=EVIL, ejected=True),
        not_ready=EVIL,
        ticks=busy_ticks(time.time()),
        events=[{"at": 0.0, "level": EVIL, "event": EVIL, "fields": {EVIL: EVIL}}],
    )
    evil["about"] = {**evil["about"], "service": EVIL, "policy": EVIL, "mode": EVIL, "sticky": EVIL}
    evil["sync"] = {**evil["sync"], "failing_since": 0.0, "cause": EVIL, "result": EVIL}
    with CannedAdmin(evil) as url:
        assert show(url, watch=False, as_json=False) == 0
        printed = capsys.readouterr().out
        assert show(url, watch=False, as_json=True) == 0
        as_json = capsys.readouterr().out
    assert all(char.isprintable() or char == "\n" for char in printed + as_json)
    assert "[bold]x[/bold]" in printed
    assert max(map(len, printed.splitlines())) <= int(columns)
    assert json.loads(as_json)["about"]["service"] == EVIL


def test_json_is_what_the_balancer_said(
    replica_factory: ReplicaFactory,
    start_balancer: StartBalancer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    a = replica_factory()
    balancer = start_balancer(a)
    assert show(f"127.0.0.1:{balancer.admin[1]}", watch=False, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    said = json.loads(balancer.admin_get("/status").body)
    assert found.keys() == said.keys()
    assert found["about"] == said["about"]
    assert [each["url"] for each in found["replicas"]] == [a.url]


# --- faults ---------------------------------------------------------------------------------------


def test_a_url_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert show("ftp://host", watch=False, as_json=False) == 2
    out, err = capsys.readouterr()
    assert (out, err) == (
        "",
        (
            "skyserve-lb: --balancer: 'ftp://host' is no http or https URL; accepted: http://HOST:PORT "
            "or https://HOST:PORT, with a path or without\n"
        ),
    )


@contextlib.contextmanager
def answering(data: bytes) -> Iterator[str]:
    """Something that takes a connection, says this and closes; nothing: it keeps silent."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                connection.recv(65536)
                if not data:
                    connection.recv(1)
                connection.sendall(data)
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        thread.join(PATIENCE_SECONDS)


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"SSH-2.0-x\r\n", "it speaks no HTTP"),
        (b"HTTP/1.1 nonsense\r\n\r\n", "it speaks no HTTP"),
        (b"", "none within 0.2 s"),
    ],
)
def test_what_does_not_answer(
    as_json: bool,
    data: bytes,
    reason: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lb.terminal.TIMEOUT_SECONDS", 0.2)
    with answering(data) as url:
        assert show(url, watch=True, as_json=as_json) == 1
    out, err = capsys.readouterr()
    assert (out, err) == (
        "",
        (
            f"skyserve-lb: {url}: no answer ({reason}); --balancer is the admin port, which the balancer "
            "names in the line that it logs at its start\n"
        ),
    )


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert show(f"http://127.0.0.1:{port}/", watch=False, as_json=False) == 1
    assert f"http://127.0.0.1:{port}: no answer (Connection refused); " in capsys.readouterr().err


def test_the_admin_port_by_https(
    start_balancer: StartBalancer, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"https://127.0.0.1:{start_balancer().admin[1]}"
    assert show(url, watch=False, as_json=False) == 1
    assert f"{url}: no answer (it speaks no TLS; try http://); " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "status"), [(b"no", 200), (b"[]", 200), (b'{"about": 1}', 404), (b"{}", 200)]
)
def test_the_data_port_is_not_the_admin_port(
    body: bytes,
    status: int,
    replica_factory: ReplicaFactory,
    start_balancer: StartBalancer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    a = replica_factory()
    a.behave_always(answer(body, status=status))
    balancer = start_balancer(a)
    url = f"http://127.0.0.1:{balancer.address[1]}"
    assert show(url, watch=False, as_json=False) == 1
    assert capsys.readouterr().err == (
        f"skyserve-lb: {url}: what answers there (with {status}) is not the admin port of a "
        "skyserve-lb; that is by default the data port + 1000\n"
    )


# --- watching -------------------------------------------------------------------------------------


def test_it_is_watched_until_interrupted() -> None:
    admin = CannedAdmin(snapshot(replica("first:1")))
    master, slave = pty.openpty()
    with admin as url:
        process = subprocess.Popen(
            [sys.executable, "-c", SHOW.format(url, False)],
            cwd=ROOT,
            env=os.environ
            | {"PYTHONPATH": str(ROOT), "COLUMNS": "120", "LINES": "60", "TERM": "xterm"},
            stdout=slave,
            stderr=subprocess.PIPE,
        )
        os.close(slave)
        seen = b""

        def wait_for(text: bytes) -> None:
            nonlocal seen
            while text not in seen:
                seen += os.read(master, 65536)
            seen = seen.partition(text)[2]

        wait_for(b"first:1")
        admin.snapshot = snapshot(replica("second:1"))
        wait_for(b"second:1")
    wait_for(b"no answer (Connection refused)")
    wait_for(b"second:1")
    with CannedAdmin(snapshot(replica("third:1")), port=admin.port):
        wait_for(b"third:1")
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(OSError):
        while os.read(master, 65536):
            pass
    _, err = process.communicate(timeout=PATIENCE_SECONDS)
    os.close(master)
    assert (process.returncode, err) == (0, b"")


def test_json_is_watched_line_by_line_until_nobody_reads() -> None:
    admin = CannedAdmin(snapshot(replica("first:1")))
    with admin as url:
        process = subprocess.Popen(
            [sys.executable, "-c", SHOW.format(url, True)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        for _ in range(2):
            assert json.loads(process.stdout.readline())["replicas"][0]["name"] == "first:1"
        process.stdout.close()
        assert process.wait(PATIENCE_SECONDS) == 0
        assert process.stderr.read() == b""
        process.stderr.close()
