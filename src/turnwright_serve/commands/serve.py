"""Command serve: the local engine over HTTP."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from turnwright.cli.options import Command, add_command, import_training, stopped_by_signals
from turnwright.errors import UsageError

SERVE_EPILOG = """\
examples:
  turnwright serve DIR                            serve vLLM's API on http://127.0.0.1:8000
  turnwright serve DIR --formats sglang --port 0  serve SGLang's API on a free port
  turnwright check --engine http://127.0.0.1:8000 report the server's capabilities
"""
NO_KEY = "serve every local user without a key; weights and pauses still need it"


def add_serve(subparsers: Any) -> None:
    """Register the command."""
    help = "serve the local engine over HTTP, with token ids in and out"
    parser = add_command(subparsers, "serve", help, run_serve, epilog=SERVE_EPILOG)
    model = "a model directory, a checkpoint or a run (its last checkpoint)"
    parser.add_argument("model", metavar="DIR", type=Path, help=model)
    parser.add_argument(
        "--formats", choices=("vllm", "sglang"), default="vllm", help="API to serve (default: vllm)"
    )
    host = "other than 127.0.0.1: needs TURNWRIGHT_SERVE_TOKEN, the key of all requests"
    parser.add_argument("--host", default="127.0.0.1", help=host)
    parser.add_argument("--port", metavar="N", type=int, default=8000, help="0 selects a free one")
    parser.add_argument(
        "--context", metavar="N", type=int, help="maximum ids of context plus reply"
    )
    speculate = "draft up to N ids from earlier text, verified in one pass"
    parser.add_argument("--speculate", metavar="N", type=int, default=0, help=speculate)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    weights = "directory for weights that arrive from other servers (default: a temporary one)"
    parser.add_argument("--weights-dir", metavar="DIR", type=Path, help=weights)
    cache = "memory for keys and values in GiB, which bounds the calls at once (default: 4)"
    parser.add_argument("--cache-gib", metavar="GIB", type=float, default=4.0, help=cache)
    parser.add_argument("--no-key", action="store_true", help=NO_KEY)


def run_serve(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM, which end it alike, so that it leaves no files."""
    if args.speculate < 0:
        raise UsageError(f"--speculate {args.speculate}: must be at least 0; 0 disables drafts")
    if not 0 < args.cache_gib < math.inf:
        raise UsageError(
            f"--cache-gib {args.cache_gib:g}: must be over 0, the memory for keys and values in GiB"
        )

    names = ("host", "port", "context", "device", "speculate", "weights_dir", "cache_gib")
    settings = {name: vars(args)[name] for name in names}
    settings["keyless"] = args.no_key
    settings["token"] = os.environ.get("TURNWRIGHT_SERVE_TOKEN", "")

    import_training("turnwright_serve.serve")
    with stopped_by_signals():
        serve_model(args.model, args.formats, partial(print, flush=True), **settings)
    return 0


def serve_model(model: Path, formats: str, note: Callable[[str], None], **settings: Any) -> None:
    """Serve a model directory, a checkpoint or a run (its last checkpoint) over HTTP until
    interrupted.

    `note` receives a line with the URL once the server is ready; `settings` are those of
    `turnwright_serve.serve.serve`.
    """
    from turnwright.rollouts.standalone import run_sync
    from turnwright.training.checkpoint import model_of
    from turnwright_serve.serve import serve

    run_sync(serve(model_of(model), formats, note, **settings))  # type: ignore[arg-type]


SERVE = Command(add_serve)
