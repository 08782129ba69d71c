"""What an update must not do, checked on SkyPilot's real replica manager and database.

Run with SkyPilot's Python, with the hook on or off; says one event a check. The manager's daemon
threads are kept from starting: a check runs a prober pass itself, when and as slowly as it needs.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import child
import cloud
from sky.serve import autoscalers, controller, replica_managers, serve_state, serve_utils
from sky.serve.service_spec import SkyServiceSpec
from sky.utils import common_utils

MODES = tuple(serve_utils.UpdateMode)
ROLLING, BLUE_GREEN = MODES
READY, STARTING, ENDING = "ready", "starting", "ending"
Status = serve_state.ReplicaStatus

_numbers = itertools.count(1)


def task_yaml(replicas: int, **other: Any) -> str:
    service = {"readiness_probe": "/health", "replicas": replicas, "ports": 8080}
    return json.dumps({"service": service, "resources": {}, "file_mounts": {}, **other})


class Bench:
    """A service in the database, its manager, and replicas in the given states."""

    def __init__(self, *states: str, **other: Any) -> None:
        self.name = f"svc{next(_numbers)}"
        self.other = other
        self.count = max(1, len(states))
        content = task_yaml(self.count, **other)
        spec = cloud.add_service(self.name, content)
        self.manager = replica_managers.SkyPilotReplicaManager(self.name, spec, 1)
        for replica_id, state in enumerate(states, start=1):
            self._add(replica_id, state)
        self.recompute()

    def _add(self, replica_id: int, state: str) -> None:
        info = replica_managers.ReplicaInfo(
            replica_id, f"{self.name}-{replica_id}", "8080", False, None, 1, None
        )
        status = info.status_property
        status.sky_launch_status = common_utils.ProcessStatus.SUCCEEDED
        if state in (READY, ENDING):
            status.service_ready_now, status.first_ready_time = True, 1.0
        if state == ENDING:
            status.sky_down_status = common_utils.ProcessStatus.RUNNING
        serve_state.add_or_update_replica(self.name, replica_id, info)

    def update(self, mode: Any = ROLLING, replicas: int | None = None, **other: Any) -> float:
        """Update as the controller's handler does; the seconds that it took."""
        version = serve_state.add_version(self.name)
        content = task_yaml(replicas or self.count, **{**self.other, **other})
        spec = SkyServiceSpec.from_yaml_str(content)
        serve_state.add_or_update_version(self.name, version, spec, content)
        started = time.monotonic()
        self.manager.update_version(version, spec, update_mode=mode)
        return time.monotonic() - started

    def recompute(self) -> None:
        """The second half of a prober pass."""
        serve_utils.set_service_status_and_active_versions_from_replica(
            self.name, self.infos(), self.manager._update_mode
        )

    def probe_pass(self) -> None:
        self.manager._probe_all_replicas()
        self.recompute()

    def infos(self) -> list[Any]:
        return list(serve_state.get_replica_infos(self.name))

    def versions(self) -> dict[int, int]:
        return {info.replica_id: info.version for info in self.infos()}

    def listed(self) -> list[str]:
        return sorted(self.manager.get_active_replica_urls())

    def record(self) -> dict[str, Any]:
        record = serve_state.get_service_from_name(self.name)
        assert record is not None
        return dict(record)


def check_a_ready_replica_stays_listed(mode: Any) -> None:
    bench = Bench(READY)
    before = bench.listed()
    bench.update(mode, replicas=2)
    assert before
    assert bench.listed() == before
    assert bench.versions() == {1: 2}
    assert bench.record()["active_versions"] == [2]


def check_several_replicas_ready_or_not(mode: Any) -> None:
    bench = Bench(READY, STARTING, READY, ENDING, READY)
    before = bench.listed()
    bench.update(mode, replicas=4)
    assert len(before) == 3
    assert bench.listed() == before
    assert bench.versions() == {1: 2, 2: 2, 3: 2, 4: 1, 5: 2}


def check_no_ready_replica_is_no_fault(mode: Any) -> None:
    bench = Bench(STARTING)
    bench.update(mode)
    assert bench.listed() == []
    assert bench.record()["active_versions"] == []


def check_a_spec_change_keeps_the_old_version(mode: Any) -> None:
    bench = Bench(READY, READY)
    before = bench.listed()
    bench.update(mode, run="echo changed")
    assert len(before) == 2
    assert bench.listed() == before
    assert bench.versions() == {1: 1, 2: 1}
    assert bench.record()["active_versions"] == [1]


def check_the_order_of_any_of_is_no_change(mode: Any) -> None:
    one, other = {"cpus": "1"}, {"cpus": "2"}
    bench = Bench(READY, resources={"any_of": [one, other]})
    before = bench.listed()
    bench.update(mode, resources={"any_of": [other, one]})
    assert bench.versions() == {1: 2}
    assert before
    assert bench.listed() == before


def check_file_mounts_reuse_nothing(mode: Any) -> None:
    bench = Bench(READY)
    before = bench.listed()
    bench.update(mode, file_mounts={"/data": "s3://bucket"})
    assert bench.versions() == {1: 1}
    assert before
    assert bench.listed() == before
    assert bench.record()["active_versions"] == [1]


