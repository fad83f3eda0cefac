"""Command replay: recompute a run from its record, or rerun the loop against it."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwright.cli.options import Command, add_command
from turnwright.cli.trust import add_trust, confirm_run
from turnwright.errors import UsageError

if TYPE_CHECKING:
    from turnwright.types import EpisodeKey
    from turnwright_view import ReplayResult
    from turnwright_view.replay.compare import EpisodeDifference

MAX_DIFFERENCES = 20
"""Maximum number of episodes whose difference is printed."""


def add_replay(subparsers: Any) -> None:
    """Register the command."""
    help = "recompute a run from its record, or rerun the loop against it"
    parser = add_command(subparsers, "replay", help, run_replay, overrides=True)
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="a run directory")
    parser.add_argument(
        "--reward",
        metavar="FILE.py:FUNCTION",
        help="a reward function to apply to every finished trajectory",
    )
    parser.add_argument(
        "--loop", action="store_true", help="replay every episode with its sampled replies"
    )
    env = "with --loop: an environment (a name, FILE.py:NAME, or `recipe`), not the recorded one"
    parser.add_argument("--env", metavar="ENV", help=env)
    parser.add_argument(
        "--phase", metavar="NAME", help="with --loop: only this phase (`train`, `gate`, ...)"
    )
    parser.add_argument(
        "--step", metavar="N", type=int, help="with --loop: only this step, as the viewer counts"
    )
    parser.add_argument(
        "--trajectory", metavar="TASK[/N]", help="with --loop: only this task, or its sample N"
    )
    add_trust(parser)


def run_replay(args: argparse.Namespace) -> int:
    """Recompute, compare and print differences; return 1 if there are any."""
    from turnwright.display.text import single_line
    from turnwright.envs.resolve import load_object

    if not args.run_dir.is_dir():
        raise UsageError(f"{args.run_dir}: no such run directory")
    for name in ("env", "phase", "step", "trajectory"):
        if not args.loop and vars(args)[name] is not None:
            raise UsageError(f"--{name} needs --loop; add it")
    if args.overrides and not args.loop:
        raise UsageError(f"{args.overrides[0]} needs --loop; add it")

    reward = load_object(args.reward) if args.reward else None
    if reward is not None and not callable(reward):
        raise UsageError(
            f"--reward {args.reward}: must be a function of a trajectory, not "
            f"{type(reward).__name__}"
        )

    ok, lines = (_loop if args.loop else _record)(args, reward)
    for line in lines:
        print(single_line(line, 1000))
    return 0 if ok else 1


def _record(args: argparse.Namespace, reward: Any) -> tuple[bool, list[str]]:
    """Recompute the run from its record; return whether it matches, and what to print."""
    from turnwright_view.recompute import lines, recompute

    found = recompute(args.run_dir, reward)
    return found.ok, [*lines(found), *(["masks and metrics match the record"] if found.ok else [])]


def _loop(args: argparse.Namespace, reward: Any) -> tuple[bool, Iterator[str]]:
    """Rerun the loop against the record; return whether it matches, and what to print."""
    from turnwright.config.dump import load_run_config
    from turnwright_view.replay.runs import replay_run

    if (args.run_dir / "config.json").is_file():
        config = load_run_config(args.run_dir).config
        used = ("rollout.history",) if args.env is None and config.rollout.function is None else ()
        confirm_run(args.run_dir, config, args, only=used)

    def selected(key: EpisodeKey) -> bool:
        names = (None, key.task, f"{key.task}/{key.sample}")
        return (
            args.trajectory in names
            and args.phase in (None, key.phase)
            and args.step in (None, key.metrics_step)
        )

    found = replay_run(
        args.run_dir, env=args.env, overrides=args.overrides, reward=reward, only=selected
    )
    return found.ok, _differences(found)


def _differences(found: ReplayResult) -> Iterator[str]:
    """Yield the first difference of each episode, then totals."""
    first: dict[EpisodeKey, EpisodeDifference] = {}
    for one in found.differences:
        first.setdefault(one.key, one)
    for key, one in islice(first.items(), MAX_DIFFERENCES):
        where = f" at {one.where}" if one.where else ""
        yield (f"{key.label}: differs in {one.what}{where}")
        yield f"    recorded  {one.recorded}"
        yield f"    now       {one.now}"

    if len(first) > MAX_DIFFERENCES:
        yield f"... and {len(first) - MAX_DIFFERENCES} more"
    for reason, count in found.left_out.most_common():
        yield f"skipped {count}: {reason}"

    if not found.episodes:
        yield "no episode was replayed"
    elif not first:
        yield f"{found.episodes} episodes replayed, all match the record"
    else:
        kinds = Counter(one.what for one in first.values())
        totals = ", ".join(f"{count} in {what}" for what, count in kinds.most_common())
        yield f"{found.episodes} episodes replayed, {len(first)} differ: {totals}"


REPLAY = Command(add_replay)
