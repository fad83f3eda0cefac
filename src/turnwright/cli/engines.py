"""Command engines: install and start servers, change a list of them, relay weights.

`run_engines` chooses by the first argument. How a kind of server is installed and started is in
`turnwright.engines.remote.managed`; lists of servers are `EngineList`; the relay is a transport
that another package adds.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from turnwright import plugins
from turnwright.cli.options import Command, add_command, stopped_by_signals
from turnwright.errors import ConfigError, UsageError, did_you_mean

KINDS = ("vllm", "sglang", "llamacpp")
ENGINES_EPILOG = """\
examples:
  turnwright engines install vllm --gpu               install vLLM into its own environment
  turnwright engines start vllm --model DIR           serve a model directory, with exact logprobs
  turnwright engines start vllm --model DIR --dry-run print the command and the reasons for its flags
  turnwright engines join http://host:8000 --list engines.txt    add a server to the runs that watch the list; leave removes it
  turnwright check --engine http://localhost:8000     report the capabilities of a server
"""  # noqa: E501


def add_engines(subparsers: Any) -> None:
    """Register the command."""
    help = "install and start vLLM, SGLang and llama.cpp for exact rollouts; add servers to runs"
    parser = add_command(subparsers, "engines", help, run_engines, epilog=ENGINES_EPILOG)

    what = (
        "install: create its environment; start: run a server; join, leave: change a list of "
        "servers (engine.urls_file); relay: fetch weights to a directory for the servers of this "
        "machine (engine.tree)"
    )
    parser.add_argument("what", choices=("install", "start", "join", "leave", "relay"), help=what)
    kind = f"{', '.join(KINDS)}; join and leave: the URL of a server; relay: the directory"
    parser.add_argument("kind", metavar="KIND|URL|DIR", help=kind)

    parser.add_argument(
        "--list", metavar="FILE", type=Path, help="join, leave: the list of servers that runs watch"
    )
    parser.add_argument(
        "--model",
        metavar="DIR",
        type=Path,
        help="start: a model directory (llamacpp: a .gguf file)",
    )
    home = "directory of environments (default: ~/.cache/turnwright/engines)"
    parser.add_argument("--home", metavar="DIR", type=Path, help=home)

    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="start: address to listen on (default: local connections only)",
    )
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--context", type=int, metavar="N", help="start: maximum ids of context plus reply"
    )

    lora = (
        "start: a vLLM or SGLang server that accepts LoRA adapters up to this rank (64 without a "
        "value)"
    )
    parser.add_argument(
        "--lora", type=int, nargs="?", const=64, default=0, metavar="RANK", help=lora
    )

    adapters = "start: with --lora, room for the adapters of N policies"
    parser.add_argument("--adapters", type=int, default=1, metavar="N", help=adapters)
    parser.add_argument(
        "--group",
        action="store_true",
        help="start: a vLLM server that accepts weights over a process group",
    )
    speculate = "start: draft up to N ids from earlier text, verified in one pass"
    parser.add_argument("--speculate", type=int, default=0, metavar="N", help=speculate)
    parser.add_argument(
        "--sleep",
        action="store_true",
        help="start: with --gpu, a server that can release its memory",
    )

    parser.add_argument(
        "--gpu", action="store_true", help="for a machine with a GPU: leave out settings for CPUs"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the command and the reasons for its flags, and exit",
    )


def run_engines(args: argparse.Namespace) -> int:
    """Install or start servers, change a list of them, or relay weights."""
    if args.what in ("join", "leave"):
        return _change_list(args.what, args.kind, args.list)
    if args.what == "relay":
        token = os.environ.get("TURNWRIGHT_SERVE_TOKEN", "")
        say = partial(print, flush=True)
        with stopped_by_signals():
            relay_weights(Path(args.kind), say, host=args.host, port=args.port, token=token)
        return 0

    if args.kind not in KINDS:
        near = did_you_mean(args.kind, KINDS)
        raise UsageError(f"{args.kind}: {near or 'the kinds are ' + ', '.join(KINDS)}")

    from turnwright.engines.remote import managed

    home: Path = args.home or managed.HOME
    if args.what == "install":
        plan = managed.install(args.kind, home, gpu=args.gpu)
    else:
        _refuse_start(args)
        plan = managed.start_command(
            args.kind,
            home,
            args.model,
            host=args.host,
            port=args.port,
            context=args.context,
            gpu=args.gpu,
            lora=args.lora,
            adapters=args.adapters,
            group=args.group,
            sleep=args.sleep,
            speculate=args.speculate,
        )

    for line in plan.describe():
        print(line)
    if args.dry_run:
        return 0
    return managed.run_commands(plan)


def _refuse_start(args: argparse.Namespace) -> None:
    """Raise `UsageError` for options with which no server can start."""
    if args.model is None:
        raise UsageError("turnwright engines start needs a model: --model DIR")
    if not args.model.exists():
        raise UsageError(
            f"{args.model}: no such model; give a directory, or for llamacpp a .gguf file"
        )
    if args.lora < 0:
        raise UsageError(f"--lora {args.lora}: the rank must be at least 1")
    if args.adapters < 1:
        raise UsageError(f"--adapters {args.adapters}: must be at least 1, the number of policies")
    if args.speculate < 0:
        raise UsageError(f"--speculate {args.speculate}: must be at least 0; 0 disables drafts")


def _change_list(what: str, url: str, path: Path | None) -> int:
    """Add a server to a list, or remove it."""
    from turnwright.engines.remote.engine_list import EngineList

    if path is None:
        raise UsageError(
            f"turnwright engines {what} needs the list that runs watch (engine.urls_file): --list "
            "FILE"
        )
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{url}: must start with http:// or https://, as in http://host:8000")

    servers = EngineList(path)
    if what == "join":
        state = "joins" if servers.add(url) else "was listed already"
    else:
        state = "leaves" if servers.remove(url) else "was not listed"
    print(f"{url} {state}; {path} lists {len(servers.urls())}")
    return 0


def relay_weights(root: Path, note: Callable[[str], None], **settings: Any) -> None:
    """Fetch weights from peers to a directory, and pass them on, until interrupted.

    `settings` are those of `turnwright_serve.sharing.relay.relay`.
    """
    from turnwright.rollouts.standalone import run_sync

    try:
        relay = plugins.load("transports", "relay")
    except ImportError as error:
        raise ConfigError(
            f"turnwright engines relay needs {error.name}: pip install 'turnwright[serve,servers]'"
        ) from None
    run_sync(relay(root, note, **settings))


COMMAND = Command(add_engines)
