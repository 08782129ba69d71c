"""A replica of the service under test: a tiny HTTP server of the standard library alone.

``/health`` answers after a pause, like a busy model server; ``/stats`` tells what was counted;
every other path answers at once. A client names its balancer in ``X-Through``, which a balancer
passes on: so each connection is known by who opened it, whatever the balancer is built of.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Counts:
    """Connections and requests, by the balancer that they came through."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.accepted: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.closed: list[tuple[float, str]] = []  # when (unix seconds) and whose

    def snapshot(self) -> dict[str, object]:
        with self.lock:
            return {
                "accepted": dict(self.accepted),
                "requests": dict(self.requests),
                "closed": list(self.closed),
            }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    counts: Counts
    replica_id: str
    health_seconds: float

    def setup(self) -> None:
        super().setup()
        self.through = ""

    def finish(self) -> None:
        super().finish()
        if self.through:
            with self.counts.lock:
                self.counts.closed.append((time.time(), self.through))

    def do_GET(self) -> None:
        if self.path == "/stats":
            self._answer(self.counts.snapshot())
        elif self.path == "/health":
            time.sleep(self.health_seconds)
            self._answer({"ok": True})
        else:
            self._count()
            self._answer({"replica": self.replica_id})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.do_GET()

    def _count(self) -> None:
        through = self.headers.get("X-Through", "direct")
        with self.counts.lock:
            if not self.through:
                self.through = through
                self.counts.accepted[through] += 1
            self.counts.requests[through] += 1

    def _answer(self, body: object) -> None:
        data = json.dumps(body).encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
        self.wfile.write(head.encode() + b"\r\n\r\n" + data)

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replica-id", required=True)
    parser.add_argument("--health-seconds", type=float, required=True)
    options = parser.parse_args()
    Handler.counts = Counts()
    Handler.replica_id = options.replica_id
    Handler.health_seconds = options.health_seconds
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(json.dumps({"port": server.server_port}), flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
