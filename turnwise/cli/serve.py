"""`turnwise serve`: a model behind HTTP, in the wire formats of vLLM and SGLang."""

from __future__ import annotations

import argparse
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from turnwise.cli.options import add_command
from turnwise.errors import UsageError

SERVE_EPILOG = """\
examples:
  turnwise serve DIR                            on http://127.0.0.1:8000, as vLLM would answer
  turnwise serve DIR --formats sglang --port 0  as SGLang would, on a free port
  turnwise check --engine http://127.0.0.1:8000 what it can do
"""


def add_serve(subparsers: Any) -> None:
    """Register the command."""
    parser = add_command(
        subparsers, "serve", "put the local engine behind HTTP, ids in and ids out", run_serve, epilog=SERVE_EPILOG
    )
    parser.add_argument(
        "model", metavar="DIR", type=Path, help="a model directory, a checkpoint or a run (its last checkpoint)"
    )
    parser.add_argument("--formats", choices=("vllm", "sglang"), default="vllm", help="whose routes it answers")
    parser.add_argument("--host", default="127.0.0.1", help="for others than this machine: needs TURNWISE_SERVE_TOKEN")
    parser.add_argument("--port", metavar="N", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--context", metavar="N", type=int, help="most ids of context plus reply")
    parser.add_argument(
        "--speculate", metavar="N", type=int, default=0, help="draft up to N ids from what stood before, verified in one pass"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")


def run_serve(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    from turnwise import verbs

    token = os.environ.get("TURNWISE_SERVE_TOKEN", "")

    def told(line: str) -> None:
        print(line, flush=True)

    if args.speculate < 0:
        raise UsageError(f"--speculate {args.speculate}: 0 drafts none, and 1 or more so many ids")
    settings = {"host": args.host, "port": args.port, "token": token, "context": args.context, "device": args.device}
    settings["speculate"] = args.speculate
    with suppress(KeyboardInterrupt):
        verbs.serve_model(args.model, args.formats, told, **settings)
    return 0
