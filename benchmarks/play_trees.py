"""Play the examples of other systems' trees, unedited, and print a table: runs, refused by
name, does not run and why.

    python benchmarks/play_trees.py TREES [--only slime,trl] [--verbose] [--markdown FILE]

`TREES` has a checkout of each system under its name: slime, miles, skyrl, verl, swift, trl. What is
user code there is found by its form (`candidates` of each `play_<system>.py` beside this file), so
an example that nobody listed shows up as `unlisted`. What is listed says how it is played: rows in
the system's own format, scripted replies of a model (the loop is tested, not a model), answers of
the services that it calls, and what must come out. `does not run` needs a reason that is not ours:
a GPU, a service whose answers cannot be written by hand, a package that cannot be installed.

A played example is right if the episode ends without an error, its replies are recorded, and
`check` of its entry holds: the reward and the text of the context that the system's own code
computes for these replies.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import turnwright as tw
from turnwright.config.schema import EnvConfig
from turnwright.envs.resolve import resolve_env
from turnwright.errors import ConfigError, TurnwrightError

MOST_TASKS = 4
"""Rows that are played of an example that brings its own."""
SYSTEMS = ("slime", "miles", "skyrl", "verl", "swift", "trl")


@dataclass(frozen=True)
class Example:
    """One example, and how it is played."""

    use: str
    """`file.py:Name` below the tree, or an id such as `skyrl:gsm8k`."""
    rows: Sequence[Mapping[str, Any]]
    """Rows in the system's format."""
    replies: Any
    """Replies of each episode in order, or a function `(messages, rng) -> reply`."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """`[env.args]`."""
    check: Callable[[Sequence[tw.Trajectory]], bool] | None = None
    """Whether the episodes are what the system's own code makes of these replies."""
    reward: float | None = None
    """Reward of every episode, where `check` would say only that."""
    services: Callable[[], Any] | None = None
    """Context manager that answers what the example asks of a service, or replaces a module
    that is not installed."""
    renderer: Callable[[], Any] | None = None
    """Renderer of a vision-language model, or of another template."""
    limits: Mapping[str, Any] = field(default_factory=dict)
    faithful: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] | Callable[[Path], Mapping[str, str]] = field(default_factory=dict)
    """Further files, below the copy of the tree: data that a preparation script would have made.

    Or a function of the tree.
    """
    samples: int = 1
    names: tuple[str, ...] = ()
    """Further candidates that this example plays: its reward, its tools."""


@dataclass(frozen=True)
class Skip:
    """One example that is not played."""

    use: str
    why: str
    """What it needs that is not here."""
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """What became of an example."""

    system: str
    use: str
    kind: str
    """`runs`, `wrong`, `crashes`, `refused`, `does not run`, `unlisted`."""
    note: str = ""


def play(example: Example, tree: Path) -> Result:
    """Play an example on a copy of its tree."""
    system = tree.name
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / system
        _place(tree, home, example.files(tree) if callable(example.files) else example.files)
        rows = Path(folder) / "rows.jsonl"
        rows.write_text("".join(json.dumps(row) + "\n" for row in example.rows))
        services = example.services() if example.services is not None else contextlib.nullcontext()
        try:
            with (
                open(os.devnull, "w") as sink,
                contextlib.redirect_stdout(sink),
                contextlib.redirect_stderr(sink),
                services,
            ):
                found = _rollout(example, home, rows)
        except ConfigError as error:
            return Result(system, example.use, "refused", str(error))
        except TurnwrightError as error:
            return Result(system, example.use, "refused", f"{type(error).__name__}: {error}")
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            place = traceback.extract_tb(error.__traceback__)[-1]
            return Result(
                system,
                example.use,
                "crashes",
                f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})",
            )
    failed = [one for one in found if one.error is not None]
    if failed:
        error = failed[0].error
        return Result(
            system, example.use, "crashes", f"{error.type}: {error.message} ({error.place})"
        )
    if any(not one.turns for one in found):
        return Result(system, example.use, "wrong", "no reply was recorded")
    if example.reward is not None and any(one.reward != example.reward for one in found):
        return Result(
            system,
            example.use,
            "wrong",
            f"rewards {[one.reward for one in found]}, right is {example.reward}",
        )
    if example.check is not None and not example.check(found):
        return Result(
            system,
            example.use,
            "wrong",
            f"rewards {[one.reward for one in found]}, stops {[str(one.stop) for one in found]}",
        )
    return Result(system, example.use, "runs")


