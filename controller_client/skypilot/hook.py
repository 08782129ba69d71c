"""Patches SkyPilot's serve modules at the moment they are imported, and costs nothing before.

The wheel puts `skyserve_lb.pth` beside the package; its one line calls `install` in every
interpreter of the environment, the children that `multiprocessing` spawns included. Most of them
never touch SkyServe: so a finder is registered and nothing else is done. It never raises and never
prints, since it would do so in every `python` of the machine.
"""

import os
import sys

# Neither `typing` nor what it would bring is imported: a millisecond is the whole allowance.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

VARIABLE = "SKYSERVE_LB_HOOK"
FIX, BALANCER = "fix", "lb"
# Which part patches which module. `controller` reports what became of the parts.
_MODULES = {
    "sky.serve.replica_managers": FIX,
    "sky.serve.load_balancer": BALANCER,
    "sky.serve.controller": "",
}


def wanted_parts(value: "str | None") -> frozenset[str]:
    """The parts that a value of `SKYSERVE_LB_HOOK` asks for; unset or empty means both.

    Anything unknown means none: who misspells a value meant to limit us, not to set us free.
    """
    chosen = (value or "on").strip().lower()
    if chosen == "on":
        return frozenset((FIX, BALANCER))
    return frozenset((chosen,)) & {FIX, BALANCER}


class Finder:
    """Finds as the others do; the modules that we patch get a step after their execution."""

    def __init__(self, parts: frozenset[str]) -> None:
        self.parts = parts

    def find_spec(
        self, name: str, path: object = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """The module's spec for one of the modules that we patch, else None."""
        if name not in _MODULES:
            return None
        for finder in sys.meta_path:
            if finder is not self:
                spec: ModuleSpec | None = finder.find_spec(name, path, target)  # type: ignore[arg-type]
                if spec is not None:
                    _patch_after_execution(spec, self.parts)
                    return spec
        return None


def _patch_after_execution(spec: "ModuleSpec", parts: frozenset[str]) -> None:
    """Shadow `exec_module` on this one loader, which keeps all its other abilities (`-m`, source)."""
    loader = spec.loader
    if loader is None:
        return
    execute = loader.exec_module

    def execute_and_patch(module: "ModuleType") -> None:
        execute(module)
        try:
            from controller_client.skypilot import patches

            patches.apply(module, _MODULES[spec.name], parts)
        except Exception:  # noqa: S110  SkyPilot must start whatever is wrong with us
            pass

    loader.exec_module = execute_and_patch  # type: ignore[method-assign]


def install() -> None:
    """Register the finder, unless `SKYSERVE_LB_HOOK` says off or it is there already."""
    parts = wanted_parts(os.environ.get(VARIABLE))
    if parts and not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder(parts))
