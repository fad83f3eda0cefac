"""`turnwright completion`: what a real bash completes with its script, and what others' have."""

from __future__ import annotations

import builtins
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from turnwright.cli.completion import SHELLS, completion_script
from turnwright.cli.main import COMMANDS, main
from turnwright.config.fields import known_keys
from turnwright.plugins import OURS

pytestmark = pytest.mark.beside("view", "serve", "cluster", "compat")

COMPLETE = """\
source "$SCRIPT"
COMP_WORDS=("$@")
COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
COMPREPLY=()
_shtab_turnwright
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("completion") / "turnwright"
    file.write_text(completion_script("bash"))
    return file


def completed(script: Path, *words: str) -> list[str]:
    """What a bash offers for the last of the words."""
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run(
        [bash, "-c", COMPLETE, "bash", "turnwright", *words],
        env={"SCRIPT": str(script), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_completes_commands_of_the_core_and_of_packages(script: Path) -> None:
    assert set(completed(script, "")) >= {*COMMANDS, *OURS["commands"]}
    assert completed(script, "tra") == ["train", "track"]


def test_bash_completes_options_their_values_and_recipe_keys(script: Path) -> None:
    assert completed(script, "train", "--log-l") == ["--log-level"]
    assert "debug" in completed(script, "train", "--log-level", "")
    assert "--train.lr" in completed(script, "train", "--train.l")
    assert completed(script, "eval", "--limits.turns") == ["--limits.turns"]
    assert "grpo" in completed(script, "train", "--train.algorithm", "g")
    assert "hop" in completed(script, "rollout", "--env.use", "h")
    assert completed(script, "train", "--eval.greedy", "") == ["true", "false"]
    assert completed(script, "view", "--train.l") == []  # it reads no recipe


def test_bash_completes_run_directories_and_recipes(script: Path, tmp_path: Path) -> None:
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "recipe.toml").touch()
    there = f"{tmp_path}/"
    assert completed(script, "eval", "--run", there) == [f"{there}runs"]
    assert completed(script, "view", f"{there}runs/") == [f"{there}runs/first"]
    assert f"{there}recipe.toml" in completed(script, "train", there)


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_every_command_and_key(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    said = capsys.readouterr().out
    for name in (*COMMANDS, *OURS["commands"]):
        assert name in said
    keys = [key.replace("_", "-") for key in known_keys() if "." in key]
    assert [key for key in keys if key not in said] == []


def test_without_the_package_that_writes_scripts_the_error_names_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name == "shtab":
            raise ImportError(name)
        return load(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert main(["completion", "bash"]) == 2
    assert "pip install 'turnwright[completion]'" in capsys.readouterr().err
