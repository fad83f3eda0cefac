"""Command record: record programs that speak to a chat API."""

from __future__ import annotations

import argparse
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwright.cli.options import (
    Command,
    add_command,
    add_recipe,
    import_training,
    positive,
    requested,
    resolve,
)
from turnwright.errors import ConfigError

if TYPE_CHECKING:
    from turnwright.config import Limits, ResolvedConfig
    from turnwright.records import RunDir
    from turnwright.types import Trajectory


def add_record(subparsers: Any) -> None:
    """Register the command."""
    help = "record programs that speak to a chat API, in front of a model or another service"
    parser = add_command(subparsers, "record", help, run_record, overrides=True)
    add_recipe(parser)
    parser.add_argument(
        "--port", metavar="N", type=int, default=8100, help="0 selects a free one (default: 8100)"
    )
    parser.add_argument("--out", metavar="DIR", help="the run directory to write")
    parser.add_argument(
        "--checkpoint",
        metavar="DIR",
        help="a checkpoint or model directory instead of the recipe's model",
    )
    idle = "end a session without requests for so many seconds (default: 900)"
    parser.add_argument("--idle", metavar="S", type=positive, default=900, help=idle)
    no_key = (
        "let every local user end sessions (default: only with a key of this command, or "
        "TURNWRIGHT_SERVE_TOKEN)"
    )
    parser.add_argument("--no-key", action="store_true", help=no_key)


def run_record(args: argparse.Namespace) -> int:
    """Record until Ctrl-C, SIGTERM or SIGHUP, which all end it with every session written."""
    if args.recipe is None:
        # A recipe needs one; here the programs come by themselves.
        args.overrides.append("--env.use=program")
    resolved = requested(args, partial(resolve, training=False))
    if resolved is None:
        return 0

    import_training()
    say = partial(print, flush=True)
    key = "" if args.no_key else os.environ.get("TURNWRIGHT_SERVE_TOKEN", "")
    access: dict[str, Any] = {"key": key, "keyless": args.no_key}
    # A signal ends the recording in order, and this call returns. One that comes before
    # or a second one raises.
    record_programs(
        resolved, port=args.port, idle_s=args.idle, note=say, checkpoint=args.checkpoint, **access
    )
    say(f"{resolved.config.out} is written; turnwright view {resolved.config.out}")
    return 0


def record_programs(
    resolved: ResolvedConfig,
    *,
    port: int,
    idle_s: float,
    note: Callable[[str], None],
    checkpoint: str | None = None,
    untrained: Sequence[str] = ("side",),
    key: str = "",
    keyless: bool = False,
) -> list[Trajectory]:
    """Record what programs do at a port until interrupted, in the directory `out`.

    `note` receives a line for each session.

    Requests need the `key` as their API key. By default one is made here and printed, and is needed
    to end a session alone: programs may send any API key, which tells their sessions apart. With
    `keyless`, nothing needs one.
    """
    from turnwright.config.dump import to_json_dict
    from turnwright.records import RunDir
    from turnwright.rollouts.standalone import run_sync
    from turnwright.training.configured_rollout import make_rollout
    from turnwright.training.metrics import versions

    try:
        from turnwright_serve.proxy import ProxySettings
        from turnwright_serve.proxy.recording import record_sessions
    except ImportError as error:
        raise ConfigError(
            f"turnwright record needs starlette and uvicorn ({error.name} is missing): pip install "
            "'turnwright[serve]'"
        ) from None

    path = Path(resolved.config.out)
    if (path / "journal.jsonl").exists():
        raise ConfigError(f"{path} already contains a run; choose another --out")
    config = replace(resolved.config, limits=_limits_of_programs(resolved))
    resolved = replace(resolved, config=config)

    end_key = "" if key or keyless else secrets.token_urlsafe(24)

    def started(url: str) -> None:
        access = "the API key of TURNWRIGHT_SERVE_TOKEN" if key else "any API key"
        note(
            f"{url}  (give programs {access} and {url}/s/NAME/v1 as their base URL, or "
            f"{url}/s/NAME where they add /v1; Ctrl-C ends)"
        )
        if end_key:
            note(f"POST {url}/s/NAME/end ends a session, with the API key {end_key}")
        if resolved.config.engine.kind == "chat":
            note(
                "the service returns text: ids are the built-in renderer's, without logprobs, and "
                "none can be trained on"
            )

    async def record(run: RunDir) -> list[Trajectory]:
        rollout = make_rollout(resolved, [], checkpoint, "local", note, run=run, stop_on_bugs=False)
        settings = ProxySettings(untrained=tuple(untrained))
        try:
            return await record_sessions(
                rollout,
                port=port,
                idle_s=idle_s,
                on_start=started,
                note=note,
                settings=settings,
                key=key or end_key,
                keyed_sampling=bool(key),
            )
        finally:
            await rollout.engine.close()

    with RunDir(path) as run:
        run.write_json("config.json", to_json_dict(resolved) | {"versions": versions()})
        return run_sync(record(run))


def _limits_of_programs(resolved: ResolvedConfig) -> Limits:
    """Return limits for sessions of unknown length, where none were given."""

    limits_of_programs = {"turns": 10_000, "turn_tokens": 16_384, "wall_clock_s": 7 * 86_400.0}
    not_given: dict[str, Any] = {
        name: limit
        for name, limit in limits_of_programs.items()
        if resolved.origins.get(f"limits.{name}", "default") == "default"
    }
    return replace(resolved.config.limits, **not_given)


RECORD = Command(add_record)
