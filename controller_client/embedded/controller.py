"""The controller of one service: it keeps replicas and load balancer alive, and answers calls."""

import asyncio
import json
import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import anyio
from aiohttp import web

from controller_client.embedded import processes
from controller_client.embedded.places import (
    HOST,
    KILL_SECONDS,
    ROOT,
    Places,
    free_port,
    start,
    take_down,
)
from controller_client.embedded.store import Store
from controller_client.embedded.task import Task
from controller_client.embedded.versions import FAILURES, Mode, Replica, Scaler, Service, Status
from controller_client.protocol import SYNC_PATH

TICK_SECONDS = 0.2
PROBE_SECONDS = 1.0
NOT_READY_SECONDS = 180.0  # SkyPilot's: a replica that fails its probe for longer is replaced
DRAIN_SECONDS = 120.0  # SkyPilot's: longest wait for the requests of a replica that goes
LONGEST_PAUSE_SECONDS = 60.0  # before others are launched in the place of those that were lost
# The balancer's own options where neither the task nor the user's environment says otherwise.
BALANCER = {"SKYSERVE_LB_SYNC_INTERVAL": "500ms", "SKYSERVE_LB_DRAIN_TIMEOUT": "10s"}
# The leader of a replica's session. Where it wrote no end, it was killed: no fault of the task's.
LIFE = (
    'cd "$0" && bash "$SKYPILOT_SERVE_FOLDER/setup.sh" && : >"$SKYPILOT_SERVE_FOLDER/started" '
    '&& bash "$SKYPILOT_SERVE_FOLDER/run.sh"; echo $? >"$SKYPILOT_SERVE_FOLDER/ended"'
)
KILLED = "137"  # what a shell makes of SIGKILL
NO_ANSWER = (OSError, aiohttp.ClientError, asyncio.TimeoutError)

log = logging.getLogger("controller")


