"""`skyserve-lb demo` as a process: what it shows, how it ends, and that nothing of it stays behind."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

Found = TypeVar("Found")

ROOT = Path(__file__).parents[2]
MARK = "DEMO_TEST_MARK"
PATIENCE_SECONDS = 30.0
ANSWERED = r"no grace period: .*[1-9]\d* answered 200"

# The demo must not need what only the tests have.
WITHOUT_PYTEST = """
import sys
sys.modules["pytest"] = None
from lb.cli import main
sys.exit(main())
"""
WITHOUT_PYTHON = """
import sys
sys.executable = "/nonexistent/python"
from lb.cli import main
sys.exit(main())
"""


class Demo:
    """A running demo. It and all that it starts are known by a mark in their environment."""

    def __init__(self, script: str, stdout: int, env: dict[str, str]) -> None:
        self._mark = f"{MARK}={uuid.uuid4()}".encode()
        name, _, value = self._mark.decode().partition("=")
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, "demo"],
            cwd=ROOT,
            env=os.environ | {"COLUMNS": "80", "LINES": "40", name: value} | env,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            start_new_session=True,
        )

    def processes(self) -> dict[int, str]:
        """The command lines of all its processes, by their ids."""
        lines = {int(each.name): self._line(each) for each in Path("/proc").glob("[0-9]*")}
        return {pid: line for pid, line in lines.items() if line is not None}

    def _line(self, process: Path) -> str | None:
        try:
            if self._mark in (process / "environ").read_bytes():
                return (process / "cmdline").read_bytes().decode().replace("\0", " ")
        except OSError:
            pass  # it has ended meanwhile, or is not ours to read
        return None

    def find(self, part: str) -> list[int]:
        return [pid for pid, words in self.processes().items() if part in words]

    def wait_for_a_balancer(self) -> None:
        until(lambda: self.find("lb serve"))

    def end(self) -> tuple[int, list[str]]:
        """Its exit code and the lines on its stderr, when it has ended by itself."""
        _, errors = self.process.communicate(timeout=PATIENCE_SECONDS)
        return self.process.returncode, errors.splitlines()


def until(condition: Callable[[], Found]) -> Found:
    """Wait for what no event tells: what the system's table of processes holds."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


@contextmanager
def running(
    script: str = WITHOUT_PYTEST, stdout: int = subprocess.PIPE, **env: str
) -> Iterator[Demo]:
    demo = Demo(script, stdout, env)
    try:
        yield demo
    finally:
        demo.process.kill()
        demo.process.communicate()


class Terminal:
    """What a demo shows on a terminal. It must be read, or who writes to it is held up."""

    def __init__(self, descriptor: int) -> None:
        self.shown = ""
        self._descriptor = descriptor

    def read_until(self, pattern: str) -> None:
        while not re.search(pattern, self.shown):
            assert self._read()

    def read_to_end(self) -> None:
        while self._read():
            pass

    def _read(self) -> bool:
        try:
            data = os.read(self._descriptor, 4096)
        except OSError:  # so Linux tells that the other side is closed
            return False
        self.shown += data.decode(errors="replace")
        return True


@contextmanager
def on_terminal() -> Iterator[tuple[Terminal, Demo]]:
    descriptor, side = pty.openpty()
    try:
        with running(stdout=side, TERM="xterm", NO_COLOR="1") as demo:
            os.close(side)
            yield Terminal(descriptor), demo
    finally:
        os.close(descriptor)


def figures(output: str, measure: str) -> list[str]:
    """The cells of one row of the table."""
    (row,) = re.findall(rf"^ {measure} +(\S.*)$", output, re.MULTILINE)
    return re.split(r" {2,}", str(row).strip())


# --- to the end -------------------------------------------------------------------------------


