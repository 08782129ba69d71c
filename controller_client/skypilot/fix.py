"""The controller-side fix: versions and the active set change as one for every reader.

SkyPilot's `update_version` relabels the replicas that it keeps, but the set of active versions
follows up to 25 s later, and the prober, which holds objects that it read before a relabel, writes
old versions back. Wrapped around SkyPilot's own functions:

| function                       | what is added                                                     |
| ------------------------------ | ----------------------------------------------------------------- |
| update_version                 | active set widened before the relabel, recomputed after it        |
| get_active_replica_urls        | its two reads see no change between them                          |
| ..active_versions_from_replica | computed from replicas that are read inside, not before           |
| add_or_update_replica          | a newer version in the database outlives the write of an older    |
| remove_replica                 | never between a relabel's read and its write, which would undo it |
| generate_scaling_decisions     | none from a view that an update has overtaken: outdated replicas  |
|                                | in it are not; the next tick decides                              |
| SkyServeController.__init__    | after a restart, autoscaler and replica ids go on where they were |

They exclude each other by one lock, held for database calls and, by the reader, while SkyPilot looks
up each URL. It is the innermost: nothing under it takes SkyPilot's manager lock, which the prober
holds while it probes, so that an update never waits for a probe. Only the controller process writes
here while it lives; the service process writes replicas after it has killed the controller.

A crash inside an update leaves the widened set: every READY replica is listed, and the first
prober pass after the restart narrows it. SkyPilot's own restart would not leave it at that: its
autoscaler begins at version 1 and launches as many replicas again for an updated service, at each
of its ticks, under the ids of those that run.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from controller_client.skypilot.patches import require_parameters, wrap

# The lock is held for milliseconds. Should a cloud that does not answer make it longer, or a changed
# SkyPilot bring about a deadlock, then this many seconds later SkyPilot goes on as without it.
LOCK_SECONDS = 5.0

_RECOMPUTE = "set_service_status_and_active_versions_from_replica"

# Faults inside the fix, by step. SkyPilot's own behaviour continued after each.
faults: Counter[str] = Counter()

_installed: list["Fix"] = []  # the one of this process, or none


def install(managers: ModuleType) -> None:
    """Wrap the functions of `sky.serve.replica_managers` and what it calls.

    Raises `Unsupported` and changes nothing if one of them is not as expected.
    """
    from sky.serve import autoscalers

    state, utils = managers.serve_state, managers.serve_utils
    manager = managers.SkyPilotReplicaManager
    require_parameters(
        {
            manager.update_version: ("self", "version", "spec", "update_mode"),
            manager.get_active_replica_urls: ("self",),
            getattr(utils, _RECOMPUTE): ("service_name", "replica_infos", "update_mode"),
            state.add_or_update_replica: ("service_name", "replica_id", "replica_info"),
            state.remove_replica: ("service_name", "replica_id"),
            state.get_replica_infos: ("service_name",),
            state.get_replica_info_from_id: ("service_name", "replica_id"),
            state.get_service_from_name: ("service_name",),
            state.set_service_status_and_active_versions: (
                *("service_name", "status", "active_versions"),
            ),
            autoscalers.Autoscaler.generate_scaling_decisions: (
                *("self", "replica_infos", "active_versions"),
            ),
        }
    )
    fix = Fix(state, utils, managers.logger)
    wrap(manager, "update_version", fix.update_version)
    wrap(manager, "get_active_replica_urls", fix.get_active_replica_urls)
    wrap(utils, _RECOMPUTE, fix.recompute)
    wrap(state, "add_or_update_replica", fix.add_or_update_replica)
    wrap(state, "remove_replica", fix.remove_replica)
    wrap(autoscalers.Autoscaler, "generate_scaling_decisions", fix.generate_scaling_decisions)
    _installed[:] = [fix]


def install_restart(controller: ModuleType) -> None:
    """Wrap the start of the controller in `sky.serve.controller`, on the same terms.

    Either of the two modules may be executed first, for they import each other.
    """
    start = controller.SkyServeController.__init__
    require_parameters({start: ("self", "service_name", "service_spec", "version", "host", "port")})
    wrap(controller.SkyServeController, "__init__", _start_controller)


def _start_controller(
    original: Callable[..., None],
    controller: Any,
    service_name: str,
    service_spec: Any,
    version: int,
    host: str,
    port: int,
) -> None:
    original(controller, service_name, service_spec, version, host, port)
    for fix in _installed:
        fix.after_restart(controller, service_name, service_spec, version)


class Fix:
    """The wrappers, by the name of what they wrap; each calls `original` exactly once."""

    def __init__(self, state: Any, utils: Any, logger: Any) -> None:
        self._state = state
        self._utils = utils
        self._logger = logger
        self._lock = threading.RLock()

    def update_version(
        self, original: Callable[..., None], manager: Any, version: int, spec: Any, update_mode: Any
    ) -> None:
        with self._alone():
            self._safely("widen", self._widen, manager, version)
            original(manager, version, spec, update_mode)
            self._safely("narrow", self._narrow, manager)

    def get_active_replica_urls(
        self, original: Callable[..., list[str]], manager: Any
    ) -> list[str]:
        with self._alone():
            return original(manager)

    def recompute(
        self, original: Callable[..., None], service_name: str, replica_infos: Any, update_mode: Any
    ) -> None:
        with self._alone():
            now = self._safely("read again", self._state.get_replica_infos, service_name)
            original(service_name, replica_infos if now is None else now, update_mode)

    def add_or_update_replica(
        self, original: Callable[..., None], service_name: str, replica_id: int, replica_info: Any
    ) -> None:
        with self._alone():
            self._safely("merge", self._keep_newer_version, service_name, replica_id, replica_info)
            original(service_name, replica_id, replica_info)

    def remove_replica(
        self, original: Callable[..., None], service_name: str, replica_id: int
    ) -> None:
        with self._alone():
            original(service_name, replica_id)

    def generate_scaling_decisions(
        self,
        original: Callable[..., list[Any]],
        autoscaler: Any,
        replica_infos: list[Any],
        active_versions: list[int],
    ) -> list[Any]:
        with self._alone():
            if self._safely(
                "compare", self._overtaken, autoscaler._service_name, replica_infos, active_versions
            ):
                return []
            return original(autoscaler, replica_infos, active_versions)

    def after_restart(self, controller: Any, service_name: str, spec: Any, version: int) -> None:
        """Not a wrapper: what follows the controller's start."""
        self._safely("go on", self._go_on, controller, service_name, spec, version)

    def _go_on(self, controller: Any, service_name: str, spec: Any, version: int) -> None:
        """Before the autoscaler's first tick: its version, and an id that no replica has."""
        manager, autoscaler = controller._replica_manager, controller._autoscaler
        if version > autoscaler.latest_version:
            autoscaler.update_version(version, spec, manager._update_mode)
        replicas = self._state.get_replica_infos(service_name)
        highest = max((replica.replica_id for replica in replicas), default=0)
        manager._next_replica_id = max(manager._next_replica_id, highest + 1)

    def _widen(self, manager: Any, version: int) -> None:
        """Make the coming version active beside the others, before a replica bears it."""
        if version <= manager.latest_version:
            return  # SkyPilot will refuse it
        record = self._state.get_service_from_name(manager._service_name)
        active = record["active_versions"]
        if active and not self._shutting_down(record):
            self._state.set_service_status_and_active_versions(
                manager._service_name, record["status"], sorted({*active, version})
            )

    def _narrow(self, manager: Any) -> None:
        name = manager._service_name
        recompute = getattr(self._utils, _RECOMPUTE)
        recompute(name, self._state.get_replica_infos(name), manager._update_mode)

    def _keep_newer_version(self, service_name: str, replica_id: int, replica_info: Any) -> None:
        stored = self._state.get_replica_info_from_id(service_name, replica_id)
        if stored is not None and stored.version > replica_info.version:
            replica_info.version = stored.version

    def _overtaken(
        self, service_name: str, replica_infos: list[Any], active_versions: list[int]
    ) -> bool:
        """Whether versions have changed since the autoscaler read them."""
        record = self._state.get_service_from_name(service_name)
        now = {
            info.replica_id: info.version for info in self._state.get_replica_infos(service_name)
        }
        relabelled = any(
            now.get(info.replica_id, info.version) != info.version for info in replica_infos
        )
        return bool(relabelled or record["active_versions"] != active_versions)

    def _shutting_down(self, record: dict[str, Any]) -> bool:
        return bool(record["status"] == self._state.ServiceStatus.SHUTTING_DOWN)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        held = self._lock.acquire(timeout=LOCK_SECONDS)
        if not held:
            self._note("lock", f"not free within {LOCK_SECONDS:g} s; going on without it")
        try:
            yield
        finally:
            if held:
                self._lock.release()

    def _safely(self, step: str, function: Callable[..., Any], *args: Any) -> Any:
        """What `function` returns; None after a fault, which is noted and goes no further."""
        try:
            return function(*args)
        except Exception as fault:
            self._note(step, repr(fault), exc_info=True)
            return None

    def _note(self, step: str, what: str, exc_info: bool = False) -> None:
        faults[step] += 1
        self._logger.error(
            f"skyserve-lb: fault {faults[step]} in step {step!r} of the fix, SkyPilot's own "
            f"behaviour continues: {what}",
            exc_info=exc_info,
        )
