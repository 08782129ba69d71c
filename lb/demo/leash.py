"""`python -m lb.demo.leash MODULE ARGS`: `python -m MODULE ARGS`, which ends with its stdin.

The demo holds the other end: however it dies, by SIGKILL too, nothing of it stays behind.
"""

import os
import runpy
import signal
import sys
import threading


def _end_with_stdin() -> None:
    # Not sys.stdin: a thread that waits in it makes the interpreter abort when it shuts down.
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
