"""`skyserve-lb serve` as a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.net.harness import Answer, LogLines, RawClient, request

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 20.0


def command(controller_url: str, *options: str) -> list[str]:
    """The command line, on free ports of the loopback address where no option says otherwise."""
    defaults = {"--host": "127.0.0.1", "--port": "0", "--sync-interval": "200ms"}
    given = [word for pair in defaults.items() if pair[0] not in options for word in pair]
    return [
        *(sys.executable, "-m", "lb", "serve"),
        *("--controller-url", controller_url, *given, *options),
    ]


def environment() -> dict[str, str]:
    """The variables, without any that would configure the balancer."""
    clean = {name: text for name, text in os.environ.items() if not name.startswith("SKYSERVE_LB_")}
    return clean | {"PYTHONPATH": str(ROOT)}


def refused(controller_url: str, *options: str) -> tuple[int, str]:
    """The exit code and the one line on stderr of a balancer that does not start."""
    ended = subprocess.run(
        command(controller_url, *options),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert ended.stdout == "", "it logged a start"
    (line,) = ended.stderr.splitlines()
    assert line.startswith("skyserve-lb: ")
    return ended.returncode, line.removeprefix("skyserve-lb: ")


def end_at_once(process: subprocess.Popen[Any]) -> None:
    """Two signals: the second cuts the drain short. Of one kind they might arrive as one."""
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)


def self_signed(folder: Path) -> tuple[str, str]:
    """The files of a new key and its certificate."""
    key, certificate = str(folder / "key"), str(folder / "certificate")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-nodes", "-newkey", "ec"),
            *("-pkeyopt", "ec_paramgen_curve:P-256", "-subj", "/CN=test"),
            *("-keyout", key, "-out", certificate),
        ],
        check=True,
        capture_output=True,
    )
    return key, certificate


class Serve:
    """`with Serve(controller_url, "--drain-timeout", "1s") as serve: ...`

    `prefix` goes before the command, as a shell that limits it does. The process is killed at the
    end if it still runs; that nothing was printed to stderr is checked.
    """

    def __init__(
        self,
        controller_url: str,
        *options: str,
        prefix: tuple[str, ...] = (),
        cwd: Path = ROOT,
    ) -> None:
        self.log = LogLines()
        self.process = subprocess.Popen(
            [*prefix, *command(controller_url, *options)],
            cwd=cwd,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._stderr = ""
        self._readers = [
            threading.Thread(target=self._read_log, daemon=True),
            threading.Thread(target=self._read_stderr, daemon=True),
        ]

    def _read_log(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.write(line)

    def _read_stderr(self) -> None:
        assert self.process.stderr is not None
        self._stderr = self.process.stderr.read()

    def __enter__(self) -> Serve:
        for reader in self._readers:
            reader.start()
        try:
            started = self.log.wait_for("server.started")[0]
        except AssertionError as error:
            self.__exit__(type(error), error, None)
            raise
        self.address = address_in(started["address"])
        self.admin = address_in(started["admin"])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()
        for reader in self._readers:
            reader.join(PATIENCE_SECONDS)
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.process.stdout.close()
        self.process.stderr.close()
        if error is None:
            assert self._stderr == ""

    def wait_for_replicas(self, count: int) -> None:
        self.log.wait_for("replica.added", count)

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def exit_code(self, seconds: float = PATIENCE_SECONDS) -> int:
        """Wait for the end."""
        return self.process.wait(seconds)

    def client(self) -> RawClient:
        return RawClient(self.address)

    def ask(self, data: bytes) -> Answer:
        with self.client() as client:
            return client.ask(data)

    def ask_admin(self, path: str, method: str = "GET") -> Answer:
        with RawClient(self.admin) as client:
            return client.ask(request(method, path, host="localhost"))


def address_in(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)
