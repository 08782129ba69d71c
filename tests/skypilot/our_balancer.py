"""``skyserve-lb serve`` of this environment, ended with the test. Its log lines are the events."""

from __future__ import annotations

import signal
import subprocess
import sys


def main() -> int:
    with subprocess.Popen((sys.executable, "-m", "lb", "serve", *sys.argv[1:])) as process:
        sys.stdin.read()
        process.send_signal(signal.SIGKILL)
        return process.wait()


if __name__ == "__main__":
    main()
