"""A replica that does what files say: `python file_replica.py FOLDER PORT`.

`ready-ID` makes it ready; it answers `/hold` when there is a file `answer`; told to end, it writes
`told-ID` and ends when there is `end-ID` or `end-all`.
"""

import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FOLDER, PORT = Path(sys.argv[1]), int(sys.argv[2])
ID = os.environ["SKYPILOT_SERVE_REPLICA_ID"]
LOOK_SECONDS = 0.01


def wait_for(*names: str) -> None:
    while not any((FOLDER / name).exists() for name in names):
        time.sleep(LOOK_SECONDS)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        ready = (FOLDER / f"ready-{ID}").exists()
        if self.path == "/hold":
            (FOLDER / f"held-{ID}").touch()
            wait_for("answer")
        body = f"{os.environ['TEXT']} {ID}".encode()
        self.send_response(200 if ready or self.path != "/health" else 503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 128


def end(*_: object) -> None:
    (FOLDER / f"told-{ID}").touch()

    def when_told() -> None:
        wait_for(f"end-{ID}", "end-all")
        os._exit(0)

    threading.Thread(target=when_told, daemon=True).start()


signal.signal(signal.SIGTERM, end)
Server(("127.0.0.1", PORT), Handler).serve_forever()
