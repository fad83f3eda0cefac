"""Commands init, check, engines and pack."""

from __future__ import annotations

import argparse
import json
import keyword
import os
import re
import shlex
import sys
from collections.abc import Iterable
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwright.cli.options import add_command, builtin_envs, make_environments, stopped_by_signals
from turnwright.cli.trust import add_trust, confirm_file
from turnwright.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from turnwright.engines.remote import ServerCapabilities


LEARN = "learn"  # value of `turnwright check`'s argument that trains on a toy reward instead of checking an environment


def add_check(subparsers: Any) -> None:
    """Register the command."""
    help = "check an environment, a model directory or a recipe"
    epilog = "Exit status: 0 all checks passed, 1 a check failed."
    parser = add_command(subparsers, "check", help, run_check, overrides=True, epilog=epilog)
    env = 'file.py:Env or the name of a built-in environment; "learn" checks that each algorithm raises a toy reward'
    parser.add_argument("env", nargs="?", help=env)
    parser.add_argument("--algorithm", metavar="NAME", help="learn: only this algorithm, by name or file.py:function")
    parser.add_argument("--model", metavar="DIR", type=Path, help="a Hugging Face model directory: check its chat template")
    parser.add_argument("--template", metavar="FILE", help="check a chat template without a model: a Jinja file or a name")
    history = "history mode to check for exactness: append, inline or template (default: append)"
    parser.add_argument("--history", metavar="MODE", default="append", help=history)
    images = "with --model: check that its answers depend on the pixels, in the first turn and in a later one"
    parser.add_argument("--images", action="store_true", help=images)
    parser.add_argument("--json", action="store_true", help="print findings about a template or a server as JSON")
    engine = "a vLLM, SGLang or llama.cpp server: check its handling of ids and logprobs"
    parser.add_argument("--engine", metavar="URL", help=engine)
    parser.add_argument("--key-env", metavar="NAME", help="the environment variable that holds the server's API key")
    parser.add_argument(
        "--recipe", metavar="FILE", type=Path, help="a recipe: check keys, values and files, and load its environments"
    )
    add_trust(parser)


def _refuse_check(args: argparse.Namespace, env: str | None, recipe: Path | None) -> None:
    """Raise `UsageError` for options that do not go together."""
    if all(given is None for given in (env, recipe, args.model, args.template, args.engine)):
        raise UsageError(
            "nothing to check; name file.py:Env, a built-in environment, recipe.toml, --model DIR, --template FILE or "
            "--engine URL"
        )
    if args.images and args.model is None:
        raise UsageError("--images needs a model; name it with --model DIR")
    if args.overrides and recipe is None:
        raise UsageError(f"{args.overrides[0]} overrides a recipe; name it with --recipe FILE")
    if args.algorithm is not None and env != LEARN:
        raise UsageError(f"--algorithm is for turnwright check {LEARN}; leave it out")


def run_check(args: argparse.Namespace) -> int:
    """Run the requested checks and print their findings."""
    from turnwright import commands
    from turnwright.config.snapshots import local_model

    env: str | None = args.env
    recipe: Path | None = args.recipe
    if env is not None and env.endswith(".toml") and recipe is None:
        recipe, env = Path(env), None
    _refuse_check(args, env, recipe)
    model = None if args.model is None else local_model(args.model)
    failed = 0
    if recipe is not None:
        _recipe(recipe, args)
    if env == LEARN:
        failed += show(commands.check_learning(args.algorithm, model))
    elif env is not None:
        named = _env(env)
        if ":" in named:
            confirm_file(Path(named.rpartition(":")[0]), None, args)
        failed += show(commands.check_env(named))
    for template in (None if env == LEARN else model, args.template):
        if template is not None:
            failed += _template(template, args.history, as_json=args.json)
    if args.images and model is not None:
        failed += show(commands.check_images(model))
    if args.engine is not None:
        failed += _engine(commands.check_engine(args.engine, args.key_env), as_json=args.json)
    return 1 if failed else 0


