"""Where a service's files, locks and processes are; how its controller is started, and all of it ended."""

import contextlib
import fcntl
import random
import shutil
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from controller_client.embedded import processes
from controller_client.embedded.processes import Process
from controller_client.embedded.store import Store
from controller_client.embedded.versions import Replica, Service

ROOT = Path(__file__).parents[2]  # where `-m` finds this very package, wherever the user is
HOST = "127.0.0.1"
# Below those that the kernel gives to whoever asks for any: one of these would be gone before it is used.
PORTS = range(10_000, 20_000)
MAX_HELD = 100  # ports; by then the first is long in use
KILL_SECONDS = 30.0  # from SIGTERM to SIGKILL

_held = deque[socket.socket]()


class Places:
    """Where a service's files are."""

    def __init__(self, state: Path, name: str) -> None:
        self.state = state
        self.folder = state / "services" / name
        self.balancer_log = self.folder / "balancer.log"
        self.controller_log = self.folder / "controller.log"

    def replica(self, replica_id: int) -> Path:
        return self.folder / f"replica-{replica_id}"

    def balancer(self, service: Service) -> Process:
        mark = f"SKYPILOT_SERVE_FOLDER={self.folder}"
        return Process(service.balancer_pid, service.balancer_started, mark)

    def process(self, replica: Replica) -> Process:
        mark = f"SKYPILOT_SERVE_FOLDER={self.replica(replica.id)}"
        return Process(replica.pid, replica.started, mark)

    @contextlib.contextmanager
    def locked(self, what: str, *, wait: bool = True) -> Iterator[bool]:
        """Hold a lock of the service's, which ends with the process; false if another has it."""
        locks = self.state / "locks"
        locks.mkdir(exist_ok=True)
        with (locks / f"{self.folder.name}.{what}").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
            else:
                yield True


def free_port() -> int:
    """A port that nobody uses, for a process that is yet to be started.

    It may be used much later, as a replica's is after its `setup`. So this process holds the UDP port
    of the same number, which nobody else wants: whoever looks for a port meanwhile gets another.
    """
    for port in random.sample(PORTS, len(PORTS)):
        hold = socket.socket(type=socket.SOCK_DGRAM)
        try:
            with socket.socket() as probe:
                probe.bind((HOST, port))
            hold.bind((HOST, port))
        except OSError:
            hold.close()
            continue
        _held.append(hold)
        while len(_held) > MAX_HELD:
            _held.popleft().close()
        return port
    raise OSError(f"no port from {PORTS.start} to {PORTS.stop - 1} is free")


def start(
    places: Places, born: float, listener: socket.socket, leash: int | None
) -> subprocess.Popen[bytes]:
    """Start a controller process. It ends the service when the other end of `leash` is closed."""
    words = [str(places.state), places.folder.name, repr(born), str(listener.fileno())]
    with places.controller_log.open("ab") as output:
        return subprocess.Popen(  # noqa: S603 - this very program
            [sys.executable, "-m", __package__, *words, "" if leash is None else "leash"],
            cwd=ROOT,
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL if leash is None else leash,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def take_down(store: Store, places: Places, service: Service) -> None:
    """End all processes of a service, the balancer first and in peace, and forget it."""
    processes.end_all([places.balancer(service)], KILL_SECONDS)
    processes.end_all([places.process(replica) for replica in service.replicas], KILL_SECONDS)
    shutil.rmtree(places.folder, ignore_errors=True)
    store.remove(service.name)
