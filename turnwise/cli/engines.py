"""`turnwise engines`: environments for vLLM, SGLang and llama.cpp, and servers with the settings that exactness needs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from turnwise.cli.options import add_command
from turnwise.errors import UsageError

KINDS = ("vllm", "sglang", "llamacpp")
ENGINES_EPILOG = """\
examples:
  turnwise engines install vllm                     an environment of its own for it
  turnwise engines start vllm --model DIR           a server of a model directory, with exact logprobs
  turnwise engines start vllm --model DIR --dry-run what would be run, and why
  turnwise check --engine http://localhost:8000     what a server can do
"""


def add_engines(subparsers: Any) -> None:
    """Register the command."""
    parser = add_command(
        subparsers,
        "engines",
        "install and start vLLM, SGLang and llama.cpp for exact rollouts",
        run_engines,
        epilog=ENGINES_EPILOG,
    )
    parser.add_argument("what", choices=("install", "start"), help="install: make its environment; start: run a server")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--model", metavar="DIR", type=Path, help="start: a model directory (llamacpp: a .gguf file)")
    parser.add_argument(
        "--home", metavar="DIR", type=Path, help="where environments stand (default: ~/.cache/turnwise/engines)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="start: the address to listen on (default: this machine alone)")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--context", type=int, metavar="N", help="start: most ids of context plus reply")
    parser.add_argument(
        "--lora",
        type=int,
        nargs="?",
        const=64,
        default=0,
        metavar="RANK",
        help="start: a vLLM or SGLang server that takes LoRA adapters of this rank (64 by default) and less",
    )
    parser.add_argument("--group", action="store_true", help="start: a vLLM server that takes weights by process group")
    parser.add_argument(
        "--speculate",
        type=int,
        default=0,
        metavar="N",
        help="start: draft up to N ids from what stood before, verified in one pass",
    )
    parser.add_argument("--sleep", action="store_true", help="start: with --gpu, a server that can give its memory back")
    parser.add_argument("--gpu", action="store_true", help="for a machine with a GPU: no settings that are for CPUs alone")
    parser.add_argument("--dry-run", action="store_true", help="print what would be run, and why, and leave")


def run_engines(args: argparse.Namespace) -> int:
    """Install or start."""
    from turnwise.engine.remote import recipes

    home: Path = args.home or recipes.HOME
    if args.what == "install":
        plan = recipes.install(args.kind, home, gpu=args.gpu)
    else:
        if args.model is None:
            raise UsageError("turnwise engines start needs a model: --model DIR")
        if not args.model.exists():
            raise UsageError(f"{args.model}: no such model; give a directory, or for llamacpp a .gguf file")
        if args.lora < 0:
            raise UsageError(f"--lora {args.lora}: the rank is at least 1")
        if args.speculate < 0:
            raise UsageError(f"--speculate {args.speculate}: 0 drafts none, and 1 or more so many ids")
        settings = {"context": args.context, "gpu": args.gpu, "lora": args.lora, "group": args.group, "sleep": args.sleep}
        settings["speculate"] = args.speculate
        plan = recipes.start_command(args.kind, home, args.model, host=args.host, port=args.port, **settings)
    for line in plan.describe():
        print(line)
    if args.dry_run:
        return 0
    return recipes.run_commands(plan)
