"""TLS on the data port, and to replicas."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvloop

import lb.app
from controller_client.testing import (
    FakeController,
    ReplicaFactory,
    answer,
    early,
    hold,
    stream,
)
from lb.errors import StartError
from lb.frames import close_frame
from lb.metrics import Metrics
from lb.transport import Connection
from lb.upstream import Pool, Response
from tests.net.conftest import StartBalancer
from tests.net.harness import Answer, Closed, RawClient, RunningBalancer, request
from tests.net.test_upgrades import goodbye, switch, upgraded


@dataclass(frozen=True)
class Pair:
    """A self-signed certificate and its key."""

    key: Path
    certificate: Path

    def copy_to(self, folder: Path) -> Pair:
        return Pair(
            _written(folder / "tls.key", self.key.read_bytes()),
            _written(folder / "tls.crt", self.certificate.read_bytes()),
        )

    @property
    def settings(self) -> dict[str, str]:
        return {"tls_keyfile": str(self.key), "tls_certfile": str(self.certificate)}

    @property
    def der(self) -> bytes:
        return ssl.PEM_cert_to_DER_cert(self.certificate.read_text())


def _written(path: Path, data: bytes) -> Path:
    """Replace the file in one step, as those do that care."""
    fresh = path.with_suffix(".new")
    fresh.write_bytes(data)
    return fresh.replace(path)


MakePair = Callable[..., Pair]


@pytest.fixture(scope="module")
def make_pair(tmp_path_factory: pytest.TempPathFactory) -> MakePair:
    """Make a certificate for these names."""

    def make(names: str = "DNS:localhost,IP:127.0.0.1", *, days: int = 30) -> Pair:
        folder = tmp_path_factory.mktemp("pair")
        pair = Pair(folder / "tls.key", folder / "tls.crt")
        command = [
            *("openssl", "req", "-x509", "-nodes", "-days", str(days)),
            *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-subj", "/CN=test"),
            *("-addext", f"subjectAltName={names}"),
            *("-keyout", str(pair.key), "-out", str(pair.certificate)),
        ]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except FileNotFoundError:
            pytest.fail("these tests make certificates with the command openssl: install OpenSSL")
        return pair

    return make


@pytest.fixture(scope="module")
def pair(make_pair: MakePair) -> Pair:
    return make_pair()


@pytest.fixture(scope="module")
def other(make_pair: MakePair) -> Pair:
    return make_pair(days=60)


class TlsClient(RawClient):
    """A client over TLS that trusts this certificate alone."""

    def __init__(
        self, address: tuple[str, int], pair: Pair, *, alpn: tuple[str, ...] = ("http/1.1",)
    ) -> None:
        super().__init__(address)
        context = ssl.create_default_context(cafile=str(pair.certificate))
        context.set_alpn_protocols(list(alpn))
        self.tls = context.wrap_socket(self.sock, server_hostname="localhost")
        self.sock = self.tls

    def ended(self) -> bool:
        try:
            return super().ended()
        except ssl.SSLEOFError:
            return False


def served(balancer: RunningBalancer) -> bytes:
    """The certificate that a new client is shown."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(balancer.address, timeout=10) as sock,
        context.wrap_socket(sock) as tls,
    ):
        shown = tls.getpeercert(binary_form=True)
        assert shown is not None
        return shown


# --- the data port ----------------------------------------------------------------------------