def _recipe(recipe: Path, args: argparse.Namespace) -> None:
    """Check a recipe and load its environments; raise `ConfigError` for what cannot be used."""
    from turnwright.config import load

    resolved = load(recipe, args.overrides, envs=builtin_envs())
    confirm_file(recipe, resolved.config, args)
    count = sum(origin != "default" for origin in resolved.origins.values())
    print(f"ok    {recipe}: {count} keys set, {len(resolved.origins) - count} defaults")
    for name in make_environments(resolved.config):
        print(f"ok    environment {name}")


def _engine(found: ServerCapabilities, *, as_json: bool) -> int:
    if not as_json:
        return show(found.findings())
    print(json.dumps(found.to_dict(), indent=2))
    return 0 if found.trainable else 1


def _template(given: Path | str, history: str, *, as_json: bool) -> int:
    """Print a template's behavior as lines or JSON, and return the number of failed checks."""
    from dataclasses import asdict

    from turnwright import commands
    from turnwright.config.names import HISTORY_MODES
    from turnwright.renderers.load import load_renderer, template_renderer

    if history not in HISTORY_MODES:
        near = did_you_mean(history, HISTORY_MODES)
        raise UsageError(f"--history {history}: {near or 'choose one of ' + ', '.join(HISTORY_MODES)}")
    renderer = template_renderer(given) if isinstance(given, str) else load_renderer(given)
    findings = commands.check_template(renderer, history)
    if not as_json:
        return show(findings)
    failed = sum(ok is False for ok, _ in findings)
    row = {"path": str(given), "fingerprint": renderer.fingerprint, "history": history, "exact": not failed}
    parser, unread = renderer.call_format
    contract = asdict(renderer.contract) | {"append_only": renderer.contract.append_only}
    replies = {"parser": parser, "unread_calls": unread, "unread_replies": [asdict(reply) for reply in renderer.unread_replies]}
    print(json.dumps(row | contract | replies, indent=2))
    return failed


def show(findings: Iterable[tuple[bool | None, str]]) -> int:
    """Print findings (ok, text), of which `ok` None is information, and return the number of failures."""
    from turnwright.display.text import single_line

    failed = 0
    for ok, text in findings:
        failed += ok is False
        head = {True: "ok    ", False: "FAIL  ", None: "      "}[ok]
        for index, line in enumerate(text.splitlines() or [""]):
            print(single_line((head if index == 0 else "      ") + line))
    return failed


def _env(spec: str) -> str:
    """Reject anything but a built-in name or `file.py:Name` before it is imported."""
    file, colon, _ = spec.rpartition(":")
    if spec.endswith(".py"):
        raise UsageError(f"{spec}: say which environment of the file: turnwright check {spec}:Name")
    if colon and file.endswith(".py") and not Path(file).is_file():
        folder = Path(file).parent
        near = did_you_mean(Path(file).name, [p.name for p in folder.glob("*.py")]) if folder.is_dir() else ""
        raise UsageError(f"{file}: no such file; {near or 'check the path'}")
    known = builtin_envs()
    if not colon and spec not in known:
        near = did_you_mean(spec, known) or "built-in ones are " + ", ".join(known)
        raise UsageError(f"{spec}: no such environment; {near}; your own is file.py:Name")
    return spec


KINDS = ("vllm", "sglang", "llamacpp")
ENGINES_EPILOG = """\
examples:
  turnwright engines install vllm --gpu               install vLLM into its own environment
  turnwright engines start vllm --model DIR           serve a model directory, with exact logprobs
  turnwright engines start vllm --model DIR --dry-run print the command and the reasons for its flags
  turnwright engines join http://host:8000 --list engines.txt    add a server to the runs that watch the list; leave removes it
  turnwright check --engine http://localhost:8000     report the capabilities of a server
"""


