"""`python -m controller_client.embedded STATE NAME BORN SOCKET LEASH`: a controller process.

Two of these processes run for each service. The one that holds the service's lock works; the other
waits for the lock, which the kernel gives it the moment the first is gone, however that ended. The
one that works starts the other, the load balancer and the replicas, and starts again whatever of
these ends. So each process is watched by another, and any one of them may be killed. Both hold the
listening socket: a call that is made in between waits and is answered.
"""

import asyncio
import logging
import socket
import sys
from pathlib import Path

from controller_client.embedded.places import Places


def main(state: str, name: str, born: str, socket_fd: str, leash: str) -> None:
    with Places(Path(state), name).locked("controller"):
        # Not before: what only waits shall cost little.
        from controller_client.embedded.controller import Controller

        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stdout)
        listener = socket.socket(fileno=int(socket_fd))
        asyncio.run(Controller(Path(state), name, float(born), listener, bool(leash)).run())


main(*sys.argv[1:])
