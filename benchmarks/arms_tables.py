"""The table and the verdicts of arms that are compared by success."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from arms import Arm, Mean, World, held_out, percent, rows_of, trained_success
from credit_tables import markdown


def compare(
    worlds: Sequence[World],
    arms: Sequence[Arm],
    claims: Sequence[tuple[str, str]],
    out: Path,
) -> dict[str, Any]:
    """Print success of each arm in each world, and return the verdict on each claim, which is that
    the first arm is better than the second."""
    rows = rows_of(worlds, arms, out)
    lines = []
    for world in worlds:
        for arm in arms:
            of_arm = [row for _, row in sorted(rows.of(world.name, arm.name).items())]
            if of_arm:
                lines.append([
                    world.name,
                    f"`{arm.name}`",
                    percent([row["before"] for row in of_arm]),
                    percent([held_out(row) for row in of_arm]),
                    percent([trained_success(row) for row in of_arm]),
                    ", ".join(f"{row['cpu_s']:.0f}" for row in of_arm),
                ])  # fmt: skip
    header = ["world", "arm", "before, % by seed", "after", "mean of all steps", "CPU s"]
    print(markdown(header, lines))

    verdicts = {}
    lines = []
    for left, right in claims:
        for world in worlds:
            differences = rows.pairs(world.name, left, right, held_out)
            if not differences:
                continue
            after = Mean.of(differences)
            on_the_way = Mean.of(rows.pairs(world.name, left, right, trained_success))
            claim = f"{left} over {right}"
            verdicts.setdefault(claim, {})[world.name] = {
                "seeds": after.seeds,
                "after": round(after.mean, 4),
                "interval": after.interval,
                "verdict": after.verdict,
                "all_steps": round(on_the_way.mean, 4),
                "all_steps_verdict": on_the_way.verdict,
            }
            lines.append([
                f"`{left}` over `{right}`", world.name, str(after.seeds), str(after),
                after.verdict, str(on_the_way), on_the_way.verdict,
            ])  # fmt: skip
    print()
    header = ["claim", "world", "seeds", "after, points", "", "mean of all steps, points", ""]
    print(markdown(header, lines))
    print()
    return verdicts
