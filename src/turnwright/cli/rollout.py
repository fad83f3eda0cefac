"""Command rollout: play a few held-out tasks and print what happened.

`preview_rollouts` plays them with the configured model, as an evaluation of a run does
(`turnwright.training.configured_rollout`), and writes them if asked; `trajectory_lines` is what is
printed. Nothing is trained.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwright.cli.options import (
    Command,
    add_command,
    add_display,
    add_recipe,
    display_of,
    import_training,
    positive,
    requested,
    resolve,
)
from turnwright.errors import TraceError

if TYPE_CHECKING:
    from turnwright.config import ResolvedConfig
    from turnwright.records import ProgressListener
    from turnwright.records.serialization import IdDecoder
    from turnwright.types import Trajectory


def add_rollout(subparsers: Any) -> None:
    """Register the command."""
    parser = add_command(
        subparsers,
        "rollout",
        "play a few tasks and print the trajectories",
        run_rollout,
        overrides=True,
    )
    add_recipe(parser)

    parser.add_argument(
        "-n", "--tasks", type=positive, default=4, metavar="N", help="tasks to play (default: 4)"
    )
    save = "also write the trajectories to this file, one JSON object per line"
    parser.add_argument("--save", metavar="FILE", type=Path, help=save)
    add_display(parser, quiet="show no progress, and print one line per trajectory")


def run_rollout(args: argparse.Namespace) -> int:
    """Play tasks and print their trajectories."""
    resolved = requested(args, partial(resolve, training=False))
    if resolved is None:
        return 0

    from turnwright.display.progress import make_display

    import_training()
    with closing(make_display(display_of(args))) as watch:
        trajectories = preview_rollouts(resolved, n=args.tasks, out=args.save, watch=watch)

    for line in trajectory_lines(trajectories, short=args.quiet):
        print(line)
    if args.save is not None:
        print(f"wrote {args.save}")
    return 0


def preview_rollouts(
    resolved: ResolvedConfig,
    *,
    n: int = 4,
    out: Path | None = None,
    watch: ProgressListener | None = None,
) -> list[Trajectory]:
    """Play `n` held-out tasks with the configured model, and write them to `out`, one a line.

    Tasks for training are played where none are held out. Raises `TraceError` if `out` cannot be
    written.
    """
    from turnwright.records import NullListener
    from turnwright.rollouts.episode_progress import EpisodeProgress
    from turnwright.rollouts.standalone import run_sync
    from turnwright.training.configured_rollout import make_rollout, play_with_retries
    from turnwright.training.task_plan import TaskPlan, make_env_specs

    config = resolved.config
    specs = make_env_specs(config)
    overlap = config.eval.overlap == "allowed"
    plan = TaskPlan(specs, steps=1, groups=n, held_out=n, seed=config.seed, overlap=overlap)
    choices = plan.held_out or plan.train[:n]

    watch = watch or NullListener()
    counted = EpisodeProgress(watch)
    rollout = make_rollout(resolved, specs, None, "local", watch.note, on_finished=counted.finished)
    counted.begin("roll out", len(choices))
    episodes = [episode for choice in choices for episode in choice.episodes("rollout", 0, 1)]

    async def play() -> list[Trajectory]:
        try:
            return await play_with_retries(
                rollout, episodes, max_retries=config.rollout.max_retries
            )
        finally:
            await rollout.engine.close()

    # Code of an environment may change the working directory.
    out = None if out is None else out.absolute()
    trajectories = run_sync(play())
    if out is not None:
        _write_trajectories(out, trajectories, rollout.renderer)
    return trajectories


def _write_trajectories(out: Path, trajectories: list[Trajectory], decoder: IdDecoder) -> None:
    """Write one JSON object a line; raise `TraceError` if the file cannot be written."""
    from turnwright.records import to_json, trajectory_row

    rows = [to_json(trajectory_row(trajectory, decoder)) for trajectory in trajectories]
    try:
        out.write_bytes(b"".join(row + b"\n" for row in rows))
    except OSError as error:
        raise TraceError(f"{out}: cannot be written ({error.strerror})") from error


def trajectory_lines(trajectories: Iterable[Trajectory], *, short: bool = False) -> Iterable[str]:
    """Yield each trajectory as text: a head line, then its failure and its conversation.

    With `short`, only the head line and the failure, if there is one.
    """
    from turnwright.display.text import single_line

    for trajectory in trajectories:
        lines = [*trajectory.describe(), ""]
        if short:
            kept = 1 if trajectory.error is None else 2
            lines = lines[:kept]
        for line in lines:
            yield single_line(line)


COMMAND = Command(add_rollout)
