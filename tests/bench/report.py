"""The results as a table for people, as Markdown and as JSON."""

from __future__ import annotations

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
        """To ours."""
        rounds = self.figures[title]
        if title.endswith("%") or proxy not in rounds or not median(rounds.get(OURS, [0.0])):
            return None
        return median(rounds[proxy]) / median(rounds[OURS])

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


def table(results: Results, title: str) -> Table:
    made = Table(title=title, title_justify="left")
    made.add_column("median (lowest-highest) x ratio to ours")
    for proxy in results.proxies:
        made.add_column(proxy, justify="right")
    for figure in results.figures:
        made.add_row(figure, *(results.cell(figure, proxy) for proxy in results.proxies))
    return made


def markdown(results: Results) -> str:
    rows = [
        "| | " + " | ".join(results.proxies) + " |",
        "| --- |" + " ---: |" * len(results.proxies),
    ]
    for figure in results.figures:
        cells = (results.cell(figure, proxy) for proxy in results.proxies)
        rows.append(f"| {figure} | " + " | ".join(cells) + " |")
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