def add_engines(subparsers: Any) -> None:
    """Register the command."""
    help = "install and start vLLM, SGLang and llama.cpp for exact rollouts; add servers to runs"
    parser = add_command(subparsers, "engines", help, run_engines, epilog=ENGINES_EPILOG)
    what = (
        "install: create its environment; start: run a server; join, leave: change a list of servers (engine.urls_file); "
        "relay: fetch weights to a directory for the servers of this machine (engine.tree)"
    )
    parser.add_argument("what", choices=("install", "start", "join", "leave", "relay"), help=what)
    kind = f"{', '.join(KINDS)}; join and leave: the URL of a server; relay: the directory"
    parser.add_argument("kind", metavar="KIND|URL|DIR", help=kind)
    parser.add_argument("--list", metavar="FILE", type=Path, help="join, leave: the list of servers that runs watch")
    parser.add_argument("--model", metavar="DIR", type=Path, help="start: a model directory (llamacpp: a .gguf file)")
    home = "directory of environments (default: ~/.cache/turnwright/engines)"
    parser.add_argument("--home", metavar="DIR", type=Path, help=home)
    parser.add_argument("--host", default="127.0.0.1", help="start: address to listen on (default: local connections only)")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--context", type=int, metavar="N", help="start: maximum ids of context plus reply")
    lora = "start: a vLLM or SGLang server that accepts LoRA adapters up to this rank (64 without a value)"
    parser.add_argument("--lora", type=int, nargs="?", const=64, default=0, metavar="RANK", help=lora)
    adapters = "start: with --lora, room for the adapters of N policies"
    parser.add_argument("--adapters", type=int, default=1, metavar="N", help=adapters)
    parser.add_argument("--group", action="store_true", help="start: a vLLM server that accepts weights over a process group")
    speculate = "start: draft up to N ids from earlier text, verified in one pass"
    parser.add_argument("--speculate", type=int, default=0, metavar="N", help=speculate)
    parser.add_argument("--sleep", action="store_true", help="start: with --gpu, a server that can release its memory")
    parser.add_argument("--gpu", action="store_true", help="for a machine with a GPU: leave out settings for CPUs")
    parser.add_argument("--dry-run", action="store_true", help="print the command and the reasons for its flags, and exit")


def run_engines(args: argparse.Namespace) -> int:
    """Install or start."""
    if args.what in ("join", "leave"):
        return _change_list(args.what, args.kind, args.list)
    if args.what == "relay":
        from turnwright import commands

        with stopped_by_signals():
            token = os.environ.get("TURNWRIGHT_SERVE_TOKEN", "")
            commands.relay_weights(Path(args.kind), partial(print, flush=True), host=args.host, port=args.port, token=token)
        return 0
    if args.kind not in KINDS:
        raise UsageError(f"{args.kind}: {did_you_mean(args.kind, KINDS) or 'the kinds are ' + ', '.join(KINDS)}")
    from turnwright.engines.remote import managed

    home: Path = args.home or managed.HOME
    if args.what == "install":
        plan = managed.install(args.kind, home, gpu=args.gpu)
    else:
        if args.model is None:
            raise UsageError("turnwright engines start needs a model: --model DIR")
        if not args.model.exists():
            raise UsageError(f"{args.model}: no such model; give a directory, or for llamacpp a .gguf file")
        if args.lora < 0:
            raise UsageError(f"--lora {args.lora}: the rank must be at least 1")
        if args.adapters < 1:
            raise UsageError(f"--adapters {args.adapters}: must be at least 1, the number of policies")
        if args.speculate < 0:
            raise UsageError(f"--speculate {args.speculate}: must be at least 0; 0 disables drafts")
        names = ("host", "port", "context", "gpu", "lora", "adapters", "group", "sleep", "speculate")
        plan = managed.start_command(args.kind, home, args.model, **{name: vars(args)[name] for name in names})
    for line in plan.describe():
        print(line)
    if args.dry_run:
        return 0
    return managed.run_commands(plan)


