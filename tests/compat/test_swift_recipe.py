"""The recipe of an ms-swift scheduler that goes back: its rows, its dry run, and an
episode of each kind."""

import runpy
import shutil
from pathlib import Path

from kit.rollouts import renderer

import turnwright as tw
from turnwright.cli.main import main
from turnwright.config.recipe import load
from turnwright.envs.resolve import resolve_env

HOME = Path(__file__).parents[2] / "recipes/compat"


def test_the_recipe_resolves_and_its_scheduler_goes_back(tmp_path, capsys):
    for name in ("swift_tips.toml", "swift_tips.py", "swift_rows.py"):
        shutil.copy(HOME / name, tmp_path)
    runpy.run_path(str(tmp_path / "swift_rows.py"), run_name="__main__")
    assert main(["train", str(tmp_path / "swift_tips.toml"), "--dry-run"]) == 0
    assert "swift:sum_tips" in capsys.readouterr().out
    config = load(tmp_path / "swift_tips.toml").config
    made = resolve_env(config.env[0])
    train, held_out = made.train_and_eval_tasks(0, 0)
    assert (len(train), len(held_out)) == (1000, 200)
    task = train[0]
    total = int(task.info["solution"])
    wrong, right = f"a sum\n#### {total + 1}", f"a sum\n#### {total}"
    for replies, reward in (([right], 1.0), ([wrong, right], 1.0), ([wrong, wrong], 0.0)):
        (found,) = tw.rollout(
            made.agent_function,
            [task],
            tw.ScriptedEngine(replies),
            renderer=renderer("bpe"),
            limits=config.limits,
        )
        assert found.error is None, found.error
        assert (len(found.turns), found.reward) == (len(replies), reward)
        if len(replies) > 1:
            opened = renderer("bpe").decode(found.prompt_ids(1))
            assert opened == renderer("bpe").decode(found.prompt_ids(0)) + "a sum\nBut wait. "
