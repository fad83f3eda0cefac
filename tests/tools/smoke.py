"""Run by `packages.py` in an environment that holds the wheel with one extra: what was installed
imports, all of ours that can be imported is, and an episode is played.

The arguments are the distributions that the extra asks for. The last line is JSON: how many modules
of ours were imported, and those whose packages are not there.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import turnwright as tw
from turnwright.plugins import PACKAGES


def import_distributions(names: list[str]) -> None:
    """Import every package of distributions that has a name of its own at the top."""
    for name in names:
        files = importlib.metadata.files(name) or []
        tops = {file.parts[0] for file in files if file.parts[-1] == "__init__.py"}
        packages = {top for top in tops if top.isidentifier()}
        modules = {file.stem for file in files if len(file.parts) == 1 and file.suffix == ".py"}
        for module in packages | modules:
            importlib.import_module(module)


def import_ours() -> tuple[int, list[str]]:
    """Import every module of the wheel; one may lack a package that is not installed, and nothing
    else."""
    imported, lacking = 0, []
    for package in ("turnwright", *PACKAGES):
        root = importlib.import_module(package)
        for info in pkgutil.walk_packages(root.__path__, f"{package}.", onerror=lambda name: None):
            if info.name.endswith("__main__"):
                continue
            try:
                importlib.import_module(info.name)
            except ModuleNotFoundError as error:
                if error.name is None or error.name.startswith("turnwright"):
                    raise
                lacking.append(error.name.partition(".")[0])
            else:
                imported += 1
    return imported, sorted(set(lacking))


def play() -> None:
    """Play an episode, without a model."""

    class Echo(tw.Env):
        def reset(self, task, *, seed=None):
            return "Say hello."

        def step(self, action):
            return tw.Step(reward=float("hello" in action.text), terminated=True)

    (trajectory,) = tw.rollout(Echo, [tw.Task("Say hello.")], engine=tw.ScriptedEngine(["hello"]))
    assert trajectory.reward == 1.0
    assert trajectory.sampled_tokens > 0


def train() -> None:
    """Train for a step, by the command of the wheel."""
    command = Path(sys.executable).with_name("turnwright")
    words = ["train", "--env.0.use", "hop", "--train.steps", "1", "--warmup.demos", "32"]
    words += ["--warmup.steps", "4", "--warmup.gate_success", "0", "--rollout.groups", "2"]
    words += ["--eval.tasks", "4", "--out", "run", "--display", "none"]
    subprocess.run([command, *words], check=True, stdout=subprocess.DEVNULL)
    assert Path("run", "summary.json").exists()


def main() -> None:
    """Do all of it."""
    import_distributions(sys.argv[1:])
    imported, lacking = import_ours()
    play()
    if "torch" not in lacking and "numba" not in lacking:
        train()
    print(json.dumps({"modules": imported, "lacking": lacking}))


if __name__ == "__main__":
    main()
