"""What the helper processes share: events on stdout, one JSON object a line; an end with the test.

Whatever else a process prints goes to its stderr.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

# SkyPilot's loggers keep the stdout that they found: so the descriptor is moved, not the object.
_events = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
_lock = threading.Lock()


def say(event: str, **fields: Any) -> None:
    with _lock:
        print(json.dumps({"t": time.time(), "event": event, **fields}), file=_events, flush=True)


def end_with_parent(stop: Callable[[], None] = lambda: None) -> None:
    """Run ``stop`` and exit as soon as the test lets go of our stdin, however it ended."""

    def wait() -> None:
        sys.stdin.read()
        stop()
        os._exit(0)  # SkyPilot's own threads never end

    threading.Thread(target=wait, daemon=True).start()
