"""TRL's training scripts, played by what they give their trainer:
environments inside `main` too."""

import json
import textwrap

import pytest

import turnwright as tw
from turnwright.config.schema import EnvConfig
from turnwright.envs.resolve import resolve_env
from turnwright.errors import ConfigError

SCRIPT = """
import argparse
import sys

from trl import GRPOConfig, GRPOTrainer, RichProgressCallback, get_peft_config


def earned(environments, **kwargs):
    return [float(one.total) for one in environments]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bonus", type=int, default=1)
    args = parser.parse_args()

    class Adds:
        def __init__(self):
            self.total = 0

        def reset(self, start=0, **kwargs):
            self.total = start
            return " Add."

        def add(self, number: int) -> str:
            '''Add.

            Args:
                number: How much.
            '''
            self.total += number * args.bonus
            return str(self.total)

    rows = [{"prompt": [{"role": "user", "content": f"Row {n}."}], "start": 10 * n} for n in range(5)]
    trainer = GRPOTrainer(
        model="some/model",
        train_dataset=rows,
        reward_funcs=[earned, lambda completions, **kwargs: [1.0 for _ in completions]],
        args=GRPOConfig(output_dir="out", reward_weights=[1.0, 0.5], max_tool_calling_iterations=3),
        environment_factory=Adds,
        callbacks=[RichProgressCallback()],
    )
    trainer.train()
    trainer.save_model("out")
    raise RuntimeError("the script went on after train")


if __name__ == "__main__":
    main()
"""  # noqa: E501


def call(number):
    return (
        f"<tool_call>\n{json.dumps({'name': 'add', 'arguments': {'number': number}})}\n</tool_call>"
    )


def write(folder, source=SCRIPT):
    (folder / "script.py").write_text(textwrap.dedent(source))
    return folder


def made(folder, use="script.py:GRPOTrainer", **args):
    return resolve_env(EnvConfig(use=use, args=args), base=folder)


@pytest.mark.parametrize(("argv", "bonus"), [([], 1), (["--bonus", "3"], 3)])
def test_a_script_is_played_by_what_it_gives_its_trainer(argv, bonus, tmp_path):
    spec = made(write(tmp_path), **({"argv": argv} if argv else {}))
    tasks = spec.tasks("train", 0, 0) + spec.tasks("eval", 0, 0)
    assert sorted(task.messages[0].text for task in tasks) == [f"Row {n}." for n in range(5)]
    row = next(task for task in tasks if task.info["start"] == 20)
    (found,) = tw.rollout(
        spec.factory,
        [row],
        tw.ScriptedEngine([call(2), "end"]),
        limits=tw.Limits(turns=9, turn_tokens=200),
    )
    assert found.error is None, found.error
    assert found.messages[0].text == "Row 2. Add."
    assert [message.text for message in found.messages if message.role == "tool"] == [
        str(20 + 2 * bonus)
    ]
    assert found.reward == 20 + 2 * bonus + 0.5


def test_arguments_of_the_recipe_come_before_the_scripts(tmp_path):
    spec = made(write(tmp_path), reward_weights=[2.0, 0.0], max_tool_calling_iterations=0)
    task = tw.Task("Go.", info={"start": 1})
    (found,) = tw.rollout(
        spec.factory,
        [task],
        tw.ScriptedEngine([call(2), call(2)]),
        limits=tw.Limits(turns=9, turn_tokens=200),
    )
    assert (len(found.turns), str(found.stop)) == (1, "max_turns")


