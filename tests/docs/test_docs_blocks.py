"""Every code block of README and docs does what it says: Python runs, recipes
load, commands exist."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from blocks import FILES, ROOT, Block, all_blocks, blocks
from kit.commands import parse_command

from turnwright.cli.main import main
from turnwright.config import load

LANGUAGES = {
    "python": "executed",
    "toml": "loaded as a recipe",
    "console": "commands parsed, cheap ones run",
    "json": "parsed",
    "text": "a picture, or what a program printed: nothing to run",
}
NOT_RUN: dict[str, str] = {}
"""Python blocks that are not executed, `file.md: first line` -> why.

Empty, and meant to stay so.
"""
NEEDS = {
    "libraries.md: import verifiers.v1 as vf": "verifiers.v1.configs.select",
    "libraries.md: import verifiers.legacy as legacy": "turnwright_verifiers_legacy",
    "libraries.md: # an OpenEnv server": "openenv.core",
    "coming_from.md: # skyrl_guess.py": "skyrl_gym",
    "coming_from.md: # swift_rewards.py": "swift.plugin",
}
"""Python blocks that need a package which the extra `dev` leaves out, without which they
are not executed here. The tests of what they show, `tests/envs/test_openenv.py`,
`tests/envs/test_verifiers_tasksets.py` and
`contrib/verifiers_legacy/test_verifiers_legacy.py`, execute them too. The files of coming_from.md
are played with our stand-ins by the blocks behind them."""
OUTSIDE = {
    "git": "the world's, not ours",
    "cd": "of the shell",
    "export": "of the shell",
    ".": "of the shell",
    "pip": "needs a package index; tests/packaging installs",
    "nvidia-smi": "of a GPU machine",
    "torchrun": "of torch; tests/training starts processes by it",
    "docker": "needs an engine; tests/packaging reads the files",
    "sbatch": "of a SLURM cluster",
}
"""First words of commands that are not ours, and why they are not run."""


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


PYTHON = [path for path in FILES if any(block.language == "python" for block in blocks(path))]


def test_every_block_is_of_a_kind_that_is_checked():
    for block in all_blocks():
        assert block.language in LANGUAGES, (
            f"{block.where}: a block of {block.language!r}; one of {', '.join(LANGUAGES)}"
        )
    assert len(all_blocks("python")) > 5
    assert len(all_blocks("console")) > 5


def write_files(path: Path, folder: Path) -> None:
    """The files that blocks of a page stand for, and the recipes of the clone."""
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    for block in blocks(path):
        if block.file is not None:
            file = folder / block.file
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text, encoding="utf-8")


def has(module: str | None) -> bool:
    """Whether a package is installed, none counting as that."""
    try:
        return module is None or importlib.util.find_spec(module) is not None
    except ImportError:  # the package that it would be in
        return False


def test_every_exception_stands_for_a_block():
    firsts = {
        f"{block.path.name}: {block.text.partition(chr(10))[0]}" for block in all_blocks("python")
    }
    assert {*NOT_RUN, *NEEDS} <= firsts


def run_python(path: Path) -> None:
    """Execute a page's Python blocks in order, in one namespace."""
    names = {"__name__": "__docs__"}
    for block in blocks(path):
        first = f"{path.name}: {block.text.partition(chr(10))[0]}"
        if block.language != "python" or first in NOT_RUN or not has(NEEDS.get(first)):
            continue
        source = "\n" * block.line + block.text  # so that a traceback names the line of the page
        exec(compile(source, short(path), "exec"), names)


