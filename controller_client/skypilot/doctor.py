"""`skyserve-lb doctor`: is the add-on at work in SkyPilot's environment, and in each service?

The looking is done by `inspection`, run by the Python in question, so that the answer is that
environment's own; the judging is done here.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from controller_client.skypilot.drop_in import PROCESS_NAME
from controller_client.skypilot.hook import BALANCER, FIX, VARIABLE, wanted_parts
from controller_client.skypilot.patches import ACTIVE

WELL, UNWELL, UNUSABLE = 0, 1, 2
SECONDS = 120.0  # SkyPilot takes seconds to import, each unreachable controller a few more

Findings = dict[str, Any]

_NO_HOOK = (
    "the hook is not active although the wheel is installed: is skyserve_lb.pth missing from "
    "site-packages, or Python started with -S? Install the wheel again"
)


def doctor(python: str | None, as_json: bool) -> int:
    """Print what was found in `python`'s environment (this one's by default); the exit code."""
    try:
        found = inspected(python or sys.executable)
    except ValueError as error:
        click.echo(f"skyserve-lb doctor: {error}", err=True)
        return UNUSABLE
    problems = judge(found)
    if as_json:
        click.echo(json.dumps({"ok": not problems, "problems": problems, **found}, indent=2))
    else:
        click.echo("\n".join(describe(found, problems)))
    return UNWELL if problems else WELL


def inspected(python: str) -> Findings:
    """The findings of `inspection` under `python`. Raises ValueError if it cannot be run there."""
    script = Path(__file__).with_name("inspection.py")
    try:
        done = subprocess.run(  # noqa: S603  the operator names the program
            (python, str(script)), capture_output=True, text=True, check=False, timeout=SECONDS
        )
    except OSError as error:
        raise ValueError(f"--python {python}: {error.strerror or error}") from None
    except subprocess.TimeoutExpired:
        raise ValueError(f"--python {python}: no answer within {SECONDS:g} s") from None
    try:
        return dict(json.loads(done.stdout))
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise ValueError(f"--python {python}: the inspection failed there: {last}") from None


def judge(found: Findings) -> list[str]:
    """What is wrong, and what to do about it; empty if all is well."""
    problems = _judge_environment(found)
    for service in found["services"]:
        name = service["name"]
        wanted = wanted_parts(found["variable"])
        problems += [f"service {name}: {problem}" for problem in _judge_service(service, wanted)]
    return problems


def _judge_environment(found: Findings) -> list[str]:
    python = found["python"]
    if found["skypilot"] is None:
        return [f"no SkyPilot in {python}; name its Python with --python"]
    if found["wheel"] is None:
        return [f"skyserve-lb is not installed: {python} -m pip install skyserve-lb"]
    wanted = wanted_parts(found["variable"])
    if not wanted:
        return [f"the hook is switched off by {VARIABLE}={found['variable']}; unset it"]
    if not found["hook"]:
        return [_NO_HOOK]
    return [
        f"part {part}: {state}"
        for part, state in found["parts"].items()
        if part in wanted and state != ACTIVE
    ]


def _judge_service(service: Findings, wanted: frozenset[str]) -> list[str]:
    controller, balancer = service["controller"], service["balancer"]
    problems = []
    if "fault" in controller:
        problems.append(f"controller: {controller['fault']}; restart the service")
    elif FIX in wanted and controller["parts"][FIX] != ACTIVE:
        problems.append(f"controller: fix {controller['parts'][FIX]}")
    elif controller["faults"]:
        steps = ", ".join(f"{step} {count}" for step, count in controller["faults"].items())
        problems.append(f"controller: faults inside the fix ({steps}); see the controller's log")
    if BALANCER in wanted and not service["pool"] and balancer != PROCESS_NAME:
        problems.append(f"load balancer: {_balancer(service)}; restart the service")
    if not service["agree"]:
        problems.append(
            f"{service['ready']} READY replicas, none of an active version "
            f"(active: {service['active_versions']}): clients get 503"
        )
    return problems


def _balancer(service: Findings) -> str:
    if service["pool"]:
        return "none (a pool)"
    if service["balancer"] == PROCESS_NAME:
        return "ours"
    if service["balancer"] is None:
        return "none is listening"
    return f"not ours (process {service['balancer']})"


def describe(found: Findings, problems: list[str]) -> list[str]:
    """The findings for people."""
    variable = f" ({VARIABLE}={found['variable']})" if found["variable"] else ""
    lines = [
        f"Python      {found['python']}",
        f"SkyPilot    {found['skypilot'] or 'not installed'}",
        f"skyserve-lb {found['wheel'] or 'not installed'}",
        f"hook        {'active' if found['hook'] else 'not active'}{variable}",
        *(f"  {part:<9} {state}" for part, state in found["parts"].items()),
    ]
    for service in found["services"]:
        lines += ["", *_describe_service(service)]
    if not found["services"]:
        lines += ["", "no services"]
    verdict = [f"! {problem}" for problem in problems] or ["All is well."]
    return [*lines, "", *verdict]


def _describe_service(service: Findings) -> list[str]:
    controller = service["controller"]
    counts = f"{service['ready']} ready, {service['routable']} routable"
    state = controller.get("fault") or "; ".join(
        f"{part} {what}" for part, what in controller["parts"].items()
    )
    return [
        f"service {service['name']} ({service['status']})",
        f"  controller    {state}",
        f"  load balancer {_balancer(service)}",
        f"  replicas      {counts}, active versions {service['active_versions']}",
    ]
