"""A setting has an effect or is refused, in recipes, on the command line and in Python."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from operator import attrgetter
from types import NoneType
from typing import Literal, get_args, get_origin

import pytest

import turnwright as tw
from turnwright.config import (
    EnvConfig,
    EnvRules,
    Limits,
    PolicyConfig,
    RetryRules,
    RunConfig,
    TeacherConfig,
    load,
)
from turnwright.config.fields import field_type, known_keys, table_lists
from turnwright.config.names import ALGORITHMS, ENGINES, SAMPLERS
from turnwright.config.rules import Context
from turnwright.config.validation import validate
from turnwright.config.values import union_members
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
        (
            '[train]\nfixed_length = 64\naggregation = "token"\nalgorithm = "dr_grpo"',
            "train.fixed_length",
        ),
        ('[train]\nvision = "frozen"', "train.vision"),
        ("[model]\npatch = 4", "model.patch"),
        ('[rollout]\nsanity = "off"\nsanity_share = 0.5', "rollout.sanity_share"),
        ("[warmup]\ngate_success = 0.4", "warmup.gate_success"),
        ('[track]\nproject = "mine"', "track.project"),
    ],
)
def test_a_key_without_what_it_needs_is_refused_by_name(tmp_path, text, key):
    with pytest.raises(
        ConfigError, match=f"{key.replace('.', '[.]')} = .*has no effect"
    ) as refused:
        load(write(tmp_path, f"{HOP}{text}\n"))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "text", ['rejected_replies = "untrained"', "max_resamples_per_turn = 5", "retries.episode = 3"]
)
def test_a_rule_of_an_environment_likewise(tmp_path, text):
    with pytest.raises(
        ConfigError, match=rf"env[.]0[.]{text.split()[0]} = .*has no effect: it needs env[.]"
    ):
        load(write(tmp_path, f"{HOP}{text}\n"))


def sections_of(config):
    """The class and the only table of each section that has needs, by name."""
    return {prefix.removesuffix(".0"): section for prefix, section in config.sections() if prefix}


def with_value(config, key, value):
    """Return a configuration with another value of a dotted key
    (`env.name`, `env.retries.turn`)."""
    name, *inner, field = key.split(".")
    section = sections_of(config)[name]
    if inner:
        value, field = replace(getattr(section, inner[0]), **{field: value}), inner[0]
    section = replace(section, **{field: value})
    return replace(config, **{name: (section,) if name in table_lists() else section})


def values_to_try(key):
    """Return values of a key that differ in everything that a need could ask of it."""
    tried = []
    for hint in union_members(
        field_type(f"{key.partition('.')[0]}.0.{key.partition('.')[2]}") or field_type(key)
    ):
        if get_origin(hint) is Literal:
            tried += get_args(hint)
        elif get_origin(hint) is tuple:
            tried += [(), ("x",)]
        elif hint is NoneType:
            tried += [None]
        else:
            tried += {
                bool: [False, True],
                int: [0, 3],
                float: [0.0, 0.5],
                str: ["", "x", "file.py:name", *ENGINES, *ALGORITHMS, *SAMPLERS],
            }.get(hint, [{}, {"answer": "gold"}])
    return tried


def all_needs(config):
    """Return (section, keys, words) -> whether it holds, for every need of a configuration."""
    return {
        (name, need.keys, need.words): need.holds
        for name, section in sections_of(config).items()
        for need in section.needs(config)
    }


EVERY = RunConfig(
    env=(EnvConfig(use="hop"),), policy=(PolicyConfig(name="a"),), teacher=(TeacherConfig(),)
)
KEYS = [key for key in known_keys() if "." in key]


def test_every_key_that_needs_something_is_refused_without_it():
    """The next key gets the rule by stating its need: nothing here names a key."""
    config = RunConfig(env=(EnvConfig(use="hop"),))
    refused = 0
    for key in KEYS:
        section, _, name = key.partition(".")
        if section not in sections_of(config):
            continue
        same = attrgetter(name)(sections_of(config)[section])
        changed = with_value(
            config, key, [value for value in values_to_try(key) if value != same][-1]
        )
        place = key.replace("env.", "env.0.")
        if any(
            name in need.keys and not need.holds
            for need in sections_of(changed)[section].needs(changed)
        ):
            refused += 1
            with pytest.raises(ConfigError, match=f"{place} = .*has no effect"):
                validate(changed, {place: "recipe.toml"}, "recipe.toml", Context(training=False))
    assert refused > 60


WORDS = {need: set(KEYS).intersection(need[2].split()) for need in all_needs(EVERY)}


def drawn(rng, keys):
    """Return a configuration with values of some keys that were drawn."""
    config = EVERY
    for key in keys:
        config = with_value(config, key, rng.choice(values_to_try(key)))
    return config


def test_no_key_decides_that_the_words_of_a_need_do_not_name():
    rng = random.Random(0)
    for _ in range(8):
        config = drawn(rng, sorted(set().union(*WORDS.values())))
        before = all_needs(config)
        for key in KEYS:
            for value in values_to_try(key):
                after = all_needs(with_value(config, key, value))
                assert after.keys() == before.keys()
                for need in after:
                    # A key may need nothing at a value of its own: no retries per episode.
                    own = {f"{need[0]}.{name}" for name in need[1]}
                    assert after[need] == before[need] or key in WORDS[need] | own, (need, key)


@pytest.mark.parametrize("need", WORDS, ids=lambda need: f"{need[0]}.{need[1][0]}")
def test_each_key_decides_that_the_words_of_a_need_name(need):
    rng = random.Random(0)
    undecided = set(WORDS[need])
    for _ in range(2000):
        if not undecided:
            return
        config = drawn(rng, sorted(WORDS[need]))
        if need[0] != "teacher" and rng.random() < 0.5:
            config = replace(config, teacher=())
        for key in sorted(undecided):
            held = {all_needs(with_value(config, key, value))[need] for value in values_to_try(key)}
            undecided -= {key} if len(held) == 2 else set()
    raise AssertionError(undecided)


def test_a_default_that_is_written_out_is_no_mistake_and_the_command_line_may_switch_off(tmp_path):
    path = write(
        tmp_path,
        f'{HOP}[train]\nkl = 0.1\nkl_in = "reward"\nfixed_length = 1024\n[model]\nheads = 4\n',
    )
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    config = load(path, ["--train.kl", "0", "--model.path", str(tmp_path / "model")]).config
    assert (config.train.kl, config.model.heads) == (0.0, 4)
    with pytest.raises(
        ConfigError, match=r"--model.heads 4: has no effect: it needs model.path none"
    ):
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
        "try: tw.train(env=E, tasks=[tw.Task(str(n)) for n in range(20)], out=sys.argv[1], display='none')\n"  # noqa: E501
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "nowhere/run"], capture_output=True, text=True
    )
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
    return tw.rollout(
        env, [tw.Task(text) for text in tasks], engine=tw.ScriptedEngine(["x"] * 40), **settings
    )


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
        found = play(
            Counts,
            ("short", "long " * 60, "brief"),
            samples=2,
            limits=Limits(prompt_tokens=60),
            out=tmp_path / "run",
        )
    assert [t.task.messages[0].text for t in found] == ["short", "short", "brief", "brief"]
    assert [str(w.message).partition(": ")[0] for w in caught] == [
        "skipped 1 tasks with prompts over 60 tokens"
    ]
    assert json.loads((tmp_path / "run" / "left_out.json").read_text())["count"] == 1


@pytest.mark.parametrize(
    "limits",
    [
        {"turns": -1},
        {"turn_tokens": 0},
        {"wall_clock_s": -1.0},
        {"env_s": float("nan")},
        {"prompt_tokens": 0},
        {"turns": "3"},
    ],
)
def test_limits_out_of_their_range_are_refused_in_python_too(limits):
    with pytest.raises(UsageError, match=next(iter(limits))):
        play(Counts, limits=Limits(**limits))


@pytest.mark.parametrize(
    ("retries", "expected"),
    [({"turn": -1}, "retries.turn = -1: must be at least 0"), ({"wait_s": -1.0}, "retries.wait_s = -1.0: must be at least 0"),  # noqa: E501
     ({"engine": "2"}, "retries.engine = '2': must be an integer")],
)  # fmt: skip
def test_rules_likewise(retries, expected):
    with pytest.raises(UsageError, match=re.escape(expected)):
        play(Counts, rules=EnvRules(retries=RetryRules(**retries)))


@pytest.mark.parametrize(
    "rules",
    [{"isolation": "process"}, {"reward_isolation": "process"}, {"on_invalid": "resample"},
     {"retries": RetryRules(turn=2)}, {"retries": RetryRules(reward=1)}],
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
    assert play(once, rules=EnvRules(retries=RetryRules(engine=1)))[0].reward == 1.0
