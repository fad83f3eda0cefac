"""User files of other frameworks that cannot be used: one line of the command line each, which
names what was expected."""

from pathlib import Path

import pytest

from turnwright.cli.main import main
from turnwright.config import load

SKYRL = "from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput\n\n\n"
GENERATOR = "from skyrl.train.generators.base import GeneratorInterface\n\n\n"
VERL = "from verl.tools.base_tool import BaseTool\n\n\n"
TOOLS = 'tools:\n  - class_name: "f.Mine"\n    config: {type: native}\n'
SWIFT = "from swift.rollout.multi_turn import MultiTurnScheduler\n\n\n"
GENERATE = "async def generate(args, sample, sampling_params):\n    return sample\n"
BUILT = (
    "class Mine:\n    def {}\n        pass\n\n\ndef build_env(sample=None, "
    "args=None):\n    return Mine()\n"
)
TRL_TOOL = '''
    def play(self, word: str) -> str:
        """
        Play.

        Args:
            word: A word.
        """
        return word
'''
NO_STEP = """
class Mine(BaseTextEnv):
    step = None

    def __init__(self, env_config=None, extras=None):
        pass
"""

CASES = {
    # SkyRL
    "skyrl: no file": ("g.py:Mine", {"f.py": "x = 1\n"}, {}, "g.py"),
    "skyrl: another name": (
        "f.py:Min",
        {"f.py": SKYRL + "class Mine(BaseTextEnv):\n    pass\n"},
        {},
        "did you mean 'Mine'",
    ),
    "skyrl: unknown id": (
        "skyrl:gsm9k",
        {},
        {},
        "no 'gsm9k', and skyrl-gym is not installed; pip install skyrl-gym",
    ),
    "skyrl: no step": ("f.py:Mine", {"f.py": SKYRL + NO_STEP}, {}, "Mine has no step"),
    "skyrl: arguments": (
        "f.py:Mine",
        {"f.py": SKYRL + "class Mine(BaseTextEnv):\n    def __init__(self, path):\n        pass\n"},
        {},
        "SkyRL-Gym calls it as Mine(env_config=..., extras=...)",
    ),
    "skyrl: generator": (
        "f.py:Mine",
        {"f.py": GENERATOR + "class Mine(GeneratorInterface):\n    pass\n"},
        {},
        "lacks generate; a generator has async generate(input_batch)",
    ),
    "skyrl: broken": (
        "f.py:Mine",
        {"f.py": SKYRL + "import nothing_of_that_name\n"},
        {},
        "nothing_of_that_name",
    ),
    "skyrl: module of the framework": (
        "f.py:Mine",
        {"f.py": "from skyrl_gym.envs.nowhere import Thing\n"},
        {},
        "No module named 'skyrl_gym.envs.nowhere'; it is not among our stand-ins for skyrl_gym; "
        "install SkyRL-Gym",
    ),
    # verl
    "verl: no file": (
        "verl:tools",
        {},
        {"tool_config_path": "t.yaml"},
        "no such file; check the path",
    ),
    "verl: no class": (
        "verl:tools",
        {"t.yaml": TOOLS, "f.py": VERL},
        {"tool_config_path": "t.yaml"},
        "has no 'Mine'",
    ),
    "verl: no execute": (
        "verl:tools",
        {"t.yaml": TOOLS, "f.py": "class Mine:\n    pass\n"},
        {"tool_config_path": "t.yaml"},
        "Mine has no execute; a tool derives from verl.tools.base_tool.BaseTool",
    ),
    "verl: arguments": (
        "f.py:Mine",
        {"f.py": VERL + "class Mine(BaseTool):\n    def __init__(self):\n        pass\n"},
        {},
        "Mine cannot be made: TypeError",
    ),
    "verl: no tool": (
        "verl:tools",
        {"f.py": "x = 1\n"},
        {"function_tool_path": "f.py"},
        "has no @function_tool",
    ),
    "verl: no YAML": (
        "verl:tools",
        {"t.yaml": "a: [\n"},
        {"tool_config_path": "t.yaml"},
        "cannot be read as YAML",
    ),
    "verl: broken": (
        "f.py:Mine",
        {"f.py": VERL + "class Mine(BaseTool)\n    pass\n"},
        {},
        "SyntaxError",
    ),
    # ms-swift
    "swift: no file": ("g.py:Mine", {"f.py": "x = 1\n"}, {}, "g.py"),
    "swift: no plugin": ("swift:gym_scheduler", {}, {"external_plugins": ["p.py"]}, "p.py"),
    "swift: another name": (
        "f.py:Min",
        {"f.py": SWIFT + "class Mine(MultiTurnScheduler):\n    pass\n"},
        {},
        "did you mean 'Mine'",
    ),
    "swift: unknown id": ("swift:math_tip_tricks", {}, {}, "did you mean 'math_tip_trick'"),
    "swift: no step": (
        "f.py:Mine",
        {
            "f.py": SWIFT
            + "class Mine(MultiTurnScheduler):\n    def check_finished(self, *args):\n        "
            "return True\n"
        },
        {},
        "Mine lacks step; a scheduler has step, or its own run",
    ),
    "swift: signature": (
        "f.py:Mine",
        {
            "f.py": SWIFT
            + "class Mine(MultiTurnScheduler):\n    def step(self, infer_request):\n        pass\n"
        },
        {},
        "Mine.step: too many positional arguments; ms-swift calls it with 3",
    ),
    "swift: broken": (
        "f.py:Mine",
        {"f.py": SWIFT + "import nothing_of_that_name\n"},
        {},
        "nothing_of_that_name",
    ),
    # slime
    "slime: no file": ("g.py:build_env", {"f.py": "x = 1\n"}, {}, "g.py"),
    "slime: no configuration": (
        "f.py:generate",
        {"f.py": GENERATE},
        {"custom_config_path": "c.yaml"},
        "cannot be read",
    ),
    "slime: another name": ("f.py:generat", {"f.py": GENERATE}, {}, "did you mean 'generate'"),
    "slime: no reward": (
        "f.py:generate",
        {"f.py": GENERATE},
        {"custom_rm_path": "f.py:score"},
        "f.py has no 'score'",
    ),
    "slime: signature": (
        "f.py:generate",
        {"f.py": "async def generate(args, sample):\n    return sample\n"},
        {},
        "a generate function of slime async def generate(args, sample, sampling_params)",
    ),
    "slime: broken": (
        "f.py:generate",
        {"f.py": "from slime.utils.types import Sample\n\n1 / 0\n"},
        {},
        "line 3: ZeroDivisionError",
    ),
    "slime: no step": (
        "f.py:build_env",
        {"f.py": BUILT.format("reset(self):")},
        {"rm_type": "math"},
        "f.py:build_env returned Mine, which has no step; return an environment with reset and "
        "step",
    ),
    "slime: signature of step": (
        "f.py:build_env",
        {"f.py": BUILT.format("step(self):")},
        {"rm_type": "math"},
        "Mine.step: too many positional arguments; slime calls it with 1",
    ),
    "slime: signature of format_observation": (
        "f.py:build_env",
        {
            "f.py": BUILT.format(
                "step(self, text):\n        pass\n\n    def format_observation(self):"
            )
        },
        {"rm_type": "math"},
        "Mine.format_observation: too many positional arguments; slime calls it with 1",
    ),
    "slime: build_env fails": (
        "f.py:build_env",
        {"f.py": 'def build_env(sample=None, args=None):\n    return sample.metadata["board"]\n'},
        {"rm_type": "math"},
        "f.py:2",
    ),
    # TRL
    "trl: no file": ("trl:GRPOTrainer", {}, {"environment_factory": "f.py:Mine"}, "f.py"),
    "trl: another name": (
        "trl:GRPOTrainer",
        {"f.py": "class Mine:\n    pass\n"},
        {"environment_factory": "f.py:Min"},
        "did you mean 'Mine'",
    ),
    "trl: no reset": (
        "trl:GRPOTrainer",
        {"f.py": "class Mine:\n" + TRL_TOOL},
        {"environment_factory": "f.py:Mine"},
        "Mine has no reset",
    ),
    "trl: no reward": (
        "f.py:Mine",
        {"f.py": "class Mine:\n    def reset(self, **row):\n        pass\n\n" + TRL_TOOL},
        {},
        "has no reward; give reward_funcs",
    ),
    "trl: signature": (
        "trl:GRPOTrainer",
        {"f.py": "def score(text):\n    return [0.0]\n"},
        {"reward_funcs": ["f.py:score"]},
        "score takes text; a reward takes completions",
    ),
    "trl: broken": (
        "f.py:Mine",
        {"f.py": "import trl\n\n1 / 0\n"},
        {},
        "f.py: line 3: ZeroDivisionError",
    ),
}