@pytest.mark.parametrize("path", PYTHON, ids=short)
def test_python_runs(path, tmp_path, monkeypatch):
    """Training is cut to two steps of short replies; `test_python_runs_whole`
    leaves it as it is written."""
    import turnwright.api

    record = turnwright.api.train

    def cut(**settings):
        limits, train, warmup = (settings.pop(name, {}) for name in ("limits", "train", "warmup"))
        train = {key: value for key, value in train.items() if key != "stop_success"} | {"steps": 2}
        few = {"demos": 8, "steps": 2, "gate_success": 0.0, "gate_tasks": 8} if warmup else {}
        return record(
            **settings,
            display="none",
            limits=limits | {"turn_tokens": 8},
            train=train,
            warmup=warmup | few,
        )

    monkeypatch.setattr(turnwright, "train", cut)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    write_files(path, tmp_path)
    run_python(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [path for path in PYTHON if "tw.train(" in path.read_text(encoding="utf-8")], ids=short
)
def test_python_runs_whole(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    write_files(path, tmp_path)
    run_python(path)
    if path.name == "start.md":
        summary = json.loads((tmp_path / "runs" / "calc" / "summary.json").read_text())
        assert summary["success_after"] > summary["success_before"] + 0.3


@pytest.mark.parametrize("block", all_blocks("toml"), ids=lambda block: block.where)
def test_recipes_load(block: Block, tmp_path, monkeypatch):
    write_files(block.path, tmp_path)
    recipe = tmp_path / (block.file or "recipe.toml")
    recipe.parent.mkdir(exist_ok=True)
    recipe.write_text(block.text, encoding="utf-8")
    resolved = load(recipe, envs=("hop", "hop_json"))
    assert len(block.text.splitlines()) <= 25, f"{block.where}: a recipe has at most 25 lines"
    assert resolved.config.env or resolved.config.rollout.function


def test_json_parses():
    for block in all_blocks("json"):
        json.loads(block.text)


COMMANDS = [
    (block, command, printed)
    for block in all_blocks("console")
    for command, printed in block.commands
]


@pytest.mark.parametrize(
    ("block", "command", "printed"),
    COMMANDS,
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_commands_exist(block: Block, command, printed):
    if any(line.startswith("turnwright: error:") for line in printed):
        # It shows a mistake, and is run with the cheap ones.
        assert is_cheap(shlex.split(command)[1:]), f"{block.where}: a mistake that is not looked at"
        return
    for part in re.split(r"\s*(?:&&|\|)\s*", command):
        check_command(block, part)


INLINE = [
    Block(path, number, "console", command)
    for path in FILES
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    for command in re.findall(r"`(python \S+\.py[^`]*|(?:pytest|make) [^`]+)`", line)
]


@pytest.mark.parametrize("block", INLINE, ids=lambda block: f"{block.where} {block.text}")
def test_commands_within_sentences_exist(block: Block):
    check_command(block, block.text)


def check_command(block: Block, command: str) -> None:
    words = shlex.split(command.replace("{{ name }}", "my_env").replace("{{ cls }}", "MyEnv"))
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    program = words[0].rpartition("/")[2] if words[0].startswith(".venv/bin/") else words[0]
    if program == "turnwright":
        parse_command(words[1:])
    elif program == "make":
        targets = re.findall(
            r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
        )
        goals = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
        assert set(goals) <= set(targets), f"{block.where}: make has no {goals}"
    elif program == "python":
        script = words[1]
        assert (ROOT / script).is_file(), f"{block.where}: there is no {script}"
        known = with_neighbors(ROOT / script)
        for option in (word.partition("=")[0] for word in words[2:] if word.startswith("--")):
            assert f'"{option}"' in known, f"{block.where}: {script} has no option {option}"
    elif program == "pytest":
        assert all((ROOT / word).exists() for word in words[1:] if word.startswith("tests/")), (
            block.where
        )
    else:
        assert program in OUTSIDE or (ROOT / words[0]).is_file(), (
            f"{block.where}: what is {program!r}?"
        )


def with_neighbors(script: Path) -> str:
    """Return the text of a script and of the benchmarks that it imports, which may have its
    options."""
    text = script.read_text(encoding="utf-8")
    for name in re.findall(r"^from (\w+) import", text, re.MULTILINE):
        neighbor = ROOT / "benchmarks" / f"{name}.py"
        if neighbor.is_file():
            text += neighbor.read_text(encoding="utf-8")
    return text


CHEAP = [path for path in FILES if any(block.language == "console" for block in blocks(path))]


def is_cheap(words: list[str]) -> bool:
    """Commands that take a moment: they are run as written, in the order of the page."""
    if any(word in ("--help", "--version", "--keys", "--dry-run") for word in words):
        return True
    return (
        words[0] in ("init", "check")
        and words[1:2] != ["learn"]
        and not {"--model", "--engine"} & set(words)
    )


@pytest.mark.parametrize("path", CHEAP, ids=short)
def test_cheap_commands_run(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_files(path, tmp_path)
    for block in blocks(path):
        for command, printed in block.commands if block.language == "console" else ():
            words = shlex.split(command)
            if words[0] != "turnwright" or "{{" in command or not is_cheap(words[1:]):
                continue
            status = main(words[1:])
            out = capsys.readouterr()
            assert status == (
                2 if any(line.startswith("turnwright: error:") for line in printed) else 0
            ), out.err
            output = [line.rstrip() for line in (out.out + out.err).splitlines()]
            for line in printed:
                assert line == "..." or line in output, (
                    f"{block.where}: `{command}` does not print {line!r} but {output}"
                )


@pytest.mark.slow
def test_the_first_task_is_learned_by_the_commands_of_its_page(tmp_path, monkeypatch):
    page = ROOT / "docs" / "first_task.md"
    monkeypatch.chdir(tmp_path)
    commands = [
        command
        for block in blocks(page)
        if block.language == "console"
        for command, _ in block.commands
    ]
    words = [
        shlex.split(command)[1:]
        for command in commands
        if command.startswith("turnwright") and " view " not in command
    ]
    for command in words:
        assert main(command) == 0
        if command[0] == "init":
            monkeypatch.chdir(tmp_path / "depot")
            write_files(page, Path())
        if command[0] == "train" and "--resume" not in command:
            summary = json.loads(Path("runs/depot/summary.json").read_text())
            assert summary["success_after"] > 0.75 > 0.5 > summary["success_before"]
    assert json.loads(Path("runs/depot/config.json").read_text())["extended"] == {
        "train.steps": [120]
    }


def test_links_lead_somewhere():
    for path in FILES:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{short(path)}: {target} is not there"


def test_make_lists_its_targets():
    listed = subprocess.run(
        ["make", "--no-print-directory", "-C", str(ROOT), "help"],
        capture_output=True,
        text=True,
        check=True,
    )
    for target in ("setup", "quickstart", "test", "test-slow", "check"):
        assert f"make {target} " in listed.stdout
