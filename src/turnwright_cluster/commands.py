"""The command `turnwright worker`: join a run and play for it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from turnwright.cli.options import Command, add_command, positive, stopped_by_signals
from turnwright.errors import ConfigError


def add_worker(subparsers: Any) -> None:
    """Register the command."""
    help = "play episodes for a run on another machine or in another process"
    epilog = (
        'The run has scale.listen = "0.0.0.0:7070"; it prints its URL. TURNWRIGHT_WORKER_TOKEN is '
        "the run's token, which is\n"
        "in RUN/worker_token; the same user on the same machine needs none. The environments must "
        "be installed here."
    )
    parser = add_command(subparsers, "worker", help, run_worker, epilog=epilog)
    parser.add_argument("--join", required=True, metavar="URL", help="the URL that the run prints")
    parser.add_argument(
        "--name",
        default="",
        metavar="NAME",
        help="name in the run's messages (default: host and process)",
    )
    parser.add_argument(
        "--groups",
        type=positive,
        default=16,
        metavar="N",
        help="groups played at once (default: 16)",
    )
    root = (
        "directory in place of the recipe's, for environments in files (default: the "
        "recipe's, if it is here, else this one)"
    )
    parser.add_argument("--root", type=Path, metavar="DIR", help=root)
    wait = "seconds to wait for a run that cannot be reached (default: 600)"
    parser.add_argument("--wait", type=positive, default=600, metavar="S", help=wait)


def run_worker(args: argparse.Namespace) -> int:
    """Play for a run until it ends, or Ctrl-C or SIGTERM."""
    with stopped_by_signals():
        join_run(
            args.join,
            name=args.name,
            groups=args.groups,
            root=args.root,
            wait_s=args.wait,
            note=partial(print, flush=True),
        )
    return 0


def join_run(
    url: str,
    *,
    name: str,
    groups: int,
    root: Path | None,
    wait_s: float,
    note: Callable[[str], None],
) -> None:
    """Play episodes for the run at a URL until it ends."""
    from turnwright.rollouts.standalone import run_sync

    try:
        from turnwright_cluster.worker import WorkerProcess
    except ImportError as error:
        raise ConfigError(
            f"turnwright worker needs starlette and uvicorn ({error.name} is missing): pip install "
            "'turnwright[serve,servers]'"
        ) from None
    worker = WorkerProcess(url, name=name, room=groups, root=root, note=note)
    run_sync(worker.run(patience_s=wait_s))


WORKER = Command(add_worker)
