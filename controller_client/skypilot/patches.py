"""Applies the parts to SkyPilot's modules, or leaves them alone and remembers why.

All or nothing for each part: SkyPilot's version and the parameters of every function that the part
wraps must be the ones it was written for.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from controller_client.skypilot.hook import BALANCER, FIX, VARIABLE

SUPPORTED = ((0, 12), (0, 15))  # from, and before
ACTIVE = "active"
RESTART = "fix at restarts"  # the fix's half in `sky.serve.controller`

# What became of each part in this process: `ACTIVE`, or why not.
outcome: dict[str, str] = {}


class Unsupported(Exception):
    """This SkyPilot is not one that the part knows; the message says what is unlike."""


def apply(module: ModuleType, part: str, parts: frozenset[str]) -> None:
    """Patch `module` with `part`, if it is among `parts`. The controller gets the report."""
    if part == FIX:
        outcome[FIX] = _attempt(lambda: _apply_fix(module), part, parts)
    elif part == BALANCER:
        outcome[BALANCER] = _attempt(lambda: _apply_balancer(module), part, parts)
    else:
        from controller_client.skypilot import report

        report.install(module)
        outcome[RESTART] = _attempt(lambda: _apply_restart(module), FIX, parts)


def _attempt(patch: Callable[[], None], part: str, parts: frozenset[str]) -> str:
    if part not in parts:
        return f"off: {VARIABLE} asks for {' and '.join(sorted(parts))} alone"
    try:
        require_version()
        patch()
    except Unsupported as reason:
        return f"left alone: {reason}"
    except Exception as fault:
        return f"failed: {fault!r}"
    return ACTIVE


def _apply_fix(module: ModuleType) -> None:
    from controller_client.skypilot import fix

    fix.install(module)


def _apply_restart(module: ModuleType) -> None:
    from controller_client.skypilot import fix

    fix.install_restart(module)


def _apply_balancer(module: ModuleType) -> None:
    from controller_client.skypilot import drop_in

    require_parameters({module.run_load_balancer: drop_in.PARAMETERS})
    module.run_load_balancer = drop_in.run_load_balancer  # type: ignore[attr-defined]


def require_version() -> None:
    """Raise `Unsupported` unless the imported SkyPilot is of a supported release."""
    import sky

    numbers = sky.__version__.split(".")[:2]
    if not all(number.isdigit() for number in numbers):
        raise Unsupported(f"SkyPilot {sky.__version__} is not a release")
    if not SUPPORTED[0] <= tuple(map(int, numbers)) < SUPPORTED[1]:
        low, high = (".".join(map(str, bound)) for bound in SUPPORTED)
        raise Unsupported(f"SkyPilot {sky.__version__} is not in {low} <= version < {high}")


def require_parameters(expected: Mapping[Callable[..., Any], tuple[str, ...]]) -> None:
    """Raise `Unsupported` unless each function has these parameters; more with defaults may follow."""
    for function, names in expected.items():
        parameters = list(inspect.signature(function).parameters.values())
        known, added = parameters[: len(names)], parameters[len(names) :]
        if tuple(p.name for p in known) != names or any(p.default is p.empty for p in added):
            listed = ", ".join(p.name for p in parameters)
            raise Unsupported(f"{function.__qualname__} takes ({listed})")


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Put `wrapper(original, ...)` in the place of `owner.name`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, wrapped)
