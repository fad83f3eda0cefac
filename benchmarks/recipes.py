"""Five steps of the recipes that come with Turnwright, end to end: do all their parts meet,
and how long does it take?

    python benchmarks/recipes.py [NAME ...]

A recipe whose environment cannot run here (a missing extra, no sandbox) is named with the reason.
The exit status is 1 when one that can run does not come to its end.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
import time
from pathlib import Path

RECIPES = Path(__file__).parents[1] / "recipes"
NAMES = ("search", "code", "frozen_lake", "hinted_math")


def main() -> int:
    """Run them and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", default=NAMES, metavar="NAME", help=f"of {', '.join(NAMES)}"
    )
    print("| recipe | steps | episodes | sampled tokens | failed episodes | wall |")
    print("|---|---|---|---|---|---|")
    return max(play(name) for name in parser.parse_args().names)


def play(name: str) -> int:
    """Run five steps of one recipe, and print its row."""
    from turnwright.cli.main import main as turnwright

    if (lacking := missing(name)) is not None:
        print(f"| {name} | 0 | cannot run here: {lacking} | | | |")
        return 0
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        began = time.monotonic()
        out = Path(folder) / "run"
        words = [
            "train",
            str(RECIPES / f"{name}.toml"),
            "--train.steps",
            "5",
            "--out",
            str(out),
            "--display",
            "none",
        ]
        status = turnwright(words)
        wall = time.monotonic() - began
        steps = (
            [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
            if status == 0
            else []
        )
        rows = (
            [json.loads(line) for line in (out / "trajectories.jsonl").read_text().splitlines()]
            if status == 0
            else []
        )
    trained = [row for row in rows if row["key"]["phase"] == "train"]
    tokens = sum(
        len(span["ids"]) for row in trained for span in row["spans"] if span["origin"] == "model"
    )
    failed = sum(row.get("error") is not None for row in trained)
    count = len({row["step"] for row in steps if row.get("phase") == "train"})
    print(f"| {name} | {count} | {len(trained)} | {tokens:,} | {failed} | {wall:.0f} s |")
    return int(status != 0 or count < 5)


def missing(name: str) -> str | None:
    """What this machine lacks for a recipe."""
    from importlib.util import find_spec

    from turnwright.envs.isolation.sandbox import sandbox_problem

    package = {"search": "bm25s", "frozen_lake": "gymnasium"}.get(name)
    if package is not None and find_spec(package) is None:
        return f"no {package}"
    return sandbox_problem() if name == "code" else None


if __name__ == "__main__":
    sys.exit(main())