def test_requests_over_tls(
    pair: Pair, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    balancer = start_balancer(a, **pair.settings)
    with TlsClient(balancer.address, pair) as client:
        assert client.tls.selected_alpn_protocol() == "http/1.1"
        assert client.tls.version() == "TLSv1.3"
        assert client.ask(request()).status == 200
        body = os.urandom(300_000)
        assert client.ask(request("POST", body=body)).status == 200
    assert [seen.values(b"x-forwarded-proto") for seen in a.requests] == [[b"https"]] * 2
    assert a.requests[1].body == body
    assert balancer.metric("tls_certificate_not_after_timestamp_seconds") == pytest.approx(
        time.time() + 30 * 86400, abs=3600
    )


def test_a_client_that_speaks_http_2_too(
    pair: Pair, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    balancer = start_balancer(replica_factory(), **pair.settings)
    with TlsClient(balancer.address, pair, alpn=("h2", "http/1.1")) as client:
        assert client.tls.selected_alpn_protocol() == "http/1.1"
        assert client.ask(request()).status == 200


def test_a_large_answer_to_a_slow_client_and_the_end_of_the_connection(
    pair: Pair, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    body = os.urandom(8_000_000)
    a.behave(answer(body))
    balancer = start_balancer(a, **pair.settings)
    with TlsClient(balancer.address, pair) as client:
        client.send(request(headers={"Connection": "close"}))
        time.sleep(0.5)
        assert client.answer().body == body
        assert client.ended()
    assert balancer.in_flight() == 0


def test_upgraded_connections_over_tls(
    pair: Pair, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    a.behave(switch(), switch(goodbye, early=close_frame(4001)))
    balancer = start_balancer(a, **pair.settings)
    with TlsClient(balancer.address, pair) as client:
        upgraded(client)
        client.send(b"hello")
        assert client.read(5) == b"hello"
    with TlsClient(balancer.address, pair) as client:
        upgraded(client)
        assert client.read(4) == close_frame(4001)
        assert client.ended()
    balancer.log.wait_for("request.finished", 2)
    assert balancer.in_flight() == 0


def test_an_early_answer_over_tls(
    pair: Pair, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    a.behave(early(413))
    balancer = start_balancer(a, **pair.settings)
    with TlsClient(balancer.address, pair) as client:
        head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5000000\r\n\r\n"
        assert client.ask(head + bytes(100_000)).status == 413


def test_plain_http_to_a_tls_port_and_a_handshake_that_never_comes(
    pair: Pair,
    replica_factory: ReplicaFactory,
    start_balancer: StartBalancer,
    capfd: pytest.CaptureFixture[str],
) -> None:
    balancer = start_balancer(replica_factory(), header_timeout="500ms", **pair.settings)
    with balancer.client() as plain, pytest.raises(Closed):
        plain.ask(request())
    with balancer.client(timeout=5) as silent, pytest.raises(Closed):
        silent.answer()
    with TlsClient(balancer.address, pair) as client:
        assert client.ask(request()).status == 200
    assert capfd.readouterr() == ("", "")


def renewed(folder: Path, fresh: Pair) -> None:
    fresh.copy_to(folder)


def rotated_by_kubernetes(folder: Path, fresh: Pair) -> None:
    """The files are links through a link to a folder, which is replaced in one step."""
    (folder / "..data-2").mkdir()
    fresh.copy_to(folder / "..data-2")
    (folder / "..data_tmp").symlink_to("..data-2")
    (folder / "..data_tmp").replace(folder / "..data")


@pytest.fixture
def mounted(pair: Pair, tmp_path: Path) -> Pair:
    """The pair as Kubernetes mounts a secret."""
    (tmp_path / "..data-1").mkdir()
    pair.copy_to(tmp_path / "..data-1")
    (tmp_path / "..data").symlink_to("..data-1")
    for name in ("tls.key", "tls.crt"):
        (tmp_path / name).symlink_to(Path("..data") / name)
    return Pair(tmp_path / "tls.key", tmp_path / "tls.crt")


@pytest.mark.parametrize("change", [renewed, rotated_by_kubernetes])
def test_changed_files_are_loaded_and_running_connections_stay(
    change: Callable[[Path, Pair], None],
    pair: Pair,
    other: Pair,
    mounted: Pair,
    replica_factory: ReplicaFactory,
    start_balancer: StartBalancer,
) -> None:
    a = replica_factory()
    go = threading.Event()
    a.behave(stream([b"first", go, b"last"]))
    balancer = start_balancer(a, **mounted.settings)
    assert served(balancer) == pair.der
    with TlsClient(balancer.address, pair) as streaming, TlsClient(balancer.address, pair) as idle:
        assert idle.ask(request("GET", "/x"), head_only=True).status == 200
        assert idle.chunk() == b"first"
        change(mounted.key.parent, other)
        balancer.log.wait_for("tls.reloaded")
        assert served(balancer) == other.der
        assert streaming.ask(request()).status == 200
        go.set()
        assert (idle.chunk(), idle.chunk()) == (b"last", b"")
    with TlsClient(balancer.address, other) as client:
        assert client.ask(request()).status == 200
    expiry = balancer.metric("tls_certificate_not_after_timestamp_seconds")
    assert expiry == pytest.approx(time.time() + 60 * 86400, abs=3600)


def test_files_are_loaded_again_when_told(
    pair: Pair,
    replica_factory: ReplicaFactory,
    start_balancer: StartBalancer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lb.app, "WATCH_SECONDS", 3600.0)
    balancer = start_balancer(replica_factory(), **pair.settings)
    balancer.call(balancer.balancer.reload)
    assert len(balancer.log.named("tls.reloaded")) == 1
    assert served(balancer) == pair.der


def spoilt(folder: Path, fresh: Pair) -> None:
    _written(folder / "tls.crt", b"junk")


def mismatched(folder: Path, fresh: Pair) -> None:
    _written(folder / "tls.crt", fresh.certificate.read_bytes())


def removed(folder: Path, fresh: Pair) -> None:
    (folder / "tls.key").unlink()


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (spoilt, "do not make a usable pair"),
        (mismatched, "KEY_VALUES_MISMATCH"),
        (removed, "No such file or directory"),
    ],
)
def test_a_bad_pair_keeps_the_old_one_and_is_told_once(
    change: Callable[[Path, Pair], None],
    cause: str,
    pair: Pair,
    other: Pair,
    tmp_path: Path,
    replica_factory: ReplicaFactory,
    start_balancer: StartBalancer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lb.app, "WATCH_SECONDS", 0.05)
    used = pair.copy_to(tmp_path)
    balancer = start_balancer(replica_factory(), **used.settings)
    change(tmp_path, other)
    (line,) = balancer.log.wait_for("tls.reload_failed")
    assert cause in line["cause"]
    assert line["level"] == "error"
    assert served(balancer) == pair.der
    time.sleep(0.2)  # some more looks at the files
    assert len(balancer.log.named("tls.reload_failed")) == 1
    other.copy_to(tmp_path)
    balancer.log.wait_for("tls.reloaded")
    assert served(balancer) == other.der


def encrypted(folder: Path, pair: Pair) -> dict[str, str]:
    used = pair.copy_to(folder)
    subprocess.run(
        ["openssl", "ec", "-aes128", "-passout", "pass:x", "-in", used.key, "-out", used.key],
        check=True,
        capture_output=True,
    )
    return used.settings


def absent(folder: Path, pair: Pair) -> dict[str, str]:
    return Pair(folder / "no.key", folder / "no.crt").settings


def swapped(folder: Path, pair: Pair) -> dict[str, str]:
    return Pair(pair.certificate, pair.key).settings


def bad_ca(folder: Path, pair: Pair) -> dict[str, str]:
    return {"upstream_ca": str(_written(folder / "ca.pem", b"junk"))}


def absent_ca(folder: Path, pair: Pair) -> dict[str, str]:
    return {"upstream_ca": str(folder / "ca.pem")}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (encrypted, "no PEM, or the key is encrypted"),
        (absent, "No such file or directory"),
        (swapped, "do not make a usable pair"),
        (bad_ca, "no certificate in it"),
        (absent_ca, "No such file or directory"),
    ],
)
def test_files_that_cannot_be_used_at_the_start(
    files: Callable[[Path, Pair], dict[str, str]],
    message: str,
    pair: Pair,
    tmp_path: Path,
    fake_controller: FakeController,
) -> None:
    settings = files(tmp_path, pair)
    with pytest.raises(StartError) as caught, RunningBalancer(fake_controller.url, **settings):
        pass
    assert caught.value.exit_code == 2
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    for name, path in settings.items():
        assert f"--{name.replace('_', '-')} {path}" in str(caught.value)


# --- replicas over https ----------------------------------------------------------------------


class TlsReplica:
    """Answers each connection's first request with these bytes; ends it with or without a goodbye."""

    def __init__(self, pair: Pair, reply: bytes, *, goodbye: bool) -> None:
        self.handshakes = 0
        self.heads: list[bytes] = []
        self._reply, self._goodbye = reply, goodbye
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(pair.certificate, pair.key)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> TlsReplica:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with sock:
                sock.settimeout(10)
                try:
                    self._talk(self._context.wrap_socket(sock, server_side=True))
                except OSError:
                    pass

    def _talk(self, tls: ssl.SSLSocket) -> None:
        with tls:
            self.handshakes += 1
            if head := tls.recv(65536):
                self.heads.append(head)
                tls.sendall(self._reply)
                if self._goodbye:
                    tls.unwrap()


WITH_LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello"
UNTIL_THE_END = b"HTTP/1.1 200 OK\r\n\r\nhello"


@pytest.fixture
def tls_replica(pair: Pair) -> Iterator[TlsReplica]:
    with TlsReplica(pair, WITH_LENGTH, goodbye=True) as replica:
        yield replica


def get(
    controller: FakeController, replica: TlsReplica, host: str = "localhost", **settings: str
) -> tuple[Answer, RunningBalancer]:
    """Ask for one thing through a balancer before this replica."""
    controller.set_ready([f"https://{host}:{replica.port}"])
    with RunningBalancer(controller.url, no_replica_wait="300ms", **settings) as balancer:
        balancer.wait_for_replicas(1)
        answered = balancer.get()
        balancer.tls_failures = balancer.metric("upstream_errors_total", reason="tls")  # type: ignore[attr-defined]
        return answered, balancer


def tls_failures(balancer: RunningBalancer) -> float:
    failures: float = balancer.tls_failures  # type: ignore[attr-defined]
    return failures


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_replica_whose_certificate_is_trusted(
    host: str, pair: Pair, tls_replica: TlsReplica, fake_controller: FakeController
) -> None:
    answered, _ = get(fake_controller, tls_replica, host, upstream_ca=str(pair.certificate))
    assert (answered.status, answered.body) == (200, b"hello")
    assert b"\r\nX-Forwarded-Proto: http\r\n" in tls_replica.heads[0]


def test_a_replica_is_verified_by_default(
    tls_replica: TlsReplica, fake_controller: FakeController
) -> None:
    answered, balancer = get(fake_controller, tls_replica)
    assert answered.status == 503
    assert "its certificate is not trusted (self-signed certificate)" in answered.detail
    assert tls_failures(balancer) >= 1
    assert tls_replica.heads == [], "nothing was sent to whoever that was"


def test_a_replica_whose_certificate_is_for_another_host(
    make_pair: MakePair, fake_controller: FakeController
) -> None:
    elsewhere = make_pair("DNS:elsewhere.example")
    with TlsReplica(elsewhere, WITH_LENGTH, goodbye=True) as replica:
        answered, balancer = get(fake_controller, replica, upstream_ca=str(elsewhere.certificate))
    assert answered.status == 503
    assert "its certificate is not trusted (Hostname mismatch" in answered.detail
    assert tls_failures(balancer) >= 1
    assert replica.heads == []


def test_a_replica_that_is_not_verified_on_demand(
    make_pair: MakePair, fake_controller: FakeController
) -> None:
    with TlsReplica(make_pair("DNS:elsewhere.example"), WITH_LENGTH, goodbye=True) as replica:
        answered, _ = get(fake_controller, replica, upstream_insecure="yes")
    assert (answered.status, answered.body) == (200, b"hello")


def test_an_untrusted_replica_beside_a_good_one_costs_no_answer(
    tls_replica: TlsReplica, replica_factory: ReplicaFactory, fake_controller: FakeController
) -> None:
    good = replica_factory()
    fake_controller.set_ready([f"https://localhost:{tls_replica.port}", good.url])
    with RunningBalancer(fake_controller.url) as balancer:
        balancer.wait_for_replicas(2)
        for _ in range(20):
            assert balancer.get().status == 200
        assert len(good.requests) == 20
        assert 1 <= balancer.metric("retries_total", reason="connect_error") <= 5


def test_a_replica_that_speaks_no_tls(fake_controller: FakeController) -> None:
    with socket.create_server(("127.0.0.1", 0)) as plain:
        fake_controller.set_ready([f"https://127.0.0.1:{plain.getsockname()[1]}"])
        with RunningBalancer(fake_controller.url, no_replica_wait="0") as balancer:
            balancer.wait_for_replicas(1)
            with balancer.client() as client:
                client.send(request())
                replica, _ = plain.accept()
                with replica:
                    assert replica.recv(1) == b"\x16"  # a TLS handshake
                    replica.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
                    answered = client.answer()
            assert answered.status == 503
            assert "the TLS handshake failed" in answered.detail
            assert balancer.metric("upstream_errors_total", reason="tls") == 1


@pytest.mark.parametrize("goodbye", [True, False])
@pytest.mark.parametrize("reply", [WITH_LENGTH, UNTIL_THE_END])
def test_the_end_of_a_tls_connection_after_a_whole_body(
    reply: bytes, goodbye: bool, pair: Pair, fake_controller: FakeController
) -> None:
    """A body without a length ends with the connection. Servers leave out the goodbye so often that
    its absence alone says nothing."""
    with TlsReplica(pair, reply, goodbye=goodbye) as replica:
        answered, _ = get(fake_controller, replica, upstream_ca=str(pair.certificate))
    assert (answered.status, answered.body) == (200, b"hello")


@pytest.mark.parametrize("goodbye", [True, False])
def test_the_end_of_a_tls_connection_within_a_body(
    goodbye: bool, pair: Pair, fake_controller: FakeController
) -> None:
    short = WITH_LENGTH.replace(b": 5", b": 50")
    with TlsReplica(pair, short, goodbye=goodbye) as replica, pytest.raises(Closed):
        get(fake_controller, replica, upstream_ca=str(pair.certificate))


def test_a_tls_handshake_that_hangs_is_bounded_by_the_connect_timeout(
    fake_controller: FakeController,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        fake_controller.set_ready([f"https://127.0.0.1:{silent.getsockname()[1]}"])
        with RunningBalancer(
            fake_controller.url, connect_timeout="300ms", no_replica_wait="100ms"
        ) as balancer:
            balancer.wait_for_replicas(1)
            started = time.monotonic()
            answered = balancer.get()
            assert time.monotonic() - started < 2
    assert answered.status == 503
    assert "no connection within 0.3 s" in answered.detail


def test_running_tls_requests_complete_in_a_drain(
    pair: Pair, replica_factory: ReplicaFactory, start_balancer: StartBalancer
) -> None:
    a = replica_factory()
    go = threading.Event()
    a.behave(hold(go))
    balancer = start_balancer(a, **pair.settings)
    with TlsClient(balancer.address, pair) as client:
        client.send(request())
        a.wait_for(lambda: a.requests)
        balancer.call(balancer.balancer.drain)
        balancer.log.wait_for("drain.started")
        go.set()
        answered = client.answer()
        assert (answered.status, answered.values(b"connection")) == (200, [b"close"])
        assert client.ended()
    balancer.log.wait_for("drain.finished")


class Noted:
    """Takes an answer."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    def answered(self, response: Response, data: bytes, ends: bool) -> None:
        if ends:
            self.ended.set()

    def body_came(self, data: bytes, ends: bool) -> None:
        if ends:
            self.ended.set()

    def lost(self, error: object) -> None:
        raise AssertionError(error)


@pytest.mark.parametrize("unasked", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged"])
def test_bytes_that_the_tls_layer_holds_are_nobodys_answer(pair: Pair, unasked: bytes) -> None:
    """They come while a slow client holds the connection, and the kernel has them no more."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.certificate, pair.key)
    sent = asyncio.Event()

    async def replica(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ngood")
        await reader.readexactly(1)  # the connection is held
        writer.write(unasked)
        await writer.drain()
        sent.set()
        await reader.read()
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(replica, "127.0.0.1", 0, ssl=context)
        pool = Pool(
            f"https://localhost:{server.sockets[0].getsockname()[1]}",
            connect_timeout=5,
            keepalive=30,
            tls=ssl.create_default_context(cafile=str(pair.certificate)),
            metrics=Metrics(service="s", policy="p"),
        )
        try:
            await steps(pool)
        finally:
            pool.close()
            server.close()
            await server.wait_closed()

    async def steps(pool: Pool) -> None:
        connection, client, taker = await pool.connect(), Connection(), Noted()
        connection.begin(taker, "GET")
        connection.flow_into(client)
        connection.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await taker.ended.wait()
        client.pause_writing()
        connection.write(b"!")
        await sent.wait()
        await asyncio.sleep(0.05)  # for the TLS layer to take them out of the kernel
        client.resume_writing()
        connection.end()
        if (reused := pool.reuse()) is not None:
            answered = Noted()
            reused.begin(answered, "GET")
            await asyncio.sleep(0.05)
            assert not answered.ended.is_set(), "it was answered before it was asked"
            reused.end()
        while connection.connected and not pool.idle:
            await asyncio.sleep(0)
        assert pool.reuse() is (None if unasked else connection)

    uvloop.run(run())