class Controller:
    """The one that works. `born` tells the service from an earlier one of the same name."""

    def __init__(
        self, state: Path, name: str, born: float, listener: socket.socket, leash: bool
    ) -> None:
        self._name = name
        self._born = born
        self._places = Places(state, name)
        self._store = Store(state)
        self._listener = listener
        self._leash = leash
        self._standby: subprocess.Popen[bytes] | None = None
        self._balancer_due = self._launch_due = 0.0
        self._losses = 0  # since a replica became ready
        self._work: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._probe_due: dict[int, float] = {}
        self._scaler = Scaler(0)

    async def run(self) -> None:
        """Work until the service is to end, then end it. Returns at once if there is none."""
        service = self._store.get(self._name)
        if service is None or service.born != self._born:
            return
        self._scaler.target = service.wanted
        with self._store.edit(self._name) as service:
            service.controller_pid = os.getpid()
            service.controller_port = self._listener.getsockname()[1]
        log.info("process %d takes over", os.getpid())
        if self._leash:
            asyncio.get_running_loop().add_reader(0, self._leash_moved)
        runner = web.AppRunner(self._app(), access_log=None, shutdown_timeout=1)
        await runner.setup()
        await web.SockSite(runner, self._listener).start()
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector) as self._http:
            await self._work_until_ending()
        await runner.cleanup()
        take_down(self._store, self._places, self._current())
        self._store.close()  # before the lock is free: then nothing of ours touches the folder

    async def _work_until_ending(self) -> None:
        while not (service := self._current()).ending:
            try:
                self._tick(service)
            except Exception:
                log.exception("the next round may go better")
            await anyio.sleep(TICK_SECONDS)
        for work in self._work.values():
            work.cancel()
        if self._standby:
            self._standby.kill()
            self._standby.wait()

    def _current(self) -> Service:
        service = self._store.get(self._name)
        assert service is not None
        return service

    def _leash_moved(self) -> None:
        if not os.read(0, 1):
            asyncio.get_running_loop().remove_reader(0)
            with self._store.edit(self._name) as service:
                service.ending = True

    # --- keeping all alive ----------------------------------------------------------------------

    def _tick(self, service: Service) -> None:
        processes.reap()
        now = time.time()
        if self._standby is None or self._standby.poll() is not None:
            leash = 0 if self._leash else None  # its stdin
            self._standby = start(self._places, self._born, self._listener, leash)
        if not self._places.balancer(service).alive and now >= self._balancer_due:
            self._balancer_due = now + 1
            self._start_balancer(service)
        for replica in service.replicas:
            self._look_after(service, replica, now)
        self._scale(now)

    def _start_balancer(self, service: Service) -> None:
        task = Task(service.tasks[service.latest]).config["service"]
        options = {
            "service-name": self._name,
            "log-format": "json",
            "host": HOST,
            "port": service.port,
            "admin-host": HOST,
            "admin-port": service.admin_port,
            "controller-url": f"http://{HOST}:{service.controller_port}",
            "policy": task.get("load_balancing_policy", "least_load"),
            **{f"tls-{key}": path for key, path in task.get("tls", {}).items()},
        }
        if options["policy"] == "instance_aware_least_load":
            rates = task["replica_policy"]["target_qps_per_replica"]
            options["target-qps"] = json.dumps(rates)
        words = [str(word) for key, value in options.items() for word in (f"--{key}", value)]
        command = [sys.executable, "-m", "lb", "serve", *words, *service.options]
        mark, output = self._places.balancer(service).mark, self._places.balancer_log
        env = {**BALANCER, **os.environ}
        with (
            processes.starting(command, mark=mark, log=output, cwd=ROOT, env=env) as process,
            self._store.edit(self._name) as service,
        ):
            service.balancer_pid, service.balancer_started = process.pid, process.started
        log.info("load balancer started as process %d", process.pid)

    def _look_after(self, service: Service, replica: Replica, now: float) -> None:
        process = self._places.process(replica)
        probe = Task(service.tasks[replica.version]).probe
        ready_by = replica.launched_at + probe["initial_delay_seconds"]
        if replica.status is Status.SHUTTING_DOWN:
            self._do("end", replica.id, self._end, replica)
        elif not replica.stays:
            pass
        elif not process.alive:
            process.end()
            self._lost(replica, Status.FAILED, self._end_of(replica))
        elif replica.first_ready_at is None and now > ready_by:
            process.end()
            self._lost(replica, Status.FAILED_INITIAL_DELAY, "was not ready in time")
        elif replica.status is Status.NOT_READY and now - replica.changed_at > NOT_READY_SECONDS:
            process.end()
            self._lost(replica, Status.FAILED, "failed its probe for too long")
        elif replica.status is not Status.PROVISIONING:
            if now >= self._probe_due.get(replica.id, 0.0):
                self._do("probe", replica.id, self._probe, replica, probe)
        elif (self._places.replica(replica.id) / "started").exists():
            self._change(replica, Status.STARTING)

    def _do(
        self, what: str, replica_id: int, work: Callable[..., Awaitable[None]], *args: Any
    ) -> None:
        """Have this done in the background, unless it is being done."""
        running = self._work.get((what, replica_id))
        if running is None or running.done():
            self._work[what, replica_id] = asyncio.ensure_future(work(*args))

    def _change(self, replica: Replica, status: Status) -> None:
        if replica.status is not status:
            with self._store.edit(self._name) as service:
                service.change(replica.id, status, time.time())
            log.info("replica %d is %s", replica.id, status.value)
            if status is Status.READY:
                self._losses = 0

    def _end_of(self, replica: Replica) -> str:
        """The exit code that its shell wrote down, or that of SIGKILL."""
        file = self._places.replica(replica.id) / "ended"
        return (file.read_text().strip() if file.exists() else "") or KILLED

    def _lost(self, replica: Replica, status: Status, why: str) -> None:
        """What was killed or has been ready is replaced; what failed by itself before is shown."""
        log.warning("replica %d is lost: %s", replica.id, why)
        self._losses += 1
        self._launch_due = time.time() + min(LONGEST_PAUSE_SECONDS, 2**self._losses / 2)
        if replica.first_ready_at is None and why != KILLED:
            self._change(replica, status)
        else:
            self._forget(replica)

    def _forget(self, replica: Replica) -> None:
        with self._store.edit(self._name) as service:
            service.remove(replica.id, time.time())
        log.info("replica %d is gone", replica.id)

    # --- replicas come and go -------------------------------------------------------------------

    def _scale(self, now: float) -> None:
        with self._store.edit(self._name) as service:
            policy = Task(service.tasks[service.latest]).policy
            service.wanted = self._scaler.decide(policy, now)
            if service.stale_until and now >= service.stale_until:
                service.settle(now)
                service.stale_until = 0.0
            launch, gone = service.plan()
            for replica_id in gone:
                service.change(replica_id, Status.SHUTTING_DOWN, now)
        if now >= self._launch_due:
            for _ in range(launch):
                self._launch(service)

    def _launch(self, service: Service) -> None:
        with self._store.edit(self._name) as service:
            replica_id, service.next_id = service.next_id, service.next_id + 1
        now, port, version = time.time(), free_port(), service.latest
        replica = Replica(replica_id, version, Status.PROVISIONING, now, now, port=port)
        task, folder = Task(service.tasks[version]), self._places.replica(replica_id)
        folder.mkdir()
        (folder / "setup.sh").write_text(task.config.get("setup", ""))
        run = re.sub(r"(?<!\$)\{port\}", str(port), task.config["run"])
        (folder / "run.sh").write_text(run)
        ours = {"SKYPILOT_SERVE_REPLICA_ID": str(replica_id), "SKYPILOT_SERVE_PORT": str(port)}
        where = task.config.get("workdir", str(folder))
        with (
            processes.starting(
                ["bash", "-c", LIFE, where],
                mark=self._places.process(replica).mark,
                log=folder / "log",
                cwd=folder,
                env={**os.environ, **task.envs, **ours},
            ) as process,
            self._store.edit(self._name) as service,
        ):
            replica.pid, replica.started = process.pid, process.started
            service.replicas.append(replica)
        log.info("replica %d of version %d is process %d", replica_id, version, process.pid)

    async def _end(self, replica: Replica) -> None:
        """Wait for its requests to finish, and only then end it."""
        process = self._places.process(replica)
        if replica.first_ready_at is not None:
            with anyio.move_on_after(DRAIN_SECONDS):
                while not await self._is_idle(replica):  # noqa: ASYNC110 - it is another process's
                    await anyio.sleep(TICK_SECONDS)
        told = set[int]()
        with anyio.move_on_after(KILL_SECONDS):
            while process.terminate(told):  # noqa: ASYNC110 - it is another process's doing
                await anyio.sleep(TICK_SECONDS)
        process.end()
        self._forget(replica)

    async def _is_idle(self, replica: Replica) -> bool:
        """Whether the balancer has taken it off its list and waits for no answer of it."""
        url = f"http://{HOST}:{self._current().admin_port}/replicas"
        try:
            async with self._http.get(url, timeout=aiohttp.ClientTimeout(total=5)) as answer:
                rows = (await answer.json())["replicas"]
        except NO_ANSWER:
            return False
        mine = [row for row in rows if row["url"] == replica.url]
        return all(row["state"] == "draining" and not row["in_flight"] for row in mine)

    async def _probe(self, replica: Replica, probe: dict[str, Any]) -> None:
        method, data = ("POST", probe["post_data"]) if probe.get("post_data") else ("GET", None)
        limit = aiohttp.ClientTimeout(total=probe["timeout_seconds"])
        url, headers = replica.url + probe["path"], probe.get("headers", {})
        try:
            call = self._http.request(method, url, json=data, headers=headers, timeout=limit)
            async with call as answer:
                ready = answer.status == 200
        except NO_ANSWER:
            ready = False
        was_ready = replica.first_ready_at is not None
        self._probe_due[replica.id] = time.time() + (PROBE_SECONDS if ready else 0.0)
        if ready or was_ready:
            self._change(replica, Status.READY if ready else Status.NOT_READY)

    # --- the HTTP API, as SkyServe's ------------------------------------------------------------

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[_errors], client_max_size=64 * 1024 * 1024)
        app.router.add_post(SYNC_PATH, self._sync)
        app.router.add_post("/controller/update_service", self._update)
        app.router.add_post("/controller/terminate_replica", self._terminate)
        app.router.add_get("/autoscaler/info", self._autoscaler_info)
        return app

    async def _sync(self, request: web.Request) -> web.Response:
        report = (await request.json()).get("request_aggregator", {})
        self._scaler.arrivals += map(float, report.get("timestamps", []))
        service = self._current()
        kinds = {version: Task(config).accelerator for version, config in service.tasks.items()}
        info = {each.url: {"gpu_type": kinds[each.version]} for each in service.listed}
        return web.json_response({"replica_info": info})

    async def _update(self, request: web.Request) -> web.Response:
        wanted = await request.json()
        if wanted.get("version") is None:
            return web.json_response({"message": "Error: version is not specified."}, status=400)
        with self._store.edit(self._name) as service:
            service.update(wanted["version"], Mode(wanted.get("mode", "rolling")), time.time())
        log.info("update to version %d, %s", service.latest, service.mode.value)
        return web.json_response({"message": "Success"})

    async def _terminate(self, request: web.Request) -> web.Response:
        wanted = await request.json()
        replica = self._current().replica(wanted["replica_id"])
        if replica is None:
            raise LookupError("there is no such replica")
        purged = replica.status in FAILURES and wanted["purge"]
        if not replica.stays and not purged:
            message = f"Replica {replica.id} is {replica.status.value}. Skip terminating now."
            return web.json_response({"message": message}, status=409)
        if purged:
            self._forget(replica)
        self._change(replica, Status.SHUTTING_DOWN)
        message = f"Replica {replica.id} is scheduled to be terminated."
        return web.json_response({"message": message})

    async def _autoscaler_info(self, _: web.Request) -> web.Response:
        service = self._current()
        policy = Task(service.tasks[service.latest]).policy
        limits = {key: policy[key] for key in ("min_replicas", "max_replicas")}
        return web.json_response({"target_num_replicas": service.wanted, **limits})


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer a call that cannot be understood as SkyServe does, with 500."""
    try:
        return await handler(request)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        message = f"Failed method {request.method} at {request.path}: {error!r}"
        return web.json_response({"message": message}, status=500)
