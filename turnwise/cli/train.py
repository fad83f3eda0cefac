"""`turnwise train`: train what a recipe describes, or go on with a run that was stopped."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from turnwise.cli.options import add_display, add_recipe, add_verb, dry_run, handled_early, resolve
from turnwise.errors import UsageError

NAME = "train"


def add(subparsers: Any) -> None:
    """Register the verb."""
    parser = add_verb(subparsers, NAME, "train an agent by a recipe", run, overrides=True)
    add_recipe(parser)
    parser.add_argument("--out", metavar="DIR", help="run directory")
    parser.add_argument("--resume", metavar="RUN", type=Path, help="go on with this run, with the settings that it has")
    add_display(parser)


def run(args: argparse.Namespace) -> int:
    """Train, or print the settings."""
    if handled_early(args):
        return 0
    resolved = _resumed(args) if args.resume is not None else resolve(args, training=True)
    if args.dry_run:
        return dry_run(resolved)
    from turnwise import verbs
    from turnwise.view.display import make_display

    watch = make_display(args.display)
    try:
        verbs.train(resolved, resume=args.resume, watch=watch)
    finally:
        watch.close()
    return 0


def _resumed(args: argparse.Namespace) -> Any:
    from turnwise.config.show import from_run

    changed = [str(word) for word in (args.recipe, *args.overrides) if word is not None]
    changed += [f"--{key} {getattr(args, key)}" for key in ("out", "seed") if getattr(args, key) is not None]
    if changed:
        raise UsageError(f"--resume {args.resume} keeps the run's own settings; leave out {changed[0]}, or start a new run")
    return from_run(args.resume)
