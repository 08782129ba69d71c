"""A replica of the demo: `python -m lb.demo.replica`. It prints its URL and ends with its stdin."""

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

ANSWER = b'{"choices": [{"text": "Hello."}]}\n'


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Head and body are two writes: with Nagle's algorithm the second waits for a delayed ACK.
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(ANSWER)))
        self.end_headers()
        self.wfile.write(ANSWER)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - so named there
        """Say nothing of requests."""


def main() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_port}", flush=True)  # noqa: T201 - what the demo reads
    sys.stdin.read()  # ends when the demo does, however it ends


if __name__ == "__main__":
    main()
