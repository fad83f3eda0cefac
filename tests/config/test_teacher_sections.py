"""Recipes with [[teacher]]: what has no effect, or no meaning, is refused by name."""

import pytest

from turnwright.config import load
from turnwright.errors import ConfigError

HOP = '[[env]]\nuse = "hop"\n'
URL = 'urls = ["http://a:1"]'


def read(folder, text):
    path = folder / "recipe.toml"
    path.write_text(f"{HOP}{text}\n", encoding="utf-8")
    return load(path).config


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[[teacher]]", r"teacher[.]0[.]path = .*is missing, and so are urls and self"),
        (
            f'[[teacher]]\npath = "m"\n{URL}',
            "teacher[.]0[.]path = .*is given beside urls; a teacher has exactly one",
        ),
        (
            "[[teacher]]\nself = true",
            "teacher[.]0[.]self = .*has no effect: it needs teacher.hint given",
        ),
        (
            '[[teacher]]\npath = "m"\ntop = 4',
            "teacher[.]0[.]top = 4: has no effect: it needs teacher.signal = loss",
        ),
        (
            '[[teacher]]\npath = "m"\ndivergence = "js"',
            "teacher[.]0[.]divergence = .*has no effect",
        ),
        (
            '[[teacher]]\npath = "m"\nsignal = "loss"\nbound = 1.0',
            "teacher[.]0[.]bound = .*has no effect",
        ),
        ('[[teacher]]\npath = "m"\ntimeout_s = 1.0', "teacher[.]0[.]timeout_s = .*has no effect"),
        (
            '[[teacher]]\npath = "m"\npolicies = ["a"]',
            "teacher[.]0[.]policies = .*has no effect: it needs policy given",
        ),
        (
            f'[[teacher]]\n{URL}\nsignal = "loss"',
            "teacher[.]0[.]top = .*must be set: servers send the most likely ids only",
        ),
        (
            f"[rollout]\ntop_p = 0.9\n[[teacher]]\n{URL}",
            "teacher[.]0[.]urls = .*but rollout.top_p cuts it",
        ),
        (
            '[[teacher]]\npath = "m"\nenvironments = ["hup"]',
            "'hup' is none of the run's; did you mean 'hop'",
        ),
        ('[[teacher]]\npath = "m"\nhint = "none.py:hint"', "teacher[.]0[.]hint = .*no such file"),
        (
            '[[teacher]]\npath = "m"\nname = "a"\n[[teacher]]\npath = "n"\nname = "a"',
            "teacher[.]1[.]name = .*another teacher has this name too",
        ),
        (
            "[train]\nreward_weight = 0.0",
            "train.reward_weight = 0.0: has no effect: it needs teacher given",
        ),
        (
            '[train]\nreward_weight = 0.0\nadvantage = "mean"\n[[teacher]]\npath = "m"',
            "train.advantage = .*has no effect: it needs train.reward_weight > 0",
        ),
        (
            '[train]\nreward_weight = 0.0\nkl = 0.1\nkl_in = "reward"\n[[teacher]]\npath = "m"',
            "train.kl_in = .*subtracts from the reward, whose weight is 0",
        ),
        (
            '[train]\nreward_weight = 0.0\nclip_high = 0.4\n[[teacher]]\npath = "m"\nsignal = '
            '"loss"',
            "train.clip_high = 0.4: is about advantages",
        ),
        (
            '[rollout]\ngroup_size = 1\n[[teacher]]\npath = "m"',
            "rollout.group_size = 1: must be at least 2",
        ),
    ],
    ids=range(18),
)
def test_a_teacher_that_does_nothing_is_refused(tmp_path, text, error):
    with pytest.raises(ConfigError, match=error) as refused:
        read(tmp_path, text)
    assert "\n" not in str(refused.value)


def test_teachers_alone_take_groups_of_one(tmp_path):
    config = read(
        tmp_path,
        '[rollout]\ngroup_size = 1\n[train]\nreward_weight = 0.0\n[[teacher]]\npath = "m"\nsignal '
        '= "loss"',
    )
    (teacher,) = config.teacher
    assert teacher.path == str(tmp_path / "m")
    assert teacher.signal == "loss"


def test_policies_have_the_teachers_that_are_for_them(tmp_path):
    from turnwright.config.recipe import config_of

    text = (
        '[[policy]]\nname = "a"\n[[policy]]\nname = "b"\n[[teacher]]\npath = "m"\npolicies = '
        '["b"]\n[[teacher]]\npath = "n"'
    )
    config = read(tmp_path, text)
    found = [
        [one.path.rpartition("/")[2] for one in config_of(config, policy).teacher]
        for policy in config.policy
    ]
    assert found == [["n"], ["m", "n"]]
