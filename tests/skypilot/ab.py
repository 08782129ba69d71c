"""The seed's A/B in one command: stock or fixed controller, stock balancer or ours.

    python tests/skypilot/ab.py                       both SkyPilot releases, time scaled by 4
    python tests/skypilot/ab.py --scale 1 --spacing 120 --skypilot 0.12.0
                                                      as the seed ran it: 23 minutes an arm

Each arm: the real controller over local replicas whose ``/health`` takes 8 s, 20 requests a second,
10 count-only updates 3 / 2 / 3 ..., a sampler of the controller's database. All times are divided
by the scale, the client's time-out of 60 s too. Prints the seed's table and keeps it, every request
and every sample as CSV under ``--out``. The exit code is 1 if an arm is not as it must be.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import environment
import experiment
from experiment import Outcome, Row
from service import Service

CONTROLLERS = {"stock": "off", "fixed": "fix"}
BALANCERS = ("stock", "ours")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--skypilot", action="append", choices=environment.VERSIONS)
    parser.add_argument("--controller", action="append", choices=CONTROLLERS)
    parser.add_argument("--balancer", action="append", choices=BALANCERS)
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--scale", type=float, default=4.0)
    parser.add_argument("--spacing", type=float, default=40.0, help="seconds, before the scale")
    parser.add_argument("--out", type=Path, default=Path("build/ab"))
    options = parser.parse_args()

    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        wheel = environment.build_wheel(Path(folder) / "wheel")
        for version, controller, balancer in itertools.product(
            options.skypilot or environment.VERSIONS,
            options.controller or CONTROLLERS,
            options.balancer or BALANCERS,
        ):
            arm = f"{version}-{controller}-{balancer}"
            print(f"{arm}: running", flush=True)
            service = Service(
                environment.wheel_environment(version, wheel),
                Path(folder) / arm,
                scale=options.scale,
                hook=CONTROLLERS[controller],
            )
            with service.run(replicas=2):
                outcome = experiment.run(
                    service,
                    skypilot=version,
                    controller=controller,
                    balancers=(balancer,),
                    updates=options.updates,
                    spacing=options.spacing / options.scale,
                )
            keep(options.out / arm, balancer, outcome)
            rows.append(outcome.rows[balancer])
    experiment.write_csv(options.out / "table.csv", rows)
    print(table(rows))
    faults = [fault for row in rows for fault in judge(row)]
    print("\n".join(faults) if faults else "Every arm is as it must be.")
    return 1 if faults else 0


def judge(row: Row) -> list[str]:
    """What an arm shows that it must not, or does not show that it must."""
    arm = f"{row.skypilot}, {row.controller} controller, {row.balancer} balancer"
    wrong = []
    if row.controller == "fixed":
        grown = 2 + (row.updates + 1) // 2  # the first two, and one for each growth
        if row.stale_samples or row.empty_syncs or row.reverted_relabels:
            wrong.append("the active set was stale, or a relabel was reverted")
        if row.replicas_launched != grown:
            wrong.append(f"{row.replicas_launched} replicas launched, not {grown}")
    elif not row.stale_samples:
        wrong.append("SkyPilot's fault did not show")
    if (row.controller, row.balancer) == ("stock", "stock"):
        if not row.http_503 or not row.hung:
            wrong.append("SkyPilot's 503s and hung requests did not show")
    elif not row.clean:
        wrong.append(f"{row.requests - row.ok} of {row.requests} requests failed")
    return [f"{arm}: {fault}" for fault in wrong]


def table(rows: list[Row]) -> str:
    """The rows as columns, as the seed has them."""
    lines = [["", *(f"{row.skypilot} {row.controller}/{row.balancer}" for row in rows)]]
    lines += [
        [name.replace("_", " "), *(str(asdict(row)[name]) for row in rows)]
        for name in list(asdict(rows[0]))[3:]
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def keep(folder: Path, balancer: str, outcome: Outcome) -> None:
    """Every request and every sample of an arm, as CSV."""
    folder.mkdir(exist_ok=True)
    experiment.write_csv(folder / "requests.csv", outcome.requests[balancer])
    fields = ["t", "active", "replicas", "ready", "routable"]
    with (folder / "samples.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fields, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(outcome.samples)


if __name__ == "__main__":
    sys.exit(main())
