"""Command check: an environment, a chat template, a model, a server, a recipe or the algorithms.

`run_check` runs the checks that were asked for and prints their findings. What is checked is
elsewhere: `turnwright.envs.check` (environments), `turnwright.renderers.contract` (templates),
`turnwright.engines.remote` (servers), `turnwright.training.self_checks` (algorithms, images).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwright.cli.options import Command, add_command, builtin_envs, make_environments
from turnwright.cli.trust import add_trust, confirm_file
from turnwright.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from turnwright.engines.remote import ServerCapabilities
    from turnwright.renderers.chat_renderer import ChatRenderer

LEARN = "learn"
"""Value of the argument that trains on a toy reward instead of checking an environment."""
Finding = tuple[bool | None, str]
"""Whether a check passed (None is information), and what was found."""


def add_check(subparsers: Any) -> None:
    """Register the command."""
    help = "check an environment, a model directory or a recipe"
    epilog = "Exit status: 0 all checks passed, 1 a check failed."
    parser = add_command(subparsers, "check", help, run_check, overrides=True, epilog=epilog)

    env = (
        'file.py:Env or the name of a built-in environment; "learn" checks that each algorithm '
        "raises a toy reward"
    )
    parser.add_argument("env", nargs="?", help=env)
    parser.add_argument(
        "--algorithm",
        metavar="NAME",
        help="learn: only this algorithm, by name or file.py:function",
    )

    parser.add_argument(
        "--model",
        metavar="DIR",
        type=Path,
        help="a Hugging Face model directory: check its chat template",
    )
    parser.add_argument(
        "--template",
        metavar="FILE",
        help="check a chat template without a model: a Jinja file or a name",
    )
    history = "history mode to check for exactness: append, inline or template (default: append)"
    parser.add_argument("--history", metavar="MODE", default="append", help=history)
    images = (
        "with --model: check that its answers depend on the pixels, in the first turn and "
        "in a later one"
    )
    parser.add_argument("--images", action="store_true", help=images)

    parser.add_argument(
        "--json", action="store_true", help="print findings about a template or a server as JSON"
    )
    engine = "a vLLM, SGLang or llama.cpp server: check its handling of ids and logprobs"
    parser.add_argument("--engine", metavar="URL", help=engine)
    parser.add_argument(
        "--key-env", metavar="NAME", help="the environment variable that holds the server's API key"
    )

    parser.add_argument(
        "--recipe",
        metavar="FILE",
        type=Path,
        help="a recipe: check keys, values and files, and load its environments",
    )
    add_trust(parser)


def run_check(args: argparse.Namespace) -> int:
    """Run the requested checks and print their findings."""
    from turnwright.config.snapshots import local_model

    env: str | None = args.env
    recipe: Path | None = args.recipe
    # A recipe may stand where an environment does.
    if env is not None and env.endswith(".toml") and recipe is None:
        recipe = Path(env)
        env = None
    _refuse_check(args, env, recipe)

    model = None if args.model is None else local_model(args.model)
    failed = 0
    if recipe is not None:
        _check_recipe(recipe, args)

    if env == LEARN:
        failed += show(check_learning(args.algorithm, model))
    elif env is not None:
        _refuse_unknown_env(env)
        if ":" in env:
            confirm_file(Path(env.rpartition(":")[0]), None, args)
        failed += show(check_env(env))

    # The algorithms are checked with the model; its template is not what was asked for.
    if model is not None and env != LEARN:
        failed += _report_template(model, args.history, as_json=args.json)
    if args.template is not None:
        failed += _report_template(args.template, args.history, as_json=args.json)

    if args.images and model is not None:
        failed += show(check_images(model))
    if args.engine is not None:
        failed += _report_server(check_engine(args.engine, args.key_env), as_json=args.json)
    return 1 if failed else 0


def _refuse_check(args: argparse.Namespace, env: str | None, recipe: Path | None) -> None:
    """Raise `UsageError` for options that do not go together."""
    subjects = (env, recipe, args.model, args.template, args.engine)
    if all(subject is None for subject in subjects):
        raise UsageError(
            "nothing to check; name file.py:Env, a built-in environment, recipe.toml, --model "
            "DIR, --template FILE or --engine URL"
        )
    if args.images and args.model is None:
        raise UsageError("--images needs a model; name it with --model DIR")
    if args.overrides and recipe is None:
        raise UsageError(f"{args.overrides[0]} overrides a recipe; name it with --recipe FILE")
    if args.algorithm is not None and env != LEARN:
        raise UsageError(f"--algorithm is for turnwright check {LEARN}; leave it out")


def show(findings: Iterable[Finding]) -> int:
    """Print findings, and return the number of failures."""
    from turnwright.display.text import single_line

    failed = 0
    for ok, text in findings:
        failed += ok is False
        head = {True: "ok    ", False: "FAIL  ", None: "      "}[ok]
        for line in text.splitlines() or [""]:
            print(single_line(head + line))
            # Further lines stand below the text of the first one.
            head = "      "
    return failed


def _check_recipe(recipe: Path, args: argparse.Namespace) -> None:
    """Check a recipe and load its environments; raise `ConfigError` for what cannot be used."""
    from turnwright.config import load

    resolved = load(recipe, args.overrides, envs=builtin_envs())
    confirm_file(recipe, resolved.config, args)

    keys_set = sum(origin != "default" for origin in resolved.origins.values())
    print(f"ok    {recipe}: {keys_set} keys set, {len(resolved.origins) - keys_set} defaults")
    for name in make_environments(resolved.config):
        print(f"ok    environment {name}")


def _refuse_unknown_env(spec: str) -> None:
    """Reject anything but a built-in name or `file.py:Name` before it is imported."""
    file, colon, _ = spec.rpartition(":")
    if spec.endswith(".py"):
        raise UsageError(f"{spec}: say which environment of the file: turnwright check {spec}:Name")

    if colon and file.endswith(".py") and not Path(file).is_file():
        folder = Path(file).parent
        near = ""
        if folder.is_dir():
            near = did_you_mean(Path(file).name, [path.name for path in folder.glob("*.py")])
        raise UsageError(f"{file}: no such file; {near or 'check the path'}")

    builtin = builtin_envs()
    if not colon and spec not in builtin:
        near = did_you_mean(spec, builtin) or "built-in ones are " + ", ".join(builtin)
        raise UsageError(f"{spec}: no such environment; {near}; your own is file.py:Name")


def check_env(spec: str) -> list[Finding]:
    """Check an environment's contract without a model."""
    from turnwright.envs.check import check_env as check
    from turnwright.envs.resolve import resolve_env

    return [(finding.ok, finding.text) for finding in check(resolve_env(spec))]


