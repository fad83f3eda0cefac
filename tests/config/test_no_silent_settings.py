"""A setting has an effect or is refused, in recipes, on the command line and in Python."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from dataclasses import fields, replace

import pytest

import turnwright as tw
from turnwright.config import EnvConfig, EnvRules, Limits, RunConfig, load
from turnwright.errors import ConfigError, UsageError
from turnwright_view import replay_loop

HOP = '[[env]]\nuse = "hop"\n'


def write(folder, text):
    path = folder / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[lora]\nalpha = 32.0", "lora.alpha"),
        ("[lora]\ndropout = 0.1", "lora.dropout"),
        ("[engine]\nservers = 4", "engine.servers"),
        ('[engine]\nkey_env = "KEY"', "engine.key_env"),
        ("[engine]\nconcurrency = 8", "engine.concurrency"),
        ('[engine]\nkind = "vllm"\nurls = ["http://a:1"]\nservers = 2', "engine.servers"),
        ('[engine]\nkind = "vllm"\ngroup_host = "10.0.0.1"', "engine.group_host"),
        ('[train]\nkl_in = "reward"', "train.kl_in"),
        ('[train]\nkl_estimator = "k2"', "train.kl_estimator"),
        ('[train]\nreference = "copy"', "train.reference"),
        ("[train]\noverlong_buffer = 0.5", "train.overlong_buffer"),
        ('[train]\nfixed_length = 64\naggregation = "token"', "train.fixed_length"),
        ('[train]\nfixed_length = 64\naggregation = "token"\nalgorithm = "dr_grpo"', "train.fixed_length"),
        ('[train]\nvision = "frozen"', "train.vision"),
        ("[model]\npatch = 4", "model.patch"),
        ('[rollout]\nsanity = "off"\nsanity_share = 0.5', "rollout.sanity_share"),
        ("[warmup]\ngate_success = 0.4", "warmup.gate_success"),
        ('[track]\nproject = "mine"', "track.project"),
    ],
)
def test_a_key_without_what_it_needs_is_refused_by_name(tmp_path, text, key):
    with pytest.raises(ConfigError, match=f"{key.replace('.', '[.]')} = .*has no effect") as refused:
        load(write(tmp_path, f"{HOP}{text}\n"))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ['rejected_replies = "untrained"', "max_resamples_per_turn = 5", "max_env_retries = 3"])
def test_a_rule_of_an_environment_likewise(tmp_path, text):
    with pytest.raises(ConfigError, match=rf"env[.]0[.]{text.split()[0]} = .*has no effect: it needs env[.]"):
        load(write(tmp_path, f"{HOP}{text}\n"))


def test_every_key_that_declares_a_need_is_refused_alone_and_taken_with_it(tmp_path):
    """The next key gets the rule by declaring its need: nothing here names a key."""
    from turnwright.config.constraints import Needs, declared, defaults
    from turnwright.config.fields import field_types, union_members
    from turnwright.config.validation import validate

    other = {int: lambda x: x + 1, float: lambda x: x / 2 + 0.07, bool: lambda x: not x}
    other |= {tuple: lambda x: ("x",), dict: lambda x: {"answer": "gold"}}
    seen = 0
    for section in fields(RunConfig):
        kind = EnvConfig if section.name == "env" else type(getattr(RunConfig(), section.name))
        if not hasattr(kind, "__dataclass_fields__"):
            continue
        for name, needs in declared(kind).items():
            default = defaults(kind)[name]
            number = next((kind_of for kind_of in (float, int) if kind_of in union_members(field_types(kind)[name])), None)
            value = number(1) if default is None and number else other.get(type(default), lambda x: "given")(default)
            made = replace(EnvConfig(use="hop") if kind is EnvConfig else kind(), **{name: value})
            env = (made if kind is EnvConfig else EnvConfig(use="hop"),)
            config = replace(RunConfig(env=env), **({} if kind is EnvConfig else {section.name: made}))
            key = f"env.0.{name}" if kind is EnvConfig else f"{section.name}.{name}"
            unmet = [need for need in needs if not need.met(lambda key, config=config, made=made: _value(config, made, key))]
            if unmet:
                seen += 1
                with pytest.raises(ConfigError, match=f"{key} = .*has no effect"):
                    validate(config, {key: "recipe.toml"}, "recipe.toml", training=False)
            assert all(isinstance(need, Needs) for need in needs)
    assert seen > 25


def _value(config, made, key):
    if key.startswith("env."):
        return getattr(made, key[4:])
    for part in key.split("."):
        config = getattr(config, part)
    return config


def test_a_default_that_is_written_out_is_no_mistake_and_the_command_line_may_switch_off(tmp_path):
    path = write(tmp_path, f'{HOP}[train]\nkl = 0.1\nkl_in = "reward"\nfixed_length = 1024\n[model]\nheads = 4\n')
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    config = load(path, ["--train.kl", "0", "--model.path", str(tmp_path / "model")]).config
    assert (config.train.kl, config.model.heads) == (0.0, 4)
    with pytest.raises(ConfigError, match=r"--model.heads 4: has no effect: it needs model.path none"):
        load(write(tmp_path, HOP), ["--model.heads", "4", "--model.path", str(tmp_path / "model")])


def test_sections_of_python_are_held_to_what_recipes_are_held_to(tmp_path):
    class Env(tw.Env):
        def reset(self, task, *, seed=None):
            return "?"

        def step(self, action):
            return tw.Step(None, terminated=True)

    tasks = [tw.Task(str(n)) for n in range(20)]
    for settings, expected in (
        ({"train": {"stepz": 1}}, "unknown key 'train.stepz'; did you mean 'train.steps'"),
        ({"train": {"steps": "many"}}, "must be an integer"),
        ({"train": {"lr": -1.0}}, "train.lr = -1.0: must be at least 0"),
        ({"lora": {"alpha": 4.0}}, "lora.alpha = 4.0: has no effect"),
        ({"rollout": {"groups": 0}}, "rollout.groups = 0: must be at least 1"),
    ):
        with pytest.raises(UsageError) as refused:
            tw.train(env=Env, tasks=tasks, out=tmp_path / "run", display="none", **settings)
        assert expected in str(refused.value)
        assert not (tmp_path / "run").exists()


def test_training_without_torch_says_what_to_install():
    code = (
        "import sys\nsys.modules['torch'] = None\nimport turnwright as tw\n"
        "class E(tw.Env):\n    def reset(self, task, *, seed=None): return '?'\n"
        "    def step(self, action): return tw.Step(None, terminated=True)\n"
        "try: tw.train(env=E, tasks=[tw.Task(str(n)) for n in range(20)], out=sys.argv[1], display='none')\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, "nowhere/run"], capture_output=True, text=True)
    assert "pip install 'turnwright[train]'" in done.stdout, done.stdout + done.stderr


# tw.rollout


class Counts(tw.Env):
    """Goes on for ever, but for its own limit."""

    def __init__(self, most: int = 2) -> None:
        self.max_turns = most

    def reset(self, task, *, seed=None):
        return task.messages

    def step(self, action):
        return tw.Step("on")


def play(env, tasks=("a",), **settings):
    return tw.rollout(env, [tw.Task(text) for text in tasks], engine=tw.ScriptedEngine(["x"] * 40), **settings)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_turns_that_an_environment_grants_itself_are_all_that_there_are(isolation, tmp_path):
    rules = EnvRules(isolation=isolation)
    (trajectory,) = play(Counts, rules=rules, limits=Limits(turns=6), out=tmp_path / "run")
    assert (len(trajectory.turns), str(trajectory.stop)) == (2, "max_turns")
    assert replay_loop(tmp_path / "run").ok
    (fewer,) = play(Counts, limits=Limits(turns=1))
    assert len(fewer.turns) == 1


def test_what_is_no_number_of_turns_fails_its_episode():
    (trajectory,) = play(lambda: Counts("many"))
    assert "max_turns is 'many'" in trajectory.error.message


def test_tasks_over_the_limit_of_prompts_are_left_out_with_a_warning_and_a_list(tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = play(Counts, ("short", "long " * 60, "brief"), samples=2, limits=Limits(prompt_tokens=60), out=tmp_path / "run")
    assert [t.task.messages[0].text for t in found] == ["short", "short", "brief", "brief"]
    assert [str(w.message).partition(": ")[0] for w in caught] == ["skipped 1 tasks with prompts over 60 tokens"]
    assert json.loads((tmp_path / "run" / "left_out.json").read_text())["count"] == 1


@pytest.mark.parametrize(
    "limits",
    [{"turns": -1}, {"turn_tokens": 0}, {"wall_clock_s": -1.0}, {"env_s": float("nan")}, {"prompt_tokens": 0}, {"turns": "3"}],
)
def test_limits_out_of_their_range_are_refused_in_python_too(limits):
    with pytest.raises(UsageError, match=next(iter(limits))):
        play(Counts, limits=Limits(**limits))


@pytest.mark.parametrize(
    "rules", [{"max_env_retries_per_turn": -1}, {"retry_wait_s": -1.0}, {"max_engine_retries_per_turn": -2}]
)
def test_rules_likewise(rules):
    with pytest.raises(UsageError, match=next(iter(rules))):
        play(Counts, rules=EnvRules(**rules))


@pytest.mark.parametrize(
    "rules",
    [{"isolation": "process"}, {"reward_isolation": "process"}, {"max_env_retries_per_turn": 2}, {"on_invalid": "resample"},
     {"max_reward_retries": 1}],
)  # fmt: skip
def test_rules_that_a_play_function_has_no_use_for_are_refused(rules, tmp_path):
    async def once(task, model):
        await model.generate("?")
        return 1.0

    once.tasks = lambda split, n, seed: [tw.Task(f"{split} {i}") for i in range(n)]
    with pytest.raises(UsageError, match="no effect on a play function"):
        play(once, rules=EnvRules(**rules))
    with pytest.raises(UsageError, match="no effect on a play function"):
        tw.train(env=once, rules=EnvRules(**rules), out=tmp_path / "run", display="none")
    assert play(once, rules=EnvRules(max_engine_retries_per_turn=1))[0].reward == 1.0
