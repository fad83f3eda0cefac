"""Tables of what `credit.py` measured: speed, truth and controls, and the summary of its last
line."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from credit_worlds import WORLDS
from rows import interval, markdown

REFERENCE = "grpo"
"""Method that the others are compared with."""
TRUTH = "truth"
"""Method that gets the true advantages, and is not compared."""


def ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value, equal ones their mean rank."""
    ordered = sorted(values)
    found = []
    for value in values:
        first = ordered.index(value)
        found.append(first + (ordered.count(value) - 1) / 2)
    return found


def spearman(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Return the rank correlation; None where there is none."""
    try:
        return statistics.correlation(ranks(left), ranks(right))
    except statistics.StatisticsError:
        return None


@dataclass
class Results:
    """The rows of a folder."""

    cells: list[dict[str, Any]]
    measured: dict[tuple[str, str], list[dict[str, Any]]]
    """Figures on each common policy, by world and method."""
    order: Sequence[str]
    """Of the methods in tables."""

    @classmethod
    def read(cls, out: Path, order: Sequence[str]) -> Results:
        """Read all rows of trainings in the bench's worlds, and of measurements."""
        cells = [json.loads(path.read_text()) for path in sorted((out / "cells").glob("*.json"))]
        rows = [json.loads(path.read_text()) for path in sorted((out / "truth").glob("*.json"))]
        measured = {(row["world"], row["method"]): row["policies"] for row in rows}
        return cls([row for row in cells if row["world"] in WORLDS], measured, order)

    def of(self, method: str, world: str, *, shuffled: bool = False) -> list[dict[str, Any]]:
        """Return the cells of a method in a world, by seed."""
        rows = []
        for row in self.cells:
            if (row["method"], row["world"], row["shuffled"]) == (method, world, shuffled):
                rows.append(row)
        return sorted(rows, key=lambda row: row["seed"])

    @property
    def methods(self) -> list[str]:
        """Methods with a cell or a measurement, in the order of the table."""
        found = {row["method"] for row in self.cells} | {method for _, method in self.measured}
        return [method for method in self.order if method in found]

    @property
    def long_worlds(self) -> list[str]:
        """Those of eight or more turns."""
        return [world for world in self.worlds if WORLDS[world].turns >= 8]

    @property
    def worlds(self) -> list[str]:
        """Worlds with a cell or a measurement."""
        found = {row["world"] for row in self.cells} | {world for world, _ in self.measured}
        return [world for world in WORLDS if world in found]

    def episodes(self, method: str, world: str) -> float | None:
        """Return the mean number of episodes to the goal; those of a seed that did not reach it are
        all that it had."""
        rows = self.of(method, world)
        return statistics.fmean(row["episodes"] for row in rows) if rows else None

    def ratios(self, method: str, worlds: Sequence[str]) -> list[float]:
        """Return, for each seed, the mean logarithm over worlds of a method's episodes over those
        of GRPO; for seeds that both have everywhere."""
        by_seed: dict[int, list[float]] = {}
        for world in worlds:
            references = {row["seed"]: row for row in self.of(REFERENCE, world)}
            for row in self.of(method, world):
                reference = references.get(row["seed"])
                if reference is not None:
                    ratio = math.log(row["episodes"] / reference["episodes"])
                    by_seed.setdefault(row["seed"], []).append(ratio)
        complete = [logs for logs in by_seed.values() if len(logs) == len(worlds)]
        return [statistics.fmean(logs) for logs in complete]

    def figure(self, method: str, world: str, name: str) -> float | None:
        """Return the mean of a figure over the common policies."""
        policies = self.measured.get((world, method))
        return statistics.fmean(policy[name] for policy in policies) if policies else None

    def on_the_way(self, method: str, world: str, name: str) -> float | None:
        """Return the mean of a figure over a method's own policies, while it learned."""
        values = []
        for row in self.of(method, world):
            values += [point[name] for point in row["curve"] if name in point]
        return statistics.fmean(values) if values else None

    def spearman_of(self, world: str, figure: str) -> float | None:
        """Return the rank correlation of a figure and speed over the methods of a world."""
        figures, speeds = [], []
        for method in self.methods:
            value, episodes = self.figure(method, world, figure), self.episodes(method, world)
            if method != TRUTH and value is not None and episodes is not None:
                figures.append(value)
                speeds.append(-episodes)
        return spearman(figures, speeds) if len(figures) > 2 else None


def speed_cell(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the episodes of a method in a world."""
    if not rows:
        return "-"
    episodes = [row["episodes"] for row in rows]
    unreached = [row for row in rows if row["episodes_to_90"] is None]
    mean = statistics.fmean(episodes)
    text = f"{mean:,.0f}"
    if len(rows) > 2:
        text += f" ± {interval(episodes):,.0f}"
    if unreached:
        level = statistics.fmean(row["level"] for row in unreached)
        text = f"≥ {text} ({len(rows) - len(unreached)} of {len(rows)}, else {level:.2f})"
    return text


def ratio_cell(logs: Sequence[float]) -> str:
    """Return the text of the geometric mean of ratios, given by their logarithms."""
    if not logs:
        return "-"
    ratio = math.exp(statistics.fmean(logs))
    if len(logs) < 3:
        return f"{ratio:.2f}"
    factor = math.exp(interval(logs))
    return f"{ratio:.2f} [{ratio / factor:.2f}, {ratio * factor:.2f}]"


def mean_cell(values: Sequence[float | None]) -> str:
    """Return the text of the mean of what is known."""
    known = [value for value in values if value is not None]
    return f"{statistics.fmean(known):.3f}" if known else "-"


FIGURES = (
    "correlation",
    "cosine",
    "cosine_expected",
    "explained",
    "shift",
    "bias",
    "noise",
)


def print_tables(results: Results) -> None:
    """Print markdown of speed, truth and controls, and the summary as JSON."""
    methods, worlds = results.methods, results.worlds

    rows = []
    for method in methods:
        cells = [speed_cell(results.of(method, world)) for world in worlds]
        for compared in (worlds, results.long_worlds):
            cells.append(ratio_cell(results.ratios(method, compared)))
        rows.append([f"`{method}`", *cells])
    print("Episodes to 90%, mean over seeds with 95% interval:\n")
    ratio_headers = [f"times `{REFERENCE}`", "of 8 turns or more"]
    print(markdown(["method", *worlds, *ratio_headers], rows))

    rows = []
    for method in methods:
        cells = []
        for figure in FIGURES:
            cells.append(mean_cell([results.figure(method, world, figure) for world in worlds]))
        for figure in ("correlation", "cosine"):
            cells.append(mean_cell([results.on_the_way(method, world, figure) for world in worlds]))
        rows.append([f"`{method}`", *cells])
    print("\nOn common policies, mean over policies and worlds, and on a method's own policies:\n")
    print(markdown(["method", *FIGURES, "own correlation", "own cosine"], rows))

    rows = []
    for method in methods:
        cells = [mean_cell([results.figure(method, world, "cosine")]) for world in worlds]
        rows.append([f"`{method}`", *cells])
    print("\nCosine of a batch's gradient with the true one, mean over common policies:\n")
    print(markdown(["method", *worlds], rows))

    rows = []
    for method in methods:
        cells = []
        for world in worlds:
            levels = [row["level"] for row in results.of(method, world, shuffled=True)]
            cells.append(f"{statistics.fmean(levels):.2f}" if levels else "-")
        if set(cells) != {"-"}:
            rows.append([f"`{method}`", *cells])
    if rows:
        print("\nLevel after training with shuffled rewards:\n")
        print(markdown(["method", *worlds], rows))
    print()
    print(json.dumps(summary_of(results)))


def rounded(value: float | None) -> float | None:
    """Return a figure with four digits after the point; exact integers stay."""
    return value if value is None or isinstance(value, int) else round(value, 4)


def best_of(results: Results, worlds: Sequence[str]) -> tuple[str | None, float | None]:
    """Return the method with the least mean ratio of its episodes to those of GRPO, and that
    ratio."""
    ratios = {}
    for method in results.methods:
        logs = results.ratios(method, worlds)
        if logs and method not in (TRUTH, REFERENCE):
            ratios[method] = math.exp(statistics.fmean(logs))
    best = min(ratios, key=ratios.__getitem__, default=None)
    return best, None if best is None else round(ratios[best], 4)


def summary_of(results: Results) -> dict[str, Any]:
    """Return the summary."""
    table: dict[str, dict[str, Any]] = {}
    for method in results.methods:
        table[method] = {}
        for world in results.worlds:
            rows = results.of(method, world)
            episodes = [row["episodes"] for row in rows]
            entry: dict[str, float | None] = {
                "seeds": len(rows),
                "reached": sum(row["episodes_to_90"] is not None for row in rows),
                "episodes": results.episodes(method, world),
                "interval": interval(episodes) if rows else None,
                "cpu_s": statistics.fmean(row["cpu_s"] for row in rows) if rows else None,
            }
            for figure in FIGURES:
                entry[figure] = results.figure(method, world, figure)
            for figure in ("correlation", "cosine"):
                entry[f"own_{figure}"] = results.on_the_way(method, world, figure)
            table[method][world] = {name: rounded(value) for name, value in entry.items()}

    best, best_ratio = best_of(results, results.worlds)
    best_long, best_long_ratio = best_of(results, results.long_worlds)
    by_world = {world: results.spearman_of(world, "cosine") for world in results.worlds}
    known = [value for value in by_world.values() if value is not None]
    controls = [row for row in results.cells if row["shuffled"]]
    return {
        "methods": results.methods,
        "worlds": results.worlds,
        "table": table,
        "best": best,
        "best_vs_grpo_episodes": best_ratio,
        "best_long": best_long,
        "best_vs_grpo_episodes_long": best_long_ratio,
        "spearman_truth_speed": statistics.fmean(known) if known else None,
        "spearman_by_world": by_world,
        "control_level_max": max((row["level"] for row in controls), default=None),
    }