def check_learning(algorithm: str | None = None, model: Path | None = None) -> Iterator[Finding]:
    """Check that a toy reward rises in training, with each algorithm or with one."""
    from turnwright.config.names import ALGORITHMS
    from turnwright.training.self_checks import check_learning

    algorithms = ALGORITHMS if algorithm is None else [algorithm]
    for finding in check_learning(algorithms, model=model):
        yield finding.ok, finding.text


def _report_template(source: Path | str, history: str, *, as_json: bool) -> int:
    """Print a template's behavior as lines or JSON, and return the number of failed checks."""
    from turnwright.config.names import HISTORY_MODES
    from turnwright.renderers.load import load_renderer, template_renderer

    if history not in HISTORY_MODES:
        near = did_you_mean(history, HISTORY_MODES)
        raise UsageError(
            f"--history {history}: {near or 'choose one of ' + ', '.join(HISTORY_MODES)}"
        )

    # A path is a model directory; a text names a template without a model.
    renderer = template_renderer(source) if isinstance(source, str) else load_renderer(source)
    findings = check_template(renderer, history)
    if not as_json:
        return show(findings)

    failed = sum(ok is False for ok, _ in findings)
    parser, unread_calls = renderer.call_format
    report = {
        "path": str(source),
        "fingerprint": renderer.fingerprint,
        "history": history,
        "exact": not failed,
        **asdict(renderer.contract),
        "append_only": renderer.contract.append_only,
        "parser": parser,
        "unread_calls": unread_calls,
        "unread_replies": [asdict(reply) for reply in renderer.unread_replies],
    }
    print(json.dumps(report, indent=2))
    return failed


def check_template(renderer: ChatRenderer, history: str = "append") -> list[Finding]:
    """Report a template's behavior in a growing conversation, and whether a history mode is exact
    with it."""
    from turnwright.renderers.contract import explain_contract

    loaded = f"template and tokenizer load (fingerprint {renderer.fingerprint})"
    parser, unread_calls = renderer.call_format
    calls = f"replies are parsed as {parser!r}"
    if unread_calls:
        calls = (
            f"WARNING: the template writes tool calls as {unread_calls[:200]!r}, and no parser "
            "reads them back: calls of a model that follows it are not run (replies are parsed as "
            f"{parser!r}). Without tools this does not matter; with tools use a template with "
            "parsed calls (docs/templates.md)"
        )

    lost = [
        f"WARNING: a reply of the template's own does not come back: {reply}"
        for reply in renderer.unread_replies
    ]
    return [
        (True, loaded),
        *explain_contract(renderer.contract, history),
        *[(None, remark) for remark in (calls, *lost)],
    ]


def check_images(model: Path) -> list[Finding]:
    """Check that a vision-language model's answers depend on its images, in the local engine and
    in the trainer."""
    from turnwright.training.self_checks import check_vision, findings

    return findings(check_vision(model))


def _report_server(capabilities: ServerCapabilities, *, as_json: bool) -> int:
    """Print a server's capabilities as lines or JSON; return the number of failed checks, at most
    1 with JSON."""
    if not as_json:
        return show(capabilities.findings())

    print(json.dumps(capabilities.to_dict(), indent=2))
    return 0 if capabilities.trainable else 1


def check_engine(url: str, key_env: str | None = None) -> ServerCapabilities:
    """Probe a server's handling of ids and logprobs with a few tokens."""
    from turnwright.engines.remote import connect, probe_server
    from turnwright.rollouts.standalone import run_sync

    async def probe() -> ServerCapabilities:
        engine = await connect(url, key_env=key_env)
        try:
            return await probe_server(engine)
        finally:
            await engine.close()

    return run_sync(probe())


COMMAND = Command(add_check)
