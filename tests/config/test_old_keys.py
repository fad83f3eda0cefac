"""Old names of keys and values (`Formerly`) work everywhere for one more release; what is written has one name for each."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import pytest

import turnwise as tw
from turnwise.config import load
from turnwise.config.constraints import as_recorded, defaults, formerly, from_recorded
from turnwise.config.dump import help_keys, load_run_config, to_json_dict, toml_value
from turnwise.config.fields import sections
from turnwise.config.load import from_python
from turnwise.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import yardstick

OLD = {name: formerly(section) for name, section in sections().items()}
KEYS = [(section, name, old) for section, found in OLD.items() for name, one in found.items() for old in one.names]
VALUES = [
    (section, name, *pair) for section, found in OLD.items() for name, one in found.items() for pair in one.values.items()
]
PUBLIC = [tw.EnvRules, tw.Limits]


def written(folder, section, *settings):
    """Write a recipe with some lines in a section."""
    lines = "".join(f"{name} = {value}\n" for name, value in settings)
    text = f"[[env]]\nuse = 'hop'\n{lines}" if section == "env" else f"[{section}]\n{lines}[[env]]\nuse = 'hop'\n"
    (folder / "r.toml").write_text(text)
    return folder / "r.toml"


def dotted(section, name):
    return f"env.0.{name}" if section == "env" else f"{section}.{name}"


def default(section, name):
    return defaults(sections()[section])[name]


def test_the_yardstick_knows_every_old_name():
    oldest = {(section, name): one.names[-1] for section, found in OLD.items() for name, one in found.items() if one.names}
    assert {f"{section}.{name}": f"{section}.{old}" for (section, name), old in oldest.items()} == yardstick.KEYS
    values: dict[str, dict[str, str]] = {}
    for section, name, old, new in VALUES:
        values.setdefault(f"{section}.{oldest.get((section, name), name)}", {})[new] = old
    assert values == yardstick.VALUES


@pytest.mark.parametrize(("section", "name", "old"), KEYS)
def test_an_old_key_loads_with_a_warning(section, name, old, tmp_path):
    value, line = default(section, name), f"{section}.{old} is now called {name}"
    with pytest.warns(FutureWarning, match=line):
        resolved = load(written(tmp_path, section, (old, toml_value(value))))
    assert resolved.origins[dotted(section, name)] == "r.toml"
    assert resolved.config == load(written(tmp_path, section)).config
    with pytest.warns(FutureWarning, match=f"command line: {line}"):
        flagged = load(written(tmp_path, section), [f"--{section}.{old.replace('_', '-')}", toml_value(value)])
    assert flagged.origins[dotted(section, name)] == "command line"
    if section != "env":  # environments are objects there
        with pytest.warns(FutureWarning, match=line):
            assert from_python({section: {old: value}}, "tw.train()").origins[dotted(section, name)] == "tw.train()"


@pytest.mark.parametrize(("section", "name", "old"), KEYS)
def test_a_key_under_two_names_is_refused(section, name, old, tmp_path):
    value = toml_value(default(section, name))
    with pytest.raises(ConfigError, match=f"{section}.{old} is the old name of {name}, which is given too; leave {old} out"):
        load(written(tmp_path, section, (old, value), (name, value)))


@pytest.mark.parametrize(("section", "name", "old", "new"), VALUES)
def test_an_old_value_loads_with_a_warning(section, name, old, new, tmp_path):
    with pytest.warns(FutureWarning, match=f"{name} = '{old}' is now called '{new}'"):
        resolved = load(written(tmp_path, section, (name, toml_value(old))))
    assert resolved.config == load(written(tmp_path, section, (name, toml_value(new)))).config


@pytest.mark.parametrize(("section", "name", "old"), KEYS)
def test_a_configuration_of_an_older_run_loads_without_a_warning_and_is_written_under_the_new_name(
    section, name, old, tmp_path
):
    resolved = load(written(tmp_path, section))
    row = to_json_dict(resolved)
    table = row["config"][section][0] if section == "env" else row["config"][section]
    assert name in table
    assert old not in table
    table[old] = table.pop(name)
    row["origins"][dotted(section, old)] = row["origins"].pop(dotted(section, name))
    (tmp_path / "config.json").write_text(json.dumps(row))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = load_run_config(tmp_path)
    assert (again.config, dict(again.origins)) == (resolved.config, dict(resolved.origins))


def test_only_new_names_are_listed():
    listed = {line.partition(" ")[0] for line in help_keys()}
    for section, name, old in KEYS:
        assert f"--{section}.{name.replace('_', '-')}" in listed
        assert f"--{section}.{old.replace('_', '-')}" not in listed


@pytest.mark.parametrize(("section", "name", "old"), KEYS)
def test_a_dataclass_has_its_old_fields(section, name, old):
    kind, value = sections()[section], object()
    with pytest.warns(DeprecationWarning, match=f"{kind.__name__}.{old} is now called {name}; the next release") as caught:
        made = kind(**{old: value})
    assert [one.filename for one in caught] == [__file__]
    assert getattr(made, name) is value
    with pytest.warns(DeprecationWarning, match=f"{kind.__name__}.{old} is now {name}"):
        assert getattr(made, old) is value
    with pytest.raises(ConfigError, match=f"{old} is the old name of {name}, which is given too"):
        kind(**{old: value, name: value})
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        kind(other=value)


@pytest.mark.parametrize(("section", "name", "old", "new"), VALUES)
def test_a_dataclass_takes_old_values(section, name, old, new):
    with pytest.warns(DeprecationWarning, match=f"{name} = '{old}' is now called '{new}'"):
        assert sections()[section](**{name: old}) == sections()[section](**{name: new})


@pytest.mark.parametrize("kind", PUBLIC)
def test_journals_have_the_first_names_and_any_name_is_read(kind):
    row = as_recorded(kind, kind())
    for name, one in formerly(kind).items():
        for old in one.names[-1:]:
            assert old in row
            assert name not in row
        for old, new in one.values.items():
            changed = kind(**{name: new})
            assert as_recorded(kind, changed) == row | {name: old}
            assert from_recorded(kind, row | {name: old}) == from_recorded(kind, row | {name: new}) == changed
    assert from_recorded(kind, row) == from_recorded(kind, defaults(kind)) == from_recorded(kind, {}) == kind()


class Echo(tw.Env):
    """One turn."""

    def reset(self, task):
        return "say it"

    def step(self, action):
        return tw.Step("", done=True, reward=1.0)


def test_a_journal_names_its_settings_as_the_first_release_did(tmp_path):
    rules, limits = tw.EnvRules(on_invalid="resample", rejected_replies="untrained"), tw.Limits(wall_clock_s=5.0)
    tw.rollout(Echo, [tw.Task("t")], tw.ScriptedEngine(["x"]), limits=limits, rules=rules, out=tmp_path)
    events = map(json.loads, (tmp_path / "journal.jsonl").read_text().splitlines())
    (settings,) = (event["value"] for event in events if event["e"] == "settings")
    assert settings["limits"]["wall_clock"] == 5.0
    known = [("on_invalid", "ask_again"), ("rejected", "untrained"), ("max_asks_per_turn", 2)]
    assert list(settings["rules"].items())[:3] == known
    assert tw.replay_loop(tmp_path).ok
