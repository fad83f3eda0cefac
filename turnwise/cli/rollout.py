"""`turnwise rollout`: play a few tasks and look at the trajectories."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from turnwise.cli.evaluate import _positive
from turnwise.cli.options import add_command, add_display, add_recipe, dry_run, handled_early, resolve


def add_rollout(subparsers: Any) -> None:
    """Register the command."""
    parser = add_command(subparsers, "rollout", "play a few tasks and print the trajectories", run_rollout, overrides=True)
    add_recipe(parser)
    parser.add_argument("-n", "--tasks", type=_positive, default=4, metavar="N", help="tasks to play (4)")
    parser.add_argument("--save", metavar="FILE", type=Path, help="also write the trajectories there, one JSON object a line")
    parser.add_argument("--quiet", action="store_true", help="print one line per trajectory")
    add_display(parser)


def run_rollout(args: argparse.Namespace) -> int:
    """Play and print."""
    if handled_early(args):
        return 0
    resolved = resolve(args, training=False)
    if args.dry_run:
        return dry_run(resolved)
    from turnwise import verbs
    from turnwise.view.display import make_display

    watch = make_display(args.display)
    try:
        trajectories = verbs.preview_rollouts(resolved, n=args.tasks, out=args.save, watch=watch)
    finally:
        watch.close()
    for line in trajectory_lines(trajectories, short=args.quiet):
        print(line)
    if args.save is not None:
        print(f"written to {args.save}")
    return 0


def trajectory_lines(trajectories: Iterable[Any], *, short: bool = False) -> Iterable[str]:
    """Trajectories as text: a head line each, then its conversation."""
    from turnwise.view.text import single_line

    for trajectory in trajectories:
        reward = "not computed" if trajectory.reward is None else f"{trajectory.reward:g}"
        stop = str(trajectory.stop or "running")
        size = f"{len(trajectory.turns)} turns  {trajectory.sampled_tokens} tokens"
        yield single_line(f"task {trajectory.task.id}  reward {reward}  {size}  {stop}")
        if trajectory.error is not None:
            error = trajectory.error
            yield single_line(f"  {error.type} in {error.phase}: {error.message}")
        if short:
            continue
        for who, text in conversation_text(trajectory):
            for index, line in enumerate(text.splitlines() or [""]):
                yield single_line(f"  {who if index == 0 else '':>9} | {line}")
        yield ""


def conversation_text(trajectory: Any) -> Iterable[tuple[str, str]]:
    """Who said what in the conversation of the last turn; what the world wrote inside a reply is `inserted`."""
    for number in trajectory.turn_chain(len(trajectory.turns) - 1):
        turn = trajectory.turns[number]
        if turn.inserted is not None:
            had = sum(len(trajectory.spans[index].ids) for index in trajectory.turns[turn.parent].spans)
            cut = f"[{turn.kept} of {had} tokens kept] " if turn.kept < had else ""
            yield "inserted", f"{cut}{turn.inserted}"
        for message in (*turn.messages, turn.reply):
            calls = "".join(f" {call.name}({dict(call.arguments)})" for call in message.tool_calls)
            yield message.role, message.text + calls
