"""What a request and a streamed chunk cost: this balancer and nginx, side by side in one run.

    python tests/bench/compare.py [--rounds 3] [--seconds 5]

Needs `wrk` and `nginx`. Both proxies are one process, keep connections to the one replica open, and
write no access log; nginx does not buffer (`proxy_buffering off`), as for streams. CPU time is that
of the proxy's process (user and system), from /proc. The rounds alternate, so that a busy machine
hurts both alike; look at the ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import uvloop
from rich.console import Console
from rich.progress import track
from rich.table import Table

from controller_client.testing import FakeController

STREAMS = 50
NGINX = """
daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off; keepalive_requests 1000000; client_body_temp_path {folder};
  proxy_temp_path {folder}; fastcgi_temp_path {folder}; uwsgi_temp_path {folder};
  scgi_temp_path {folder};
  upstream replica {{ server 127.0.0.1:{replica}; keepalive 512; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://replica; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
}}
"""
TICK = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pids: list[int]) -> float:
    """User and system time that these processes have used."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICK


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *map(int, found)]


@contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        try:
            yield running
        finally:
            running.terminate()


def wrk(port: int, seconds: int) -> tuple[int, float, float]:
    """Requests in all, and the median and 99th percentile of latency in ms."""
    command = ["wrk", "--latency", "-t1", "-c32", f"-d{seconds}", f"http://127.0.0.1:{port}/v1/m"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    requests = int(re.search(r"(\d+) requests in", text)[1])  # type: ignore[index]
    assert "Non-2xx" not in text, text
    return requests, _ms(text, "50%"), _ms(text, "99%")


def _ms(text: str, name: str) -> float:
    number, unit = re.search(rf"{name}\s+([\d.]+)(us|ms|s)", text).groups()  # type: ignore[union-attr]
    return float(number) * {"us": 0.001, "ms": 1.0, "s": 1000.0}[unit]


async def streams(port: int) -> int:
    """Read many streams at once to their ends; the chunks in all."""

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /stream HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        body = await reader.read(-1)
        writer.close()
        return body.count(b"data: ")

    return sum(await asyncio.gather(*(one() for _ in range(STREAMS))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=5)
    options = parser.parse_args()
    here = Path(__file__).parent
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        replica = stack.enter_context(process(sys.executable, str(here / "replica.py")))
        replica_port = int(replica.stdout.readline())  # type: ignore[union-attr]
        controller = stack.enter_context(FakeController([f"http://127.0.0.1:{replica_port}"]))
        ours_command = [sys.executable, "-m", "lb", "serve", "--port", "0", "--log-format", "json"]
        ours_command += ["--controller-url", controller.url, "--upstream-keepalive", "60s"]
        ours = stack.enter_context(process(*ours_command))
        started = ours.stdout.readline()  # type: ignore[union-attr]
        ours_port = int(re.search(r'"address": "[^"]*:(\d+)"', started)[1])  # type: ignore[index]
        nginx_port = ours_port + 1
        config = Path(folder) / "nginx.conf"
        config.write_text(NGINX.format(folder=folder, replica=replica_port, port=nginx_port))
        nginx = stack.enter_context(process("nginx", "-c", str(config)))
        time.sleep(2)
        arms = {
            "skyserve-lb": (ours_port, [ours.pid]),
            "nginx": (nginx_port, children(nginx.pid)),
        }
        results = measure(arms, options.rounds, options.seconds)
        ours.stdout.close()  # type: ignore[union-attr]
    show(results)


Figures = dict[str, list[tuple[float, float, float, float, float]]]


def measure(arms: dict[str, tuple[int, list[int]]], rounds: int, seconds: int) -> Figures:
    results: Figures = {name: [] for name in arms}
    for _ in track(range(rounds), description="measuring"):
        for name, (port, pids) in arms.items():
            before = cpu_seconds(pids)
            requests, p50, p99 = wrk(port, seconds)
            request_us = (cpu_seconds(pids) - before) / requests * 1e6
            before = cpu_seconds(pids)
            chunks = uvloop.run(streams(port))
            chunk_us = (cpu_seconds(pids) - before) / chunks * 1e6
            results[name].append((requests / seconds, p50, p99, request_us, chunk_us))
    return results


def show(results: Figures) -> None:
    table = Table(title="medians of the rounds")
    heads = ("", "requests/s", "p50 ms", "p99 ms", "CPU us a request", "CPU us a chunk")
    for head in heads:
        table.add_column(head, justify="right" if head else "left")
    for name, rounds in results.items():
        table.add_row(name, *(f"{median(column):.1f}" for column in zip(*rounds, strict=True)))
    Console().print(table)


if __name__ == "__main__":
    main()
