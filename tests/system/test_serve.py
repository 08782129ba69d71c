"""`skyserve-lb serve` as a process: what it binds, what it prints, and what it refuses to start with."""

from __future__ import annotations

import json
import os
import pty
import random
import re
import resource
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller_client.testing import (
    Answer,
    FakeController,
    ReplicaFactory,
    ScriptedReplica,
    answer,
)
from tests.net.harness import RawClient, request
from tests.system.process import (
    Serve,
    address_in,
    command,
    end_at_once,
    environment,
    refused,
    self_signed,
)


@pytest.fixture
def a(replica_factory: ReplicaFactory, fake_controller: FakeController) -> ScriptedReplica:
    """The one replica of the ready list."""
    replica = replica_factory()
    fake_controller.set_ready([replica.url])
    return replica


@pytest.fixture
def taken() -> Iterator[str]:
    """A port on which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield str(listener.getsockname()[1])


# --- what it binds ----------------------------------------------------------------------------


def test_the_start_line_names_what_is_bound(
    a: ScriptedReplica, fake_controller: FakeController
) -> None:
    with Serve(fake_controller.url, "--service-name", "chat") as serve:
        started = serve.log.events[0]
        assert {name: started[name] for name in ("event", "level", "service", "policy")} == {
            "event": "server.started",
            "level": "info",
            "service": "chat",
            "policy": "least_load",
        }
        assert started["controller"] == fake_controller.url
        assert serve.address[1] != 0 != serve.admin[1]
        serve.wait_for_replicas(1)
        assert serve.ask(request()).status == 200
        assert serve.ask_admin("/readyz").status == 200


def test_the_admin_port_is_1000_above_that_for_clients(fake_controller: FakeController) -> None:
    port = free_pair()
    with Serve(fake_controller.url, "--port", str(port)) as serve:
        assert serve.address == ("127.0.0.1", port)
        assert serve.admin == ("127.0.0.1", port + 1000)


def free_pair() -> int:
    """A port that is free, as is the one 1000 above it; both below those that the kernel gives out."""
    ports = random.sample(range(10_000, 19_000), 1000)
    return next(port for port in ports if is_free(port) and is_free(port + 1000))


def is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("host", ["::1", "localhost"])
def test_every_address_of_a_host_is_named_and_served(
    host: str, a: ScriptedReplica, fake_controller: FakeController
) -> None:
    with Serve(fake_controller.url, "--host", host, "--admin-host", host) as serve:
        serve.wait_for_replicas(1)
        started = serve.log.events[0]
        addresses = [address_in(text) for text in started["address"].split(", ")]
        assert {found for found, _ in addresses} <= {"::1", "127.0.0.1"}
        for address in addresses:
            with RawClient(address) as client:
                assert client.ask(request()).status == 200
        for admin in started["admin"].split(", "):
            with RawClient(address_in(admin)) as client:
                assert client.ask(request(target="/livez")).body == b"ok\n"


@pytest.mark.parametrize(
    ("port", "flag"), [("--port", "--port"), ("--load-balancer-port", "--port")]
)
def test_a_port_in_use(port: str, flag: str, taken: str, fake_controller: FakeController) -> None:
    options = (port, taken, "--admin-port", "0")
    if port != "--port":
        code, line = refused_with(fake_controller.url, *options)
    else:
        code, line = refused(fake_controller.url, *options)
    assert code == 3
    assert line == (
        f"cannot listen on 127.0.0.1:{taken}: Address already in use; choose another with {flag}"
    )
    assert fake_controller.syncs == []


def refused_with(url: str, *options: str) -> tuple[int, str]:
    """As `refused`, without a --port of its own."""
    words = command(url, *options)
    at = words.index("--port")
    ended = subprocess.run(
        words[:at] + words[at + 2 :],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    (line,) = ended.stderr.splitlines()
    return ended.returncode, line.removeprefix("skyserve-lb: ")


def test_an_admin_port_in_use(taken: str, fake_controller: FakeController) -> None:
    code, line = refused(fake_controller.url, "--admin-port", taken)
    assert code == 3
    assert line == (
        f"cannot listen on 127.0.0.1:{taken}: Address already in use; "
        "choose another with --admin-port"
    )
    assert fake_controller.syncs == []


@pytest.mark.parametrize("flag", ["--host", "--admin-host"])
@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("192.0.2.1", "Cannot assign requested address"),  # RFC 5737: of no machine
        (
            "no-such-host.invalid",
            "(Name or service not known|Temporary failure in name resolution)",
        ),
    ],
)
def test_a_host_that_is_not_of_this_machine(
    flag: str, host: str, reason: str, fake_controller: FakeController
) -> None:
    code, line = refused(fake_controller.url, flag, host)
    assert code == 3
    assert re.fullmatch(
        rf"cannot listen on {host}:0: {reason}; choose another with {flag}", line
    ), line


def test_certificates_that_cannot_be_used(tmp_path: Path, fake_controller: FakeController) -> None:
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    files = ("--tls-keyfile", str(key), "--tls-certfile", str(certificate))
    code, line = refused(fake_controller.url, *files)
    assert code == 2
    assert line == (f"--tls-certfile {certificate}, --tls-keyfile {key}: No such file or directory")
    key.write_text("junk")
    certificate.write_text("junk")
    code, line = refused(fake_controller.url, *files)
    assert code == 2
    assert "key and certificate do not make a usable pair" in line


# --- the log ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("which", "logged"),
    [
        ("off", []),
        ("errors", [("/missing", 404, "client_error")]),
        ("all", [("/fine", 200, "ok"), ("/missing", 404, "client_error")]),
    ],
)
def test_which_requests_are_logged_and_that_no_secret_is(
    which: str,
    logged: list[tuple[str, int, str]],
    a: ScriptedReplica,
    fake_controller: FakeController,
) -> None:
    secret = {"Authorization": "Bearer hunter2", "Cookie": "hunter2", "X-Api-Key": "hunter2"}
    a.behave(
        answer(b"hunter2", headers=[(b"Set-Cookie", b"hunter2")]),
        answer(b"hunter2", status=404),
    )
    with Serve(fake_controller.url, "--access-log", which, "--log-level", "debug") as serve:
        serve.wait_for_replicas(1)
        for target in ("/fine?key=hunter2", "/missing?key=hunter2#hunter2"):
            serve.ask(request("POST", target, secret, b"hunter2"))
        serve.ask(b"GET /hunter2 HTTP/1.1\r\nHost: x\r\nContent-Length: hunter2\r\n\r\n")
        end_at_once(serve.process)
        assert serve.exit_code() == 0
        serve.log.wait_for("server.stopped")
        lines = serve.log.named("request.finished")
        assert [(line["path"], line["status"], line["outcome"]) for line in lines] == logged
        assert "hunter2" not in json.dumps(serve.log.events)
        for line in lines:
            assert set(line) == {
                *("event", "level", "timestamp", "request_id", "client", "method", "path"),
                *("status", "outcome", "reason", "replica", "attempts", "bytes_in", "bytes_out"),
                *("connect_ms", "ttfb_ms", "total_ms"),
            }
            assert (line["method"], line["replica"]) == ("POST", f"127.0.0.1:{a.port}")
            assert (line["bytes_in"], line["bytes_out"], line["attempts"]) == (7, 7, 1)


@pytest.mark.parametrize(
    ("level", "events"),
    [("error", []), ("warning", ["sync.failed"]), ("info", ["server.started", "sync.failed"])],
)
def test_levels(level: str, events: list[str], fake_controller: FakeController) -> None:
    fake_controller.answer_always(Answer(status=500))
    process = subprocess.Popen(
        command(fake_controller.url, "--log-level", level),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    fake_controller.wait_for_sync(2)  # the failure of the first has been logged, if it is
    process.kill()
    output, errors = process.communicate(timeout=20)
    assert errors == ""
    assert [json.loads(line)["event"] for line in output.splitlines()] == events


def test_a_terminal_gets_colours(a: ScriptedReplica, fake_controller: FakeController) -> None:
    primary, secondary = pty.openpty()
    process = subprocess.Popen(
        command(fake_controller.url), env=environment(), stdout=secondary, stderr=secondary
    )
    os.close(secondary)
    try:
        shown = read_until(primary, b"replica.added")
    finally:
        end_at_once(process)
        read_until(primary, b"server.stopped")
        assert process.wait(20) == 0
        os.close(primary)
    assert b"\x1b[" in shown
    assert b"server.started" in shown
    assert b'{"' not in shown


def read_until(descriptor: int, mark: bytes) -> bytes:
    shown = b""
    while mark not in shown:
        shown += os.read(descriptor, 65536)
    return shown


@pytest.mark.parametrize(("form", "is_json"), [("auto", True), ("console", False)])
def test_what_is_no_terminal_gets_json_or_what_is_asked_for(
    form: str, is_json: bool, fake_controller: FakeController
) -> None:
    with subprocess.Popen(
        command(fake_controller.url, "--log-format", form, "--service-name", "Köln 東京"),
        env=environment() | {"PYTHONIOENCODING": "ascii"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        end_at_once(process)
        _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (0, b"")
    assert b"server.started" in line
    assert b"\x1b" not in line
    assert line.startswith(b"{") == is_json


def test_a_reader_of_the_log_that_leaves(
    a: ScriptedReplica, fake_controller: FakeController
) -> None:
    """`skyserve-lb serve | head -1`."""
    process = subprocess.Popen(
        command(fake_controller.url, "--access-log", "all"),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    address = address_in(json.loads(process.stdout.readline())["address"])
    process.stdout.close()
    fake_controller.wait_for_sync()
    with RawClient(address) as client:
        for _ in range(100):
            assert client.ask(request()).status == 200
    end_at_once(process)
    assert process.wait(20) == 0
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()


@pytest.mark.parametrize("stdout", [">&-", ">/dev/full"])
def test_a_log_that_can_never_be_written(
    stdout: str, a: ScriptedReplica, fake_controller: FakeController
) -> None:
    port = free_pair()
    process = subprocess.Popen(
        [
            "sh",
            "-c",
            f'exec "$@" {stdout}',
            "sh",
            *command(fake_controller.url, "--port", str(port)),
        ],
        env=environment(),
        stderr=subprocess.PIPE,
    )
    try:
        fake_controller.wait_for_sync(2)
        with RawClient(("127.0.0.1", port)) as client:
            assert client.ask(request()).status == 200
        end_at_once(process)
        assert process.wait(20) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


# --- limits and signals -----------------------------------------------------------------------


def limited(soft: int, hard: int) -> tuple[str, ...]:
    return ("sh", "-c", f'ulimit -Sn {soft}; ulimit -Hn {hard}; exec "$@"', "sh")


@pytest.mark.parametrize(("connections", "warned"), [("100", False), ("1000", True)])
def test_all_file_descriptors_are_taken_and_too_few_are_told(
    connections: str, warned: bool, fake_controller: FakeController
) -> None:
    options = ("--max-connections", connections)
    with Serve(fake_controller.url, *options, prefix=limited(64, 512)) as serve:
        assert resource.prlimit(serve.process.pid, resource.RLIMIT_NOFILE) == (512, 512)
        lines = serve.log.named("server.few_descriptors")
        if warned:
            (line,) = lines
            assert (line["level"], line["limit"], line["needed"]) == ("warning", 512, 2000)
            assert line["max_connections"] == 1000
        else:
            assert lines == []


def test_more_clients_than_the_soft_limit_would_have_let_in(
    a: ScriptedReplica, fake_controller: FakeController
) -> None:
    with Serve(fake_controller.url, prefix=limited(64, 1024)) as serve:
        serve.wait_for_replicas(1)
        clients = [serve.client() for _ in range(200)]
        for client in clients:
            assert client.ask(request()).status == 200
            client.sock.close()


def test_a_hangup_ends_nothing(a: ScriptedReplica, fake_controller: FakeController) -> None:
    with Serve(fake_controller.url) as serve:
        serve.wait_for_replicas(1)
        serve.signal(signal.SIGHUP)
        for _ in range(3):
            assert serve.ask(request()).status == 200


def test_a_hangup_loads_the_certificate_again(
    tmp_path: Path, fake_controller: FakeController
) -> None:
    key, certificate = self_signed(tmp_path)
    with Serve(fake_controller.url, "--tls-keyfile", key, "--tls-certfile", certificate) as serve:
        serve.signal(signal.SIGHUP)
        (line,) = serve.log.wait_for("tls.reloaded")
        assert line["certfile"] == certificate


def test_clients_that_leave_leave_no_word_on_stderr(
    a: ScriptedReplica, fake_controller: FakeController
) -> None:
    """aiohttp issue 7590."""
    go = threading.Event()
    a.behave_always(answer(b"x" * 100_000, delay=0.05))
    with Serve(fake_controller.url, "--access-log", "errors") as serve:
        serve.wait_for_replicas(1)
        for _ in range(50):
            with serve.client() as client:
                client.send(request())
        serve.log.wait_for("request.finished", 50)
        outcomes = {line["outcome"] for line in serve.log.named("request.finished")}
        assert outcomes == {"client_closed"}
        end_at_once(serve.process)
        assert serve.exit_code() == 0
    go.set()