def test_it_shows_the_fault_and_the_cure_and_leaves_nothing_behind() -> None:
    # The user's own settings must not get into what is shown.
    with running(SKYSERVE_LB_GRACE_PERIOD="1h", SKYSERVE_LB_POLICY="no such policy") as demo:
        output, errors = demo.process.communicate(timeout=90)
        left = demo.processes()
    assert (errors, demo.process.returncode, left) == ("", 0, {})

    sent = [int(cell) for cell in figures(output, "requests")]
    answered = [int(cell) for cell in figures(output, "answered 200")]
    refused = [int(cell) for cell in figures(output, "answered 503")]
    assert sent == [280, 280]
    # Three empty lists of 2 s: in the first of these 2 s requests wait for one second in vain.
    assert 30 <= refused[0] <= 100
    assert answered == [280 - refused[0], 280]
    assert refused[1] == 0
    assert figures(output, "hung: no answer within 6 s") == ["0", "0"]
    assert figures(output, "failed in another way") == ["0", "0"]
    gaps = [
        float(cell.removesuffix(" s")) for cell in figures(output, "longest time without a 200")
    ]
    assert gaps[1] < gaps[0]

    rows = [line[20:] for line in output[output.index("\nseconds ") :].splitlines()[2:6]]
    # On a busy machine an answer may be late, or a cell without a request, anywhere, and the last
    # empty list may come so late that the run ends before it.
    assert re.fullmatch(r"([=~ ]+x[x ]*){3}[=~ ]*", rows[0])
    assert re.fullmatch(r"[=~ ]{40,56}", rows[2])
    assert [len(row.split()) for row in (rows[1], rows[3])] == [3, 3]
    shows_the_updates(output)
    # Plain lines of at most 80 columns.
    assert all(char.isprintable() or char == "\n" for char in output)
    assert max(map(len, output.splitlines())) <= 80


def shows_the_updates(output: str) -> None:
    titles = [f"\n{title}\n" for title in ("A count-only update, 2 replicas to 3", *SPEC_CHANGES)]
    first, *rest = [output.index(title) for title in titles]
    assert first < rest[0] < rest[1]
    count_only, rolling, blue_green = (
        output[first : rest[0]],
        output[rest[0] : rest[1]],
        output[rest[1] :],
    )
    assert versions(count_only)[-1] == ("2", "3/3")
    assert [row[0] for row in versions(rolling)] == ["2,3", "3"]
    assert [row[0] for row in versions(blue_green)] == ["3", "4"]
    assert versions(blue_green)[-1] == ("4", "3/3")
    # No version but the two of an update, and in a rolling one both for a while. What lasts less than
    # two cells, as the pause between updates does, may have none of its own.
    (line,) = re.findall(r"^versions +(\S.*)$", output, re.MULTILINE)
    assert re.fullmatch(r"1*\|[12+]*\|2*\++3*\|3*4+", line)
    (answered, sent) = re.findall(
        r"^(\d+) of (\d+) requests were answered 200\.$", output, re.MULTILINE
    )[0]
    assert answered == sent
    assert int(sent) > 100


SPEC_CHANGES = ("A rolling update to another text", "A blue-green update to another text")


def versions(output: str) -> list[tuple[str, str]]:
    """VERSION and REPLICAS of the service in each table."""
    return re.findall(r"^http-server  (\S+) +\S+ +READY +(\d/\d) ", output, re.MULTILINE)


# --- ended early ------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_it_and_all_that_it_started(number: signal.Signals, code: int) -> None:
    with running() as demo:
        demo.wait_for_a_balancer()
        demo.process.send_signal(number)  # to the demo alone: its group is not told
        assert demo.end() == (code, [])
        until(lambda: not demo.processes())


def test_even_a_kill_leaves_nothing_behind() -> None:
    with running() as demo:
        demo.wait_for_a_balancer()
        demo.process.kill()
        until(lambda: not demo.processes())


def test_ctrl_c_on_a_terminal() -> None:
    with on_terminal() as (terminal, demo):
        terminal.read_until(ANSWERED)
        demo.process.send_signal(signal.SIGINT)
        terminal.read_to_end()
        assert demo.end() == (130, [])
        until(lambda: not demo.processes())
    assert "grace period 3 s" in terminal.shown
    assert terminal.shown.rindex("\x1b[?25h") > terminal.shown.rindex(
        "\x1b[?25l"
    )  # the cursor is back
    assert not re.search(r"\x1b\[[\d;]*\b[34]\d\b[\d;]*m", terminal.shown)  # NO_COLOR


# --- what goes wrong --------------------------------------------------------------------------


def test_what_cannot_start_is_one_line() -> None:
    with running(WITHOUT_PYTHON) as demo:
        code, (line,) = demo.end()
        assert code == 1
        assert re.fullmatch(r"skyserve-lb demo: cannot start \S+: No such file or directory", line)


def test_a_reader_that_leaves_ends_it() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with running(stdout=writer) as demo:
        os.close(writer)
        assert demo.end() == (1, [])
        assert demo.processes() == {}
