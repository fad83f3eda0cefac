"""Tables of arms, and the verdicts of those that are compared by success."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from arms import (
    Arm,
    Mean,
    Rows,
    World,
    arguments,
    held_out,
    play_grid,
    rows_of,
    trained_success,
)
from rows import markdown

Column = Callable[[Mapping[str, Any]], str]
"""Text of one run in a table."""


def percent(figure: Callable[[Mapping[str, Any]], float]) -> Column:
    """Return the column of a share."""
    return lambda row: f"{100 * figure(row):.1f}"


def before(row: Mapping[str, Any]) -> float:
    """Return held-out success before the first step."""
    return float(row["before"])


def cpu(row: Mapping[str, Any]) -> str:
    """Return the seconds of CPU of a run."""
    return f"{row['cpu_s']:.0f}"


def print_arms(
    rows: Rows, worlds: Sequence[World], arms: Sequence[Arm], columns: Mapping[str, Column]
) -> None:
    """Print a line for each world and arm, with a text of every seed in each column."""
    lines = []
    for world in worlds:
        for arm in arms:
            of_arm = rows.by_seed(world.name, arm.name)
            if of_arm:
                cells = [", ".join(map(column, of_arm)) for column in columns.values()]
                lines.append([f"`{world.name}`", f"`{arm.name}`", *cells])
    print("Figures of each seed:\n")
    print(markdown(["world", "arm", *columns], lines))
    print()


def compare(
    description: str | None,
    worlds: Sequence[World],
    arms: Sequence[Arm],
    claims: Sequence[tuple[str, str]],
) -> int:
    """Play arms by the arguments of the command, and print their success and the verdict on each
    claim, which is that the first arm is better than the second; return how many runs failed."""
    args = arguments(description)
    failed = play_grid(worlds, arms, args)
    rows = rows_of(worlds, arms, args.out)

    columns = {
        "before, %": percent(before),
        "after, %": percent(held_out),
        "mean of all steps, %": percent(trained_success),
        "CPU s": cpu,
    }
    print_arms(rows, worlds, arms, columns)
    print(json.dumps(verdicts(rows, worlds, claims)))
    return failed


def verdicts(
    rows: Rows, worlds: Sequence[World], claims: Sequence[tuple[str, str]]
) -> dict[str, dict[str, Any]]:
    """Print and return what the seeds say of each claim, by claim and world."""
    lines = []
    found: dict[str, dict[str, Any]] = {}
    for left, right in claims:
        claim = f"{left} over {right}"
        for world in worlds:
            differences = rows.pairs(world.name, left, right, held_out)
            if not differences:
                continue

            after = Mean.of(differences)
            on_the_way = Mean.of(rows.pairs(world.name, left, right, trained_success))
            found.setdefault(claim, {})[world.name] = {
                "seeds": after.seeds,
                "after": round(after.mean, 4),
                "interval": after.interval,
                "verdict": after.verdict,
                "all_steps": round(on_the_way.mean, 4),
                "all_steps_verdict": on_the_way.verdict,
            }
            of_after = [str(after), after.verdict]
            of_all_steps = [str(on_the_way), on_the_way.verdict]
            lines.append([claim, world.name, str(after.seeds), *of_after, *of_all_steps])

    header = ["claim", "world", "seeds", "after, points", "", "mean of all steps, points", ""]
    print(markdown(header, lines))
    print()
    return found