def recipe(folder, use, args):
    """Write a recipe with the environment and a task."""
    lines = [f"{key} = {value!r}" for key, value in args.items()]
    (folder / "rows.jsonl").write_text('{"prompt": "Go."}\n' * 9)
    text = [f'[[env]]\nuse = "{use}"\ntasks = "rows.jsonl"\n[env.args]', *lines]
    (folder / "run.toml").write_text("\n".join(text) + "\n")
    return str(folder / "run.toml")


@pytest.mark.parametrize(
    "command", [["check", "--recipe"], ["train", "--display", "none"]], ids=["check", "train"]
)
@pytest.mark.parametrize("name", CASES)
def test_one_line_that_names_what_was_expected(name, command, tmp_path, capsys, monkeypatch):
    use, files, args, said = CASES[name]
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    out = ["--out", str(tmp_path / "run")] if command[0] == "train" else []
    code = main([command[0], *command[1:], recipe(tmp_path, use, args), *out])
    shown = capsys.readouterr()
    lines = [line for line in (shown.err + shown.out).splitlines() if said in line]
    assert code in (1, 2), shown.out + shown.err
    assert len(lines) == 1, shown.out + shown.err
    assert "Traceback" not in shown.err


def test_files_next_to_the_recipe_are_found_from_any_directory(tmp_path, capsys):
    (tmp_path / "f.py").write_text("def score(completions, **kwargs):\n    return [0.0]\n")
    args = {"reward_funcs": ["f.py:score"], "tools": [], "system": "f.py is a file."}
    path = recipe(tmp_path, "trl:GRPOTrainer", args)
    assert load(Path(path)).config.env[0].args == {
        **args,
        "reward_funcs": [f"{tmp_path / 'f.py'}:score"],
    }
    assert main(["check", "--recipe", path]) == 0
    assert "ok    environment GRPOTrainer" in capsys.readouterr().out
