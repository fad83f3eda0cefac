"""The mistakes of docs/mistakes.md: what each is called there, the files it needs, and the
command that makes it."""

from __future__ import annotations

GOOD = """
import turnwright as tw

class Echo(tw.Env):
    def reset(self, task, *, seed=None):
        self.word = task.info["word"]
        return f"say {self.word}"
    def step(self, action):
        return tw.Step(reward=float(action.text == self.word), terminated=True)
    @staticmethod
    def tasks(split, n, seed):
        return [tw.Task(info={"word": f"{split}{i}"}) for i in range(n or 8)]
    @staticmethod
    def solver(messages, rng):
        return messages[-1].text.split()[-1]
"""


def env(old: str, new: str) -> dict[str, str]:
    """Return the environment's file with one change."""
    assert old in GOOD
    return {"echo.py": GOOD.replace(old, new)}


def recipe(text: str) -> dict[str, str]:
    """Return a recipe's file."""
    return {"recipe.toml": text}


USE = '[[env]]\nuse = "echo.py:Echo"\n'
SMALL = (
    USE
    + "[model]\nhidden = 16\nheads = 1\nkv_heads = 1\nlayers = 1\n[warmup]\ndemos = 8\nsteps = 2\n"
)
TRAIN = "train recipe.toml --display none"
CHECK = "check echo.py:Echo"

MISTAKES: dict[str, tuple[dict[str, str], str]] = {
    "a misspelled recipe": ({}, "train recpe.toml"),
    "a misspelled key": (recipe(USE + "[train]\nstep = 3\n"), TRAIN),
    "a number in quotes": (recipe(USE + '[train]\nsteps = "60"\n'), TRAIN),
    "a setting without effect": (recipe(USE + '[train]\nkl_estimator = "k1"\n'), TRAIN),
    "an option before the command": ({}, "-v train recipe.toml"),
    "an option without its section": (recipe(USE), f"{TRAIN} --lr 1e-4"),
    "a key like no other": (recipe(USE + "[train]\nxyzzy = 3\n"), TRAIN),
    "a step with done": (env("terminated=True", "done=True"), CHECK),
    "an action taken for text": (
        env("action.text == self.word", "action.strip() == self.word"),
        CHECK,
    ),
    "a field that a task lacks": (env('task.info["word"]', "task.word"), CHECK),
    "tasks without @staticmethod": (
        env("    @staticmethod\n    def tasks", "    def tasks"),
        CHECK,
    ),
    "a solver without @staticmethod": (
        env("    @staticmethod\n    def solver", "    def solver"),
        CHECK,
    ),
    "a misspelled environment": ({}, "check hopp"),
    "a file without a class": ({}, "check echo.py"),
    "a class that the file lacks": ({}, "check echo.py:Ecco"),
    "an algorithm that there is not": (recipe(USE), f"{TRAIN} --train.algorithm gpro"),
    "a directory without a model": (recipe(USE), f"{TRAIN} --model.path ."),
    "a model of the hub, without a network": (recipe(USE), f"{TRAIN} --model.path Qwen/Qwen3-0.6B"),
    "reset without seed": (env("task, *, seed=None", "task"), CHECK),
    "no step": (env("def step", "def stop"), CHECK),
    "a class that is no environment": (env("(tw.Env)", ""), CHECK),
    "a step that returns text": (
        env(
            "return tw.Step(reward=float(action.text == self.word), terminated=True)", 'return "no"'
        ),
        CHECK,
    ),
    "a reward that is text": (env("reward=float(action.text == self.word)", 'reward="1"'), CHECK),
    "a bug in reset": (env('task.info["word"]', 'task.info["wrod"]'), CHECK),
    "an observation of ten megabytes": (
        env('return f"say {self.word}"', 'return "say" * 3_500_000'),
        CHECK,
    ),
    "an environment without tasks": (env("def tasks", "def task_list"), CHECK),
    "the same tasks in both splits": (env('f"{split}{i}"', 'f"{i}"'), f"{TRAIN}"),
    "a task function that fails": (env("range(n or 8)", "range(none)"), TRAIN),
    "a solver that the reward refuses": (env("split()[-1]", "split()[0]"), CHECK),
    "demonstrations without a player": (env("def solver", "def solve"), TRAIN),
    "a bug that only training meets": (
        env("action.text == self.word", "action.word == self.word"),
        TRAIN,
    ),
    "a run in the directory of another": ({"runs/run/config.json": "{}"}, TRAIN),
    "resuming what is no run": ({"runs/run/notes.txt": ""}, "train --resume runs/run"),
    "changing a run that is resumed": ({}, "train --resume runs/run --train.lr 1"),
}