def check_a_service_that_shuts_down_stays_so(mode: Any) -> None:
    bench = Bench(READY)
    down = serve_state.ServiceStatus.SHUTTING_DOWN
    serve_state.set_service_status_and_active_versions(bench.name, down)
    bench.update(mode)
    assert bench.record()["status"] == down
    assert bench.record()["active_versions"] == [1]


def check_a_version_that_is_refused_changes_nothing(mode: Any) -> None:
    bench = Bench(READY)
    before = bench.record()["active_versions"]
    bench.manager.update_version(1, None, update_mode=mode)
    assert bench.record()["active_versions"] == before == [1]


class SlowProbe:
    """A prober pass whose probes answer when they are let go."""

    def __init__(self, bench: Bench) -> None:
        self.probing = threading.Event()
        self.let_go = threading.Event()
        _probes[bench.name] = self
        self.thread = threading.Thread(target=bench.probe_pass)

    def __enter__(self) -> None:
        self.thread.start()
        assert self.probing.wait(10)

    def __exit__(self, *_: object) -> None:
        self.let_go.set()
        self.thread.join(10)


_probes: dict[str, SlowProbe] = {}


def probe(info: Any, *_: Any) -> tuple[Any, bool, float]:
    """Stands for the HTTP call of ``ReplicaInfo.probe``; the rest of the pass is SkyPilot's."""
    slow = _probes.get(info.cluster_name.rsplit("-", 1)[0])
    if slow is not None:
        slow.probing.set()
        assert slow.let_go.wait(30)
    return info, True, time.time()


def check_a_slow_probe_neither_delays_nor_reverts_an_update(mode: Any) -> None:
    bench = Bench(READY, READY)
    before = bench.listed()
    with SlowProbe(bench):
        assert bench.update(mode, replicas=3) < 1.0
        assert bench.listed() == before
    assert bench.versions() == {1: 2, 2: 2}
    assert bench.listed() == before


def check_what_a_slow_probe_found_is_kept(mode: Any) -> None:
    bench = Bench(READY, STARTING)
    with SlowProbe(bench):
        bench.update(mode)
    assert {info.replica_id: info.status for info in bench.infos()} == {
        1: Status.READY,
        2: Status.READY,
    }
    assert bench.versions() == {1: 2, 2: 2}


def check_a_write_after_an_older_read_keeps_the_new_version(mode: Any) -> None:
    bench = Bench(READY, READY)
    info = serve_state.get_replica_info_from_id(bench.name, 1)  # as _terminate_replica reads it
    assert info is not None
    bench.update(mode)
    info.status_property.sky_down_status = common_utils.ProcessStatus.SCHEDULED
    serve_state.add_or_update_replica(bench.name, 1, info)
    stored = serve_state.get_replica_info_from_id(bench.name, 1)
    assert stored is not None
    assert (stored.version, stored.status) == (2, Status.SHUTTING_DOWN)


def update_with(bench: Bench, mode: Any, action: Callable[[], None]) -> None:
    """Update, with ``action`` begun by another thread between the update's read and its writes."""
    other = threading.Thread(target=action)
    read_yaml = serve_state.get_yaml_content

    def read_and_act(name: str, version: int) -> Any:
        if version == 1 and not other.ident:  # update_version has read the replicas by now
            other.start()
            other.join(0.3)
        return read_yaml(name, version)

    serve_state.get_yaml_content = read_and_act
    try:
        bench.update(mode)
    finally:
        serve_state.get_yaml_content = read_yaml
    other.join(10)


def check_a_relabel_does_not_undo_a_termination(mode: Any) -> None:
    bench = Bench(READY, READY)

    def terminate() -> None:
        info = serve_state.get_replica_info_from_id(bench.name, 1)
        assert info is not None
        info.status_property.sky_down_status = common_utils.ProcessStatus.SCHEDULED
        serve_state.add_or_update_replica(bench.name, 1, info)

    update_with(bench, mode, terminate)
    assert [info.status for info in bench.infos()] == [Status.SHUTTING_DOWN, Status.READY]
    assert bench.versions() == {1: 2, 2: 2}


def check_a_relabel_does_not_bring_back_a_removed_replica(mode: Any) -> None:
    bench = Bench(READY, READY)
    update_with(bench, mode, lambda: serve_state.remove_replica(bench.name, 1))
    assert bench.versions() == {2: 2}


def check_a_stale_view_scales_nothing_down(mode: Any) -> None:
    bench = Bench(READY, READY)
    spec = serve_state.get_spec(bench.name, 1)
    autoscaler = autoscalers.Autoscaler.from_spec(bench.name, spec)
    seen, active = bench.infos(), bench.record()["active_versions"]
    bench.update(mode)
    autoscaler.update_version(2, spec, mode)
    assert autoscaler.generate_scaling_decisions(seen, active) == []
    # Seen afresh the same replicas are just right, and one too many is scaled down.
    now, active = bench.infos(), bench.record()["active_versions"]
    assert autoscaler.generate_scaling_decisions(now, active) == []
    bench._add(3, READY)
    bench.update(mode)
    autoscaler.update_version(3, spec, mode)
    now, active = bench.infos(), bench.record()["active_versions"]
    assert len(autoscaler.generate_scaling_decisions(now, active)) == 1


