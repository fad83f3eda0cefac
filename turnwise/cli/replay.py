"""`turnwise replay`: compute a run anew from its record, or run the loop again against what it recorded."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise.cli.options import add_command
from turnwise.errors import UsageError

if TYPE_CHECKING:
    from turnwise.rollout import ReplayResult
    from turnwise.types import EpisodeKey

SHOWN = 20
"""Differences that are printed."""


def add_replay(subparsers: Any) -> None:
    """Register the command."""
    parser = add_command(
        subparsers, "replay", "compute a run anew from its record, or run the loop again against it", run_replay, overrides=True
    )
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="a run directory")
    parser.add_argument(
        "--reward", metavar="FILE.py:FUNCTION", help="a reward function of a finished trajectory, to try on all"
    )
    parser.add_argument("--loop", action="store_true", help="play every episode again against what its engine sampled")
    parser.add_argument(
        "--env", metavar="ENV", help="with --loop: an environment (a name, FILE.py:NAME, or `recipe`), not the recorded world"
    )
    parser.add_argument("--phase", metavar="NAME", help="with --loop: only this phase (`train`, `gate`, ...)")
    parser.add_argument("--step", metavar="N", type=int, help="with --loop: only this step")
    parser.add_argument("--trajectory", metavar="TASK[/N]", help="with --loop: only this task, or its sample N")


def run_replay(args: argparse.Namespace) -> int:
    """Compute, compare, and say what differs; status 1 where anything does."""
    if not args.run_dir.is_dir():
        raise UsageError(f"{args.run_dir}: no such run directory")
    if args.loop:
        return _loop(args)
    for name in ("env", "phase", "step", "trajectory"):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name} is for running the loop again: add --loop")
    if args.overrides:
        raise UsageError(f"{args.overrides[0]} is for running the loop again: add --loop")
    return _record(args)


def _record(args: argparse.Namespace) -> int:
    from turnwise.view.replay import lines, recompute, success_of
    from turnwise.view.rundir import read_run
    from turnwise.view.text import single_line

    found = recompute(args.run_dir, _reward(args), success=success_of(read_run(args.run_dir).config))
    for line in lines(found):
        print(single_line(line, 1000))
    if found.ok:
        print("masks and figures are those of the record")
    return 0 if found.ok else 1


def _loop(args: argparse.Namespace) -> int:
    from turnwise.train.again import replay_run
    from turnwise.view.text import single_line

    found = replay_run(args.run_dir, env=args.env, overrides=args.overrides, reward=_reward(args), only=_only(args))
    for line in lines(found):
        print(single_line(line, 1000))
    return 0 if found.ok else 1


def _reward(args: argparse.Namespace) -> Any:
    from turnwise.env.resolve import load_object

    reward = load_object(args.reward) if args.reward else None
    if reward is not None and not callable(reward):
        raise UsageError(f"--reward {args.reward}: is {type(reward).__name__}, not a function of a trajectory")
    return reward


def _only(args: argparse.Namespace) -> Any:
    wanted = args.trajectory

    def chosen(key: EpisodeKey) -> bool:
        named = wanted is None or wanted in (key.task, f"{key.task}/{key.sample}")
        return named and args.phase in (None, key.phase) and args.step in (None, key.step)

    return chosen


def lines(found: ReplayResult) -> Iterator[str]:
    """What running the loop again came to: a line for the first difference of each episode, then the sums."""
    first = {one.key: one for one in reversed(found.differences)}
    for key in list(dict.fromkeys(one.key for one in found.differences))[:SHOWN]:
        one = first[key]
        where = f" at {one.where}" if one.where else ""
        yield f"{key.phase} {key.step} / {key.task} / {key.sample}: differs in {one.what}{where}"
        yield f"    recorded  {one.recorded}"
        yield f"    now       {one.now}"
    if len(first) > SHOWN:
        yield f"... and {len(first) - SHOWN} more"
    for why, count in found.left_out.most_common():
        yield f"{count} left out: {why}"
    if not found.episodes:
        yield "no episode was played again"
    elif not first:
        yield f"{found.episodes} episodes played again, all as recorded"
    else:
        kinds: dict[str, int] = {}
        for one in first.values():
            kinds[one.what] = kinds.get(one.what, 0) + 1
        told = ", ".join(f"{count} in {what}" for what, count in sorted(kinds.items(), key=lambda pair: -pair[1]))
        yield f"{found.episodes} episodes played again, {len(first)} differ: {told}"