@pytest.mark.parametrize(
    ("source", "args", "words"),
    [
        (SCRIPT, {"argv": ["--bogus"]}, "exit status 2"),
        (SCRIPT, {"argv": "--bonus 3"}, "write the arguments of the command line as a list"),
        (SCRIPT, {"reward_func": ["x"]}, "did you mean 'reward_funcs'"),
        ("from trl import GRPOTrainer\n", {}, "ends without a trainer"),
        (
            "from trl import GRPOTrainer\nif __name__ == '__main__':\n    1 / 0\n",
            {},
            "ZeroDivisionError",
        ),
        (
            "from trl import GRPOTrainer\nif __name__ == '__main__':\n    import nowhere_at_all\n",
            {},
            "nowhere_at_all",
        ),
        (
            "from trl import GRPOTrainer\nif __name__ == '__main__':\n"
            "    GRPOTrainer('m', [len], rollout_func=print).train()\n",
            {},
            "rollout_func",
        ),
    ],
)
def test_a_script_that_cannot_be_played_says_why(source, args, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        made(write(tmp_path, source), **args)


def test_a_class_inside_main_is_named_with_the_way_to_play_it(tmp_path):
    with pytest.raises(ConfigError, match=r"defined inside main\(\).*file\.py:GRPOTrainer"):
        made(write(tmp_path), "script.py:Adds")


PARSED = """
from trl import GRPOConfig, ModelConfig, RLOOTrainer, ScriptArguments, TrlParser


def judge(completions, **kwargs):
    return [0.5 for _ in completions]


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    assert script_args.dataset_train_split == "train"
    assert model_args.model_name_or_path == "some/model"
    rows = [{"prompt": [{"role": "user", "content": "Go."}]}]
    trainer = RLOOTrainer(model_args.model_name_or_path, judge, args=training_args, train_dataset=rows)
    trainer.train()
"""  # noqa: E501


def test_a_script_with_trls_parser_and_positional_arguments(tmp_path):
    spec = made(
        write(tmp_path, PARSED),
        "script.py:RLOOTrainer",
        argv=["--model_name_or_path", "some/model"],
    )
    (found,) = tw.rollout(spec.factory, [tw.Task("Go.")], tw.ScriptedEngine(["ok"]))
    assert found.reward == 0.5


LIMITED = """
urls = iter(["http://one"])


class Car:
    def __init__(self):
        self.url = next(urls)

    def reset(self, **kwargs): ...

    def drive(self) -> str:
        '''Drive.'''
        return self.url


def judge(environments, **kwargs):
    return [1.0 for _ in environments]
"""


def test_a_factory_with_as_many_instances_as_addresses(tmp_path):
    (tmp_path / "car.py").write_text(LIMITED)
    drive = '<tool_call>\n{"name": "drive", "arguments": {}}\n</tool_call>'
    limits = tw.Limits(turns=3, turn_tokens=200)
    tasks = [tw.Task(str(number)) for number in range(6)]
    config = {"use": "car.py:Car", "args": {"reward_funcs": ["car.py:judge"]}}
    spec = resolve_env(EnvConfig(**config, faithful=True), base=tmp_path)
    found = tw.rollout(spec.factory, tasks, tw.ScriptedEngine([drive, "end"]), limits=limits)
    assert [one.reward for one in found] == [1.0] * 6

    (tmp_path / "car.py").write_text(LIMITED + "\n")
    spec = resolve_env(EnvConfig(**config), base=tmp_path)
    (found,) = tw.rollout(spec.factory, tasks[:1], tw.ScriptedEngine([drive, "end"]), limits=limits)
    assert "env.faithful = true" in found.error.message


PICTURES = """
from PIL import Image

from trl import GRPOConfig, GRPOTrainer


def judge(completions, image=None, **kwargs):
    return [1.0 for _ in completions]


if __name__ == "__main__":
    prompt = [{"role": "system", "content": "Look."}, {"role": "user", "content": "How many?"}]
    rows = [{"prompt": prompt, "image": Image.new("RGB", (56, 56), color)} for color in ("red", "blue")]
    GRPOTrainer("m", judge, GRPOConfig(), rows).train()
"""  # noqa: E501


def test_pictures_of_a_scripts_rows_are_before_the_first_message_of_the_user(tmp_path):
    tasks = made(write(tmp_path, PICTURES)).tasks("train", 0, 0)
    system, user = tasks[0].messages
    assert system.content == "Look."
    assert [type(part).__name__ for part in user.content] == ["Image", "str"]


def test_modules_of_the_stand_in_are_modules_and_other_names_are_stand_ins(tmp_path):
    (tmp_path / "user.py").write_text(
        "from trl import RichProgressCallback, rewards\n\n\ndef judge(completions, **kwargs):\n"
        "    return rewards.think_format_reward(completions)\n"
    )
    spec = resolve_env(
        EnvConfig(use="trl:GRPOTrainer", args={"reward_funcs": ["user.py:judge"]}), base=tmp_path
    )
    (found,) = tw.rollout(spec.factory, [tw.Task("Go.")], tw.ScriptedEngine(["<think>a</think>b"]))
    assert found.reward == 1.0