def check_a_restarted_controller_goes_on_where_it_was(mode: Any) -> None:
    bench = Bench(READY, READY)
    bench.update(mode)
    bench.update(mode)
    spec = serve_state.get_spec(bench.name, 3)
    restarted = controller.SkyServeController(bench.name, spec, 3, "127.0.0.1", 1)
    infos, active = bench.infos(), bench.record()["active_versions"]
    assert restarted._autoscaler.generate_scaling_decisions(infos, active) == []
    restarted._replica_manager.scale_up()
    assert bench.versions() == {1: 3, 2: 3, 3: 3}


class Crash(BaseException):
    """The process ends here."""


def check_a_crash_between_two_writes_leaves_all_listed(mode: Any) -> None:
    for writes_before in range(3):
        bench = Bench(READY, READY, READY)
        before = bench.listed()
        write, left = serve_state.add_or_update_replica, writes_before

        def write_or_crash(*args: Any, write: Any = write) -> None:
            nonlocal left
            if not left:
                raise Crash
            left -= 1
            write(*args)

        serve_state.add_or_update_replica = write_or_crash
        try:
            bench.update(mode)
        except Crash:
            pass
        finally:
            serve_state.add_or_update_replica = write
        assert list(bench.versions().values()).count(2) == writes_before
        assert bench.listed() == before, writes_before
        # The next start: a new manager at the latest version, and its first prober pass.
        bench.manager = replica_managers.SkyPilotReplicaManager(
            bench.name, serve_state.get_spec(bench.name, 2), 2
        )
        assert bench.listed() == before, writes_before
        bench.probe_pass()
        assert bench.listed() == before, writes_before


def check_a_fault_inside_the_fix_is_counted_and_passed_over(mode: Any) -> None:
    from controller_client.skypilot import fix

    bench = Bench(READY)
    original = serve_state.get_replica_info_from_id
    fix.faults.clear()

    def broken(*_: Any) -> Any:
        raise RuntimeError("broken")

    serve_state.get_replica_info_from_id = broken
    try:
        bench.update(mode)
    finally:
        serve_state.get_replica_info_from_id = original
    assert bench.versions() == {1: 2}
    assert fix.faults["merge"] == 1
    assert sum(fix.faults.values()) == 1
    fix.faults.clear()


UPDATES = 40


def _read_tightly(mode: Any, slow_probe: bool) -> None:
    bench = Bench(READY, READY, READY)
    expected = bench.listed()
    bad: list[list[str]] = []
    reads = 0
    done = threading.Event()

    def read() -> None:
        nonlocal reads
        while not done.is_set():
            answer = bench.listed()
            reads += 1
            if answer != expected:
                bad.append(answer)

    def probe_all_the_time() -> None:
        while not done.is_set():
            bench.probe_pass()

    others = [threading.Thread(target=read)]
    if not slow_probe:
        others.append(threading.Thread(target=probe_all_the_time))
    for thread in others:
        thread.start()
    reverted = 0
    try:
        for number in range(UPDATES):
            with SlowProbe(bench) if slow_probe else contextlib.nullcontext():
                assert bench.update(mode, replicas=3 + number % 2) < 1.0
            reverted += set(bench.versions().values()) != {number + 2}
    finally:
        done.set()
        for thread in others:
            thread.join()
    empty = sum(not answer for answer in bad)
    facts = {"reads": reads, "empty": empty, "partial": len(bad) - empty, "reverted": reverted}
    child.say("read", mode=mode.value, slow_probe=slow_probe, **facts)
    assert reads > UPDATES
    assert (empty, len(bad) - empty, reverted) == (0, 0, 0), facts


def check_a_tight_reader_sees_every_replica_always(mode: Any) -> None:
    _read_tightly(mode, slow_probe=False)


def check_a_tight_reader_with_a_slow_probe_in_flight(mode: Any) -> None:
    _read_tightly(mode, slow_probe=True)


def checks() -> Iterator[tuple[str, Callable[[Any], None]]]:
    for name, function in globals().items():
        if name.startswith("check_"):
            yield name.removeprefix("check_"), function


def main() -> None:
    manager = replica_managers.SkyPilotReplicaManager
    for daemon in ("_thread_pool_refresher", "_job_status_fetcher", "_replica_prober"):
        setattr(manager, daemon, lambda self: None)
    replica_managers.ReplicaInfo.probe = probe
    replica_managers.ReplicaInfo.url = property(lambda info: f"http://{info.cluster_name}")
    replica_managers.ReplicaInfo.handle = lambda info, cluster_record=None: None
    chosen = sys.argv[1:]
    for (name, check), mode in itertools.product(checks(), MODES):
        if chosen and name not in chosen:
            continue
        fault = ""
        try:
            check(mode)
        except Exception:
            fault = traceback.format_exc()
        child.say("checked", check=name, mode=mode.value, fault=fault)


if __name__ == "__main__":
    main()
