"""`python -m lb.demo.replica NAME`: a replica, which prints its URL and answers all requests."""

import signal
import sys

from controller_client.fakes.replica import ScriptedReplica

if __name__ == "__main__":
    with ScriptedReplica(sys.argv[1]) as replica:
        print(replica.url, flush=True)  # noqa: T201 - what the demo reads
        signal.pause()
