"""`[[policy]]` of a recipe, and lists of tables in general: files, the command
line, what is refused."""

import json

import pytest

from turnwright.config import load
from turnwright.config.dump import load_run_config, to_json_dict, to_toml
from turnwright.config.recipe import config_of
from turnwright.errors import ConfigError

HOP = '[[env]]\nuse = "hop"\n'
TWO = (
    '[[policy]]\nname = "asker"\ntrain = { lr = 0.5, betas = [0.5, 0.6] }\n[[policy]]\nname '
    '= "solver"\nagents = ["solver-*"]\n'
)


def write(folder, text):
    (folder / "recipe.toml").write_text(HOP + text)
    return folder / "recipe.toml"


def test_policies_are_read_and_written(tmp_path):
    text = TWO + '[[policy]]\nname = "old"\ntrain = {}\n[policy.past]\nof = "asker"\nevery = 3\n'
    resolved = load(write(tmp_path, text))
    asker, solver, old = resolved.config.policy
    assert (asker.plays, solver.plays, old.plays) == (("asker",), ("solver-*",), ("old",))
    assert [policy.learns for policy in resolved.config.policy] == [True, True, False]
    assert config_of(resolved.config, asker).train.lr == 0.5
    assert config_of(resolved.config, asker).train.betas == (0.5, 0.6)
    assert config_of(resolved.config, solver).train == resolved.config.train
    (tmp_path / "again.toml").write_text(to_toml(resolved))
    assert load(tmp_path / "again.toml").config == resolved.config
    (tmp_path / "config.json").write_text(json.dumps(to_json_dict(resolved)))
    assert load_run_config(tmp_path).config == resolved.config


def test_keys_after_a_nested_table_stay_in_their_table(tmp_path):
    (tmp_path / "tasks.jsonl").write_text("")
    path = tmp_path / "recipe.toml"
    path.write_text(
        f'{HOP}tasks = "tasks.jsonl"\nfaithful = true\n[env.columns]\nanswer = "gold"\n'
    )
    resolved = load(path)
    (tmp_path / "again.toml").write_text(to_toml(resolved))
    assert load(tmp_path / "again.toml").config == resolved.config


def test_files_of_a_policys_own_keys_are_those_next_to_the_recipe(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def fair(trajectories, returns):\n    return returns\n")
    text = '[[policy]]\nname = "asker"\ntrain = { advantage = "mine.py:fair" }\n'
    expected = {"advantage": f"{tmp_path}/mine.py:fair"}
    assert load(write(tmp_path, text)).config.policy[0].train == expected
    monkeypatch.chdir(tmp_path)
    words = ["--policy.train.advantage", "mine.py:fair"]
    assert (
        load(write(tmp_path, '[[policy]]\nname = "asker"\n'), words).config.policy[0].train
        == expected
    )


def test_the_command_line_reaches_a_policy(tmp_path):
    one = '[[policy]]\nname = "asker"\n'
    assert load(write(tmp_path, one), ["--policy.train.lr", "0.25"]).config.policy[0].train == {
        "lr": 0.25
    }
    assert not load(write(tmp_path, TWO), ["--policy.1.trained", "false"]).config.policy[1].trained


@pytest.mark.parametrize(
    ("text", "overrides", "said"),
    [
        ('[[policy]]\nname = "a b"\n', (), ["policy.0.name", "letters, digits"]),
        ("[[policy]]\n", (), ["policy.0.name", "letters, digits"]),
        (
            '[[policy]]\nname = "a"\n[[policy]]\nname = "a"\nagents = ["b"]\n',
            (),
            ["policy.1.name", "its own name"],
        ),
        (
            '[[policy]]\nname = "a"\n[[policy]]\nname = "b"\nagents = ["a"]\n',
            (),
            ["policy.1.agents", "plays agent 'a' too"],
        ),
        (
            '[[policy]]\nname = "a"\ntrain = { lrr = 1 }\n',
            (),
            ["policy a", "did you mean 'train.lr'"],
        ),
        (
            '[[policy]]\nname = "a"\ntrain = { lr = -1.0 }\n',
            (),
            ["policy a: train.lr = -1.0", "at least 0"],
        ),
        (
            '[[policy]]\nname = "a"\ntrain = { kl_in = "reward" }\n',
            (),
            ["policy a: train.kl_in", "has no effect"],
        ),
        (
            '[[policy]]\nname = "a"\ntrain = { steps = 3 }\n',
            (),
            ["policy.0.train.steps", "is of the run"],
        ),
        (
            '[[policy]]\nname = "a"\n[[policy]]\nname = "b"\ntrained = false\ntrain = { lr = 0.1 '
            "}\n",
            (),
            ["policy.1.train", "has no effect"],
        ),
        (
            '[[policy]]\nname = "a"\ntrained = false\n',
            (),
            ["policy.0.trained", "no policy is trained"],
        ),
        (
            '[[policy]]\nname = "a"\nurls = ["http://x"]\npath = "m"\n',
            (),
            ["policy.0.urls", "one origin"],
        ),
        (
            '[[policy]]\nname = "a"\n[[policy]]\nname = "b"\npast = { of = "c" }\n',
            (),
            ["policy.1.past", "trained policy: a"],
        ),
        (
            '[[policy]]\nname = "a"\npast = { off = "c" }\n',
            (),
            ["policy.0.past.off", "of (the name"],
        ),
        (
            '[[policy]]\nname = "a"\n[[policy]]\nname = "b"\npast = { of = "a", keep = 0 }\n',
            (),
            ["past.keep", "at least 1"],
        ),
        (
            '[[policy]]\nname = "a"\n[[policy]]\nname = "b"\n[train]\nreward_weight = 0.0\n'
            '[[teacher]]\npath = "m"\npolicies = ["a"]\n',
            (),
            ["policy b: train.reward_weight = 0", "teacher.policies"],
        ),
        ('[[policy]]\nname = "a"\n[engine]\nkind = "vllm"\n', (), ["engine.update", '"lora"']),
        ('policy = "a"\n', (), ['policy = "a"', "[[policy]]"]),
        ('[[policy]]\nname = "a"\n[quant]\nkind = "int4"\n', (), ["quant.kind", "one policy"]),
        (
            TWO,
            ("--policy.trained", "false"),
            ["choose one: --policy.0 (asker), --policy.1 (solver)"],
        ),
        ("", ("--policy.1.name", "a"), ["no such [[policy]]"]),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(tmp_path, text, overrides, said):
    path = tmp_path / "recipe.toml"
    path.write_text(text + HOP if text.startswith("policy") else HOP + text)
    with pytest.raises(ConfigError) as refused:
        load(path, overrides)
    assert "\n" not in str(refused.value)
    assert all(one in str(refused.value) for one in said), refused.value
