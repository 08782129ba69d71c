"""Processes that outlive whoever started them, found again by what cannot be mistaken for them.

A process is known by its id and the time it started, so that an id given to another since is never
signalled. Each leads a session of its own, which is ended whole, with what has left it.
"""

import contextlib
import functools
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# The process waits for a word and gives up when its starter dies without one: so that there is
# never a process which nobody has written down.
GATE = 'read -r go && exec "$@" </dev/null'
BOOT = Path("/proc/sys/kernel/random/boot_id")
PROC = Path("/proc")
END_SECONDS = 5.0
LOOK_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Process:
    """A session and its leader. `mark` is a variable that only what is in it has (`NAME=value`)."""

    pid: int
    started: str
    mark: str

    @property
    def alive(self) -> bool:
        """Whether the leader runs."""
        found = _stat(self.pid)
        return found is not None and found.started == self.started and found.state not in "ZX"

    @property
    def members(self) -> list[int]:
        """The ids of all that runs in the session, and of what has left it and bears the mark."""
        numbers = [int(each.name) for each in PROC.glob("[0-9]*")]
        stats = {pid: stat for pid in numbers if (stat := _stat(pid)) and stat.state not in "ZX"}
        found = {pid for pid in stats if self.mark.encode() in _environment(pid)}
        session = {pid for pid, stat in stats.items() if stat.session == self.pid}
        leader = _stat(self.pid)
        # The number is given away only when the session is gone: with one of ours in it, all are.
        if session & found or (leader and leader.started == self.started):
            found |= session
        return sorted(found)

    def terminate(self, told: set[int]) -> bool:
        """Ask all that runs in it to end, each once, which `told` remembers; false if nothing runs.

        To be called again: what is started while the others are being told would not know.
        """
        members = self.members
        for pid in set(members) - told:
            _signal(pid, signal.SIGTERM)
        told.update(members)
        return bool(members)

    def end(self) -> None:
        """Kill all that runs in it, what it starts meanwhile too."""
        deadline = time.monotonic() + END_SECONDS
        while (members := self.members) and time.monotonic() < deadline:
            for pid in members:
                _signal(pid, signal.SIGKILL)
            time.sleep(LOOK_SECONDS)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


@dataclass(frozen=True, slots=True)
class _Stat:
    state: str
    session: int
    started: str


def _stat(pid: int) -> _Stat | None:
    try:
        # The name of the program, in brackets, may hold anything.
        words = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    # Ticks since the machine started, which say nothing about another start of it.
    return _Stat(words[0], int(words[3]), f"{words[19]}@{_boot()}")


@functools.cache
def _boot() -> str:
    return BOOT.read_text().strip()


def _environment(pid: int) -> list[bytes]:
    try:
        return (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


@contextlib.contextmanager
def starting(
    command: Sequence[str], *, mark: str, log: Path, cwd: Path, env: Mapping[str, str]
) -> Iterator[Process]:
    """A process that begins when the block, in which it is written down, has ended without error.

    Raises OSError where it cannot be started.
    """
    name, _, value = mark.partition("=")
    with log.open("ab") as output:
        popen = subprocess.Popen(  # noqa: S603 - what the user's own file says
            ["/bin/sh", "-c", GATE, "sh", *command],
            cwd=cwd,
            env={**env, name: value},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    popen.returncode = 0  # `reap` waits for it
    assert popen.stdin
    with popen.stdin as gate:
        found = _stat(popen.pid)
        yield Process(popen.pid, found.started if found else "", mark)
        with contextlib.suppress(BrokenPipeError):
            gate.write(b"go\n")
            gate.flush()


def end_all(ending: Sequence[Process], seconds: float) -> None:
    """Ask all of these to end, and kill what still runs after so many seconds."""
    told = set[int]()
    deadline = time.monotonic() + seconds
    while sum(each.terminate(told) for each in ending) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    for process in ending:
        process.end()


def reap() -> None:
    """Let the children that have ended go."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