def _change_list(what: str, url: str, path: Path | None) -> int:
    """Add a server to a list, or remove it."""
    from turnwright.engines.remote.engine_list import EngineList

    if path is None:
        raise UsageError(f"turnwright engines {what} needs the list that runs watch (engine.urls_file): --list FILE")
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{url}: must start with http:// or https://, as in http://host:8000")
    servers = EngineList(path)
    changed = servers.add(url) if what == "join" else servers.remove(url)
    state = {("join", False): "was listed already", ("leave", False): "was not listed"}.get((what, changed), what + "s")
    print(f"{url} {state}; {path} lists {len(servers.urls())}")
    return 0


READS = "model = { heads = 4, kv_heads = 4 }"
SEES = """\
# It sees images up to this size, larger ones are scaled down; of text it reads what is beside them, never their alt.
model = { vision = true, image_side = 64, heads = 4, kv_heads = 4 }"""
"""The tiny model in a recipe, for text and with images."""
_FILES = {"{name}.py": "env.py", "recipe.toml": "recipe.toml", "test_{name}.py": "test.py", "README.md": "README.md"}


def add_init(subparsers: Any) -> None:
    """Register the command."""
    parser = add_command(subparsers, "init", "write a starter environment, recipe and test", run_init)
    parser.add_argument("directory", metavar="NAME", type=Path, help="directory to create; its name is the environment's")
    vision = "an environment with images, and a recipe for a model that sees"
    parser.add_argument("--vision", action="store_true", help=vision)


def run_init(args: argparse.Namespace) -> int:
    """Write the files and print the next commands."""
    folder: Path = args.directory
    name = re.sub(r"\W+", "_", folder.name)
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name) or name.startswith("__"):
        raise UsageError(f"{folder}: '{folder.name}' cannot name a Python module; use letters, digits and _, such as my_env")
    installed = PathFinder.find_spec(name)
    if name in {"turnwright", *sys.stdlib_module_names} or (installed and installed.origin):  # a bare directory has no origin
        raise UsageError(f"{folder}: a module named '{name}' would hide another one; choose another name, such as my_{name}")
    paths = [folder / pattern.format(name=name) for pattern in _FILES]
    existing = next((path for path in paths if path.exists()), None)
    if existing is not None:
        raise UsageError(f"{existing}: already exists; choose another name, or remove it first")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, template in zip(paths, _FILES.values(), strict=True):
            if args.vision and template == "env.py":
                template = "env_vision.py"
            text = (Path(__file__).parent / "templates" / f"{template}.jinja").read_text(encoding="utf-8")
            # Three placeholders need no template engine.
            text = text.replace("{{ name }}", name).replace("{{ cls }}", class_name(name))
            path.write_text(text.replace("{{ model }}", SEES if args.vision else READS), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written ({error.strerror}); choose another directory") from None
    for path in paths:
        print(path)
    check = f"turnwright check {name}.py:{class_name(name)}"
    print(f"next: cd {shlex.quote(str(folder))} && pytest && {check} && turnwright train recipe.toml")
    return 0


def class_name(module: str) -> str:
    """Return the class name for a module: `my_env` -> `MyEnv`."""
    name = "".join(word[:1].upper() + word[1:] for word in module.split("_"))
    return name if name.isidentifier() else f"Env{name}"


def add_pack(subparsers: Any) -> None:
    """Register the command."""
    help = "write a model in int4 or fp8, as other engines read it"
    parser = add_command(subparsers, "pack", help, run_pack)
    model = "a model directory, a checkpoint or a run (its last checkpoint)"
    parser.add_argument("model", metavar="DIR", type=Path, help=model)
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="directory to write")
    parser.add_argument("--kind", choices=("int4", "fp8"), help="number format (default: the run's quant.kind)")
    size = "inputs per scale (int4) or side of a block (fp8); default: the run's, or 128"
    parser.add_argument("--size", metavar="N", type=int, help=size)


def run_pack(args: argparse.Namespace) -> int:
    """Write the packed directory and print its name."""
    from turnwright import commands

    if args.size is not None and (args.size < 8 or args.size % 8):
        raise UsageError(f"--size {args.size}: must be a multiple of 8")
    commands.pack_model(args.model, args.out, args.kind, args.size)
    print(args.out)
    return 0
