"""The results as a table for people, as Markdown and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.table import Table

OURS = "ours"


@dataclass
class Results:
    """Figures of all rounds, by title and proxy; and why one is missing."""

    proxies: list[str]
    figures: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def add(self, proxy: str, figures: dict[str, float]) -> None:
        for title, figure in figures.items():
            self.figures.setdefault(title, {}).setdefault(proxy, []).append(figure)

    def ratio(self, title: str, proxy: str) -> float | None:
        """To ours; none where one of the two is missing, or lost in noise as latency can be."""
        rounds = self.figures[title]
        its, ours = (median(rounds.get(name, [0.0])) for name in (proxy, OURS))
        return its / ours if its > 0 and ours > 0 and not title.endswith("%") else None

    def cell(self, title: str, proxy: str) -> str:
        """Median, the lowest and the highest of the rounds, and the ratio to ours."""
        rounds = self.figures[title].get(proxy)
        if not rounds:
            return "-"
        text = number(median(rounds))
        if len(rounds) > 1:
            text += f" ({number(min(rounds))}-{number(max(rounds))})"
        ratio = self.ratio(title, proxy)
        return text if proxy == OURS or ratio is None else f"{text} x{ratio:.2f}"


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def tables(results: Results, facts: dict[str, Any]) -> Iterator[Table | str]:
    """How it was measured, the figures, and who was measured."""
    yield "\n".join(conditions(facts))
    figures = Table("median (lowest-highest) x ratio to ours")
    for proxy in results.proxies:
        figures.add_column(proxy, justify="right")
    for title in results.figures:
        figures.add_row(title, *(results.cell(title, proxy) for proxy in results.proxies))
    yield figures
    who = Table("proxy", "version", "settings")
    for proxy, about in facts["proxies"].items():
        who.add_row(proxy, about["version"], about["settings"])
    yield who


def conditions(facts: dict[str, Any]) -> list[str]:
    machine, scale = facts["machine"], facts["scale"]
    processor = (
        f"{machine['processor']}, Linux {machine['kernel']}, Python {machine['python']}, "
        f"load average at the start {machine['load_average_at_start']:.1f}"
    )
    loads = (
        f"each proxy on core {machine['proxy_core']}, load and replicas on "
        f"{', '.join(map(str, machine['load_cores']))}; rounds: {scale['rounds']}, of "
        f"{scale['seconds']:g} s; {scale['connections']} connections in a closed loop, "
        f"{scale['streams']} streams of 25 chunks/s, {scale['replicas']} replicas where not said"
    )
    return [processor, loads, facts["settings"]]


def markdown(results: Results, facts: dict[str, Any]) -> str:
    rows = [
        *(f"- {line}" for line in conditions(facts)),
        *(
            f"- {proxy} ({about['version']}): {about['settings']}"
            for proxy, about in facts["proxies"].items()
        ),
        "",
        "| | " + " | ".join(results.proxies) + " |",
        "| --- |" + " ---: |" * len(results.proxies),
    ]
    for title in results.figures:
        cells = (results.cell(title, proxy) for proxy in results.proxies)
        rows.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def as_json(results: Results, about: dict[str, Any]) -> dict[str, Any]:
    return about | {
        "failures": results.failures,
        "figures": {
            title: {
                proxy: {
                    "median": median(rounds),
                    "rounds": rounds,
                    "ratio_to_ours": results.ratio(title, proxy),
                }
                for proxy, rounds in by_proxy.items()
            }
            for title, by_proxy in results.figures.items()
        },
    }