def _rollout(example: Example, home: Path, rows: Path) -> list[tw.Trajectory]:
    config = EnvConfig(
        use=example.use,
        args=dict(example.args),
        tasks=str(rows) if example.rows else None,
        faithful=example.faithful,
        columns=dict(example.columns),
    )
    spec = resolve_env(config, base=home)
    limits = {"turns": 8, "turn_tokens": 4000} | dict(example.limits)
    renderer = example.renderer() if example.renderer is not None else tw.byte_renderer()
    engine = tw.ScriptedEngine(
        example.replies if callable(example.replies) else list(example.replies)
    )
    play = spec.agent_function or spec.factory
    return tw.rollout(
        play,
        spec.tasks("train", 0, 0)[:MOST_TASKS],
        engine,
        samples=example.samples,
        renderer=renderer,
        limits=tw.Limits(**limits),
    )


def _place(tree: Path, home: Path, files: Mapping[str, str]) -> None:
    """Make the tree available under `home`; a copy if files are added to it."""
    if not files:
        home.symlink_to(tree)
        return
    shutil.copytree(tree, home, symlinks=True)
    for name, text in files.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def results(system: str, trees: Path) -> Iterable[Result]:
    """Play what is listed for a system, and name what is not."""
    tree = trees / system
    listed = importlib.import_module(f"play_{system}")
    known: set[str] = set()
    for entry in listed.EXAMPLES:
        known |= {entry.use, *entry.names}
        if isinstance(entry, Skip):
            yield Result(system, entry.use, "does not run", entry.why)
        else:
            yield play(entry, tree)
    for candidate in listed.candidates(tree):
        if candidate not in known:
            yield Result(system, candidate, "unlisted")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trees", type=Path)
    parser.add_argument("--only", default=",".join(SYSTEMS))
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--markdown", type=Path)
    given = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    # The lists below have the classes of this file.
    sys.modules["play_trees"] = sys.modules["__main__"]

    found: list[Result] = []
    for system in given.only.split(","):
        for result in results(system, given.trees.resolve()):
            found.append(result)
            if given.verbose or result.kind not in ("runs", "does not run"):
                print(
                    f"{result.system:6} {result.kind:12} {result.use}  {result.note}",
                    file=sys.stderr,
                )

    lines = [
        "| system | runs | wrong | crashes | refused | does not run | unlisted | runs of those "
        "that could |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for system in given.only.split(","):
        counts = Counter(result.kind for result in found if result.system == system)
        could = sum(counts.values()) - counts["does not run"]
        share = f"{counts['runs'] / could:.0%}" if could else "-"
        kinds = ("runs", "wrong", "crashes", "refused", "does not run", "unlisted")
        lines.append(
            f"| {system} | " + " | ".join(str(counts[kind]) for kind in kinds) + f" | {share} |"
        )
    print("\n".join(lines))
    if given.markdown is not None:
        rows = [f"| {one.system} | `{one.use}` | {one.kind} | {one.note} |" for one in found]
        given.markdown.write_text(
            "\n".join(["| system | example | result | why |", "|---|---|---|---|", *rows]) + "\n"
        )

    counts = Counter(result.kind for result in found)
    could = sum(counts.values()) - counts["does not run"]
    print(
        json.dumps(
            {
                "examples": len(found),
                **dict(sorted(counts.items())),
                "share": round(counts["runs"] / max(could, 1), 3),
            }
        )
    )
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
