"""`--workers`: several processes on one port that look like one balancer."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from controller_client.testing import FakeController, ReplicaFactory, ScriptedReplica, hold
from tests.net.harness import Closed, RawClient, request
from tests.system.process import PATIENCE_SECONDS, Serve, refused, self_signed

WORKERS = 3


def serving(controller: FakeController, *options: str, workers: int = WORKERS) -> Serve:
    return Serve(controller.url, "--workers", str(workers), "--access-log", "all", *options)


@pytest.fixture
def replicas(
    replica_factory: ReplicaFactory, fake_controller: FakeController
) -> list[ScriptedReplica]:
    """Four, all of them ready."""
    made = [replica_factory(str(number)) for number in range(4)]
    fake_controller.set_ready([replica.url for replica in made])
    return made


def wait_until(look: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not look():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def workers_of(serve: Serve) -> list[int]:
    """Their process ids."""
    children = Path(f"/proc/{serve.process.pid}/task/{serve.process.pid}/children").read_text()
    return [int(pid) for pid in children.split()]


def metric(serve: Serve, name: str) -> float:
    """The sum over all labels."""
    lines = serve.ask_admin("/metrics").body.decode().splitlines()
    found = [line for line in lines if line.startswith(f"skyserve_lb_{name}{{")]
    assert found, f"no {name}"
    return sum(float(line.rpartition(" ")[2]) for line in found)


def status(serve: Serve) -> dict[str, object]:
    facts: dict[str, object] = json.loads(serve.ask_admin("/status").body)
    return facts


def who_served(serve: Serve) -> Counter[int]:
    return Counter(line["worker"] for line in serve.log.named("request.finished"))


def reach_all(serve: Serve, count: int = 0) -> int:
    """Ask over new connections until each worker has served some, and `count` in all; how many it took."""
    asked = 0
    while len(who_served(serve)) < WORKERS or asked < count:
        assert asked < 1000, who_served(serve)
        assert serve.ask(request()).status == 200
        asked += 1
        serve.log.wait_for("request.finished", asked)
    return asked


def requests_at(replicas: list[ScriptedReplica]) -> list[int]:
    return [len(replica.requests) for replica in replicas]


def test_they_sync_once_and_report_once(
    replicas: list[ScriptedReplica], fake_controller: FakeController
) -> None:
    with serving(fake_controller, "--sync-interval", "1h") as serve:
        serve.wait_for_replicas(4)
        asked = reach_all(serve, count=60)
        assert len(fake_controller.syncs) == 1, "each worker would have synced by itself"
        assert len(serve.log.named("replica.added")) == 4, "each worker would have told of them"
        assert metric(serve, "arrivals_pending") == asked
        serve.signal()
        assert serve.exit_code() == 0
    assert len(fake_controller.arrivals) == asked, "each is reported, and none twice"
    assert sum(requests_at(replicas)) == asked


def test_their_numbers_are_one_page(
    replicas: list[ScriptedReplica], fake_controller: FakeController
) -> None:
    with serving(fake_controller) as serve:
        serve.wait_for_replicas(4)
        asked = reach_all(serve, count=30)
        assert metric(serve, "requests_total") == asked
        assert metric(serve, "responses_total") == asked
        assert metric(serve, "replica_requests_total") == asked
        assert metric(serve, "request_duration_seconds_count") == asked
        assert metric(serve, "pool_connections_total") == asked
        assert metric(serve, "replica_set_changes_total") == 4, "the list is counted once"
        facts = status(serve)
        assert facts["processes"] == WORKERS
        assert sum(each["finished"] for each in facts["replicas"]) <= asked  # type: ignore[attr-defined]
        go = threading.Event()
        for replica in replicas:
            replica.behave_always(hold(go))
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(serve.client()) for _ in range(9)]
            for client in clients:
                client.send(request())
            wait_until(lambda: sum(requests_at(replicas)) == asked + 9)
            assert metric(serve, "inflight_requests") == 9
            assert metric(serve, "replica_inflight_requests") == 9
            assert metric(serve, "inflight_oldest_seconds") > 0
            assert status(serve)["in_flight"] == 9
            go.set()
            for client in clients:
                assert client.answer().status == 200
        wait_until(lambda: metric(serve, "inflight_requests") == 0)
        assert metric(serve, "replica_inflight_requests") == 0


def test_least_load_is_even_over_all_of_them(
    replicas: list[ScriptedReplica], fake_controller: FakeController
) -> None:
    """By itself each worker would begin at a place of its own, and three would meet at one replica."""
    go = threading.Event()
    for replica in replicas:
        replica.behave_always(hold(go))
    with serving(fake_controller) as serve, contextlib.ExitStack() as stack:
        stack.callback(go.set)
        serve.wait_for_replicas(4)
        clients = []
        for number in range(1, 25):
            client = stack.enter_context(serve.client())
            client.send(request())
            clients.append(client)
            wait_until(lambda: sum(requests_at(replicas)) == number)  # noqa: B023
            # Who asks for the metrics gets them after the workers' loads were told to all; who asks
            # once more, after each worker has taken them in.
            metric(serve, "inflight_requests")
            metric(serve, "inflight_requests")
            assert max(requests_at(replicas)) == -(-number // 4), requests_at(replicas)
        go.set()
        for client in clients:
            assert client.answer().status == 200
        assert len(who_served(serve)) > 1


def test_one_that_dies_is_replaced_and_nobody_else_notices(
    replicas: list[ScriptedReplica], fake_controller: FakeController
) -> None:
    go = threading.Event()
    with serving(fake_controller) as serve, contextlib.ExitStack() as stack:
        stack.callback(go.set)
        serve.wait_for_replicas(4)
        asked = reach_all(serve)
        for replica in replicas:
            replica.behave_always(hold(go))
        waiting = [stack.enter_context(serve.client()) for _ in range(12)]
        for client in waiting:
            client.send(request())
        wait_until(lambda: sum(requests_at(replicas)) == asked + 12)
        before = metric(serve, "requests_total")
        os.kill(workers_of(serve)[0], signal.SIGKILL)
        died = serve.log.wait_for("worker.died")[0]
        assert died["exit_code"] == -signal.SIGKILL
        # While one is missing, and after it: whoever connects is served.
        go.set()
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: serve.ask(request()).status, range(60)))
        assert answers == [200] * 60
        started = serve.log.wait_for("worker.started")[0]
        assert started["worker"] == died["worker"]
        assert len(workers_of(serve)) == WORKERS
        outcomes = Counter(outcome_of(client) for client in waiting)
        assert outcomes[200] + outcomes["cut"] == 12
        assert outcomes[200] > 0, "those of the others go on"
        serve.log.wait_for("request.finished", asked + 60 + outcomes[200])
        assert metric(serve, "requests_total") == asked + 60 + outcomes[200] > before
        assert metric(serve, "replica_inflight_requests") == 0, (
            "those of the dead one are forgotten"
        )


def outcome_of(client: RawClient) -> int | str:
    try:
        return client.answer().status
    except Closed:
        return "cut"


def test_a_new_one_knows_of_held_replicas(
    replicas: list[ScriptedReplica], fake_controller: FakeController
) -> None:
    with serving(fake_controller, "--grace-period", "1h") as serve:
        serve.wait_for_replicas(4)
        fake_controller.set_ready([])
        serve.log.wait_for("list.held")
        for pid in workers_of(serve):
            os.kill(pid, signal.SIGKILL)
        serve.log.wait_for("worker.started", WORKERS)
        reach_all(serve)


def test_the_grace_period_is_over_for_all(
    replicas: list[ScriptedReplica], fake_controller: FakeController
) -> None:
    options = ("--grace-period", "300ms", "--no-replica-wait", "0")
    with serving(fake_controller, *options) as serve:
        serve.wait_for_replicas(4)
        fake_controller.set_ready([])
        serve.log.wait_for("list.released")
        metric(serve, "requests_total")  # when they have answered, they have taken in the list, too
        for _ in range(20):
            assert serve.ask(request()).status == 503


def test_the_end_lets_all_of_them_finish(
    replicas: list[ScriptedReplica], fake_controller: FakeController
) -> None:
    go = threading.Event()
    for replica in replicas:
        replica.behave_always(hold(go))
    with serving(fake_controller) as serve, contextlib.ExitStack() as stack:
        stack.callback(go.set)
        serve.wait_for_replicas(4)
        clients = [stack.enter_context(serve.client()) for _ in range(12)]
        for client in clients:
            client.send(request())
        wait_until(lambda: sum(requests_at(replicas)) == 12)
        serve.signal()
        assert serve.log.wait_for("drain.started")[0]["in_flight"] == 12
        assert serve.ask_admin("/readyz").status == 503
        wait_until(lambda: is_closed(serve))
        go.set()
        for client in clients:
            answer = client.answer()
            assert (answer.status, answer.values(b"connection")) == (200, [b"close"])
        assert serve.exit_code() == 0
        assert len(serve.log.wait_for("drain.finished")) == 1
    assert len(fake_controller.arrivals) == 12


def is_closed(serve: Serve) -> bool:
    try:
        serve.client().sock.close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_forced_end_cuts_what_is_left_in_all_of_them(
    replicas: list[ScriptedReplica], fake_controller: FakeController
) -> None:
    go = threading.Event()
    for replica in replicas:
        replica.behave_always(hold(go))
    with serving(fake_controller) as serve, contextlib.ExitStack() as stack:
        stack.callback(go.set)
        serve.wait_for_replicas(4)
        clients = [stack.enter_context(serve.client()) for _ in range(12)]
        for client in clients:
            client.send(request())
        wait_until(lambda: sum(requests_at(replicas)) == 12)
        serve.signal()
        serve.log.wait_for("drain.started")
        serve.signal(signal.SIGINT)
        assert serve.log.wait_for("drain.forced")[0]["in_flight"] == 12
        assert serve.exit_code() == 0
        assert [outcome_of(client) for client in clients] == ["cut"] * 12


def test_without_the_control_process_they_end(
    replicas: list[ScriptedReplica], fake_controller: FakeController
) -> None:
    with serving(fake_controller) as serve:
        serve.wait_for_replicas(4)
        workers = workers_of(serve)
        assert len(workers) == WORKERS
        serve.process.kill()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))


def test_a_hangup_has_all_of_them_load_the_certificate(
    tmp_path: Path, fake_controller: FakeController
) -> None:
    key, certificate = self_signed(tmp_path)
    options = ("--tls-keyfile", key, "--tls-certfile", certificate)
    with serving(fake_controller, *options) as serve:
        serve.signal(signal.SIGHUP)
        lines = serve.log.wait_for("tls.reloaded", WORKERS + 1)
        assert {line.get("worker") for line in lines} == {None, *range(1, WORKERS + 1)}


def test_one_that_does_nothing_any_more_is_replaced(
    replicas: list[ScriptedReplica], fake_controller: FakeController
) -> None:
    impatient = (
        "import sys, lb.workers; lb.workers.SILENCE_SECONDS = 3; sys.argv[1:] = sys.argv[4:]; "
        "from lb.cli import main; sys.exit(main())"
    )
    options = ("--workers", str(WORKERS), "--access-log", "all")
    with Serve(fake_controller.url, *options, prefix=(sys.executable, "-c", impatient)) as serve:
        serve.wait_for_replicas(4)
        os.kill(workers_of(serve)[1], signal.SIGSTOP)
        silent = serve.log.wait_for("worker.silent")[0]
        assert serve.log.wait_for("worker.started")[0]["worker"] == silent["worker"]
        reach_all(serve)


def test_what_lies_in_the_working_directory_is_not_for_them(
    replicas: list[ScriptedReplica], fake_controller: FakeController, tmp_path: Path
) -> None:
    (tmp_path / "lb.py").write_text("raise SystemExit('another one')")
    as_installed = (
        "import sys; sys.argv[1:] = sys.argv[4:]; sys.path.remove(''); "
        "from lb.cli import main; sys.exit(main())"
    )
    options = ("--workers", str(WORKERS), "--access-log", "all")
    prefix = (sys.executable, "-c", as_installed)
    with Serve(fake_controller.url, *options, prefix=prefix, cwd=tmp_path) as serve:
        serve.wait_for_replicas(4)
        reach_all(serve)


def test_a_port_in_use_is_refused_though_it_could_be_shared(
    replicas: list[ScriptedReplica], fake_controller: FakeController
) -> None:
    with serving(fake_controller, workers=2) as serve:
        port = serve.address[1]
        code, line = refused(fake_controller.url, "--port", str(port), "--workers", "2")
    assert (code, line) == (
        3,
        f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another with --port",
    )


@pytest.mark.parametrize("count", ["0", "65", "two"])
def test_the_number_of_workers(count: str, fake_controller: FakeController) -> None:
    code, line = refused(fake_controller.url, "--workers", count)
    assert code == 2
    assert line.startswith("--workers: ")
