"""`turnwise check`: whether an environment, a model directory or a recipe is fit to train with, before any training."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turnwise.cli.options import add_command, builtin_envs
from turnwise.errors import UsageError

LEARN = "learn"
"""What stands in an environment's place to train on a toy reward."""


def add_check(subparsers: Any) -> None:
    """Register the command."""
    parser = add_command(
        subparsers,
        "check",
        "check an environment, a model directory or a recipe",
        run_check,
        overrides=True,
        epilog="Exit status: 0 all well, 1 something failed.",
    )
    parser.add_argument(
        "env",
        nargs="?",
        help='file.py:Env, or the name of a built-in environment; "learn" sees whether a toy reward rises with each algorithm',
    )
    parser.add_argument("--algorithm", metavar="NAME", help="learn: one algorithm alone, by name or file.py:function")
    parser.add_argument(
        "--model",
        metavar="DIR",
        type=Path,
        help="a Hugging Face model directory: what its chat template does to a conversation",
    )
    parser.add_argument("--template", metavar="FILE", help="the same of a chat template alone: a Jinja file, or a name")
    parser.add_argument(
        "--history",
        metavar="MODE",
        default="append",
        help="append, inline or template: whether it can be exact (default: append)",
    )
    parser.add_argument(
        "--images",
        action="store_true",
        help="with --model: whether its answers depend on the pixels, at the first turn and at a later one",
    )
    parser.add_argument("--json", action="store_true", help="print what was found of a template or a server as JSON")
    parser.add_argument(
        "--engine", metavar="URL", help="a vLLM, SGLang or llama.cpp server: what it does with ids and logprobs"
    )
    parser.add_argument("--key-env", metavar="NAME", help="the environment variable that holds the server's API key")
    parser.add_argument("--recipe", metavar="FILE", type=Path, help="a recipe: its keys, values and files")


def run_check(args: argparse.Namespace) -> int:
    """Run the checks that were asked for and print what they found."""
    if all(given is None for given in (args.env, args.recipe, args.model, args.template, args.engine)):
        raise UsageError(
            "nothing to check; name file.py:Env, a built-in environment, --model DIR, --template FILE, --recipe FILE or "
            "--engine URL"
        )
    if args.images and args.model is None:
        raise UsageError("--images probes a model; name it with --model DIR")
    if args.overrides and args.recipe is None:
        raise UsageError(f"{args.overrides[0]} overrides a recipe; name it with --recipe FILE")
    if args.algorithm is not None and args.env != LEARN:
        raise UsageError(f"--algorithm belongs to turnwise check {LEARN}")
    failed = 0
    if args.recipe is not None:
        from turnwise.config import load

        resolved = load(args.recipe, args.overrides, envs=builtin_envs())
        count = sum(origin != "default" for origin in resolved.origins.values())
        print(f"ok    {args.recipe}: {count} settings of its own, {len(resolved.origins) - count} defaults")
    if args.env == LEARN:
        from turnwise import verbs

        failed += show(verbs.check_learning(args.algorithm, args.model))
    elif args.env is not None:
        spec = _env(args.env)
        from turnwise import verbs

        failed += show(verbs.check_env(spec))
    for template in (None if args.env == LEARN else args.model, args.template):
        if template is not None:
            failed += _template(template, args.history, as_json=args.json)
    if args.images:
        from turnwise import verbs

        failed += show(verbs.check_images(args.model))
    if args.engine is not None:
        failed += _engine(args.engine, args.key_env, as_json=args.json)
    return 1 if failed else 0


def _template(given: Path | str, history: str, *, as_json: bool) -> int:
    """Print what a template does, as lines or as JSON, and return how many checks failed."""
    from turnwise import verbs
    from turnwise.config.needs import did_you_mean
    from turnwise.render.load import load_renderer, template_renderer

    modes = ("append", "inline", "template")
    if history not in modes:
        near = did_you_mean(history, modes)
        raise UsageError(f"--history {history}: {near or 'it is one of ' + ', '.join(modes)}")
    renderer = template_renderer(given) if isinstance(given, str) else load_renderer(given)
    findings = verbs.check_template(renderer, history)
    if not as_json:
        return show(findings)
    from turnwise.render.contract import to_row

    failed = sum(ok is False for ok, _ in findings)
    row = {"path": str(given), "fingerprint": renderer.fingerprint, "history": history, "exact": not failed}
    parser, unread = renderer.call_format
    print(json.dumps(row | to_row(renderer.contract) | {"parser": parser, "unread_calls": unread}, indent=2))
    return failed


def _engine(url: str, key_env: str | None, *, as_json: bool) -> int:
    """Ask a server what it can do, print it, and return how many checks failed."""
    from turnwise import verbs

    found = verbs.check_engine(url, key_env)
    if not as_json:
        return show(found.findings())
    print(json.dumps(found.to_dict(), indent=2))
    return 0 if found.trainable else 1


def show(findings: Any) -> int:
    """Print findings, one line each, and return how many failed.

    A finding is (ok, text), a mapping or an object with `ok` and `text`, or a plain line; `ok` None is a remark.
    """
    from turnwise.view.text import single_line

    failed = 0
    for finding in findings or ():
        ok, text = _finding(finding)
        failed += ok is False
        head = {True: "ok    ", False: "FAIL  ", None: "      "}[ok]
        for index, line in enumerate(str(text).splitlines() or [""]):
            print(single_line((head if index == 0 else "      ") + line))
    return failed


def _finding(finding: Any) -> tuple[bool | None, str]:
    if isinstance(finding, str):
        return None, finding
    if isinstance(finding, tuple):
        return finding[0], str(finding[1])
    if isinstance(finding, Mapping):
        return finding.get("ok"), str(finding.get("text", ""))
    return finding.ok, str(finding.text)


def _env(spec: str) -> str:
    """Refuse what is neither a built-in name nor `file.py:Name`, before anything is imported."""
    from turnwise.config.needs import did_you_mean

    file, colon, _ = spec.rpartition(":")
    if spec.endswith(".py"):
        raise UsageError(f"{spec}: say which environment of the file: turnwise check {spec}:Name")
    if colon and file.endswith(".py") and not Path(file).is_file():
        folder = Path(file).parent
        near = did_you_mean(Path(file).name, [p.name for p in folder.glob("*.py")]) if folder.is_dir() else ""
        raise UsageError(f"{file}: no such file; {near or 'check the path'}")
    known = builtin_envs()
    if not colon and spec not in known:
        near = did_you_mean(spec, known)
        raise UsageError(
            f"{spec}: no such environment; {near or 'built-in ones are ' + ', '.join(known)}; your own is file.py:Name"
        )
    return spec
