"""Rewards that were not computed are no rewards of 0 in gates, evaluations, rows of metrics,
diagnoses and early stops."""

import json
import math
from types import SimpleNamespace

import pytest

import turnwright as tw
from turnwright.config import load
from turnwright.display.diagnosis import diagnose
from turnwright.errors import ConfigError, TurnwrightError
from turnwright.training.evaluation import summarize
from turnwright.training.metrics import no_signal_reason, step_row
from turnwright.training.run import STOP_STEPS, TrainingRun
from turnwright.training.run_record import RunRecord
from turnwright.training.warmup_gate import Gate

TINY = {"hidden": 16, "heads": 1, "kv_heads": 1, "layers": 1}


def played(*rewards):
    values = iter(rewards)
    env = tw.tool_env([], reward=lambda trajectory: next(values))
    return tw.rollout(
        env,
        [tw.Task(f"Go {n}.") for n in range(len(rewards))],
        tw.ScriptedEngine(["x"] * len(rewards)),
    )


def test_an_evaluation_without_rewards_has_no_success():
    result = summarize(played(None, None))
    assert (result.n, result.failed, result.reward, result.success) == (0, 2, None, None)
    assert {name: result.row()[name] for name in ("n", "reward", "success", "ci")} == {
        "n": 0,
        "reward": None,
        "success": None,
        "ci": None,
    }
    some = summarize(played(None, 1.0, 0.0))
    assert (some.n, some.failed, some.reward, some.success) == (2, 1, 0.5, 0.5)


def test_a_step_without_rewards_has_none_in_its_row():
    row = step_row(played(None, None), {}, 1.0, 1.0)
    assert (row["reward"], row["success"]) == (None, None)
    assert "no episode of 1 steps had a reward" in no_signal_reason([row])
    assert "None" in no_signal_reason([row])
    row = step_row(played(None, 1.0), {}, 1.0, 1.0)
    assert (row["reward"], row["success"]) == (1.0, 1.0)
    assert "mean reward 1.00" in no_signal_reason([row, step_row(played(None), {}, 1.0, 1.0)])


def test_the_gate_names_rewards_that_were_not_computed():
    gate = Gate(0.15, None, None)
    assert (
        gate.unmet(summarize(played(None, None)), 0.0) == "no episode had a reward, all 2 were None"
    )
    assert gate.unmet(summarize(played(0.0)), 0.0).startswith("success is 0.00")
    assert gate.unmet(summarize(played(1.0)), 0.0) == ""


def test_a_step_without_rewards_does_not_stop_a_run_early():
    record = SimpleNamespace(steps={}, _rows=set())
    for step in range(1, STOP_STEPS + 1):
        RunRecord._note(
            record, {"phase": "train", "step": step, "success": None if step == 1 else 1.0}
        )
    config = SimpleNamespace(train=SimpleNamespace(stop_success=1.0, patience=None))
    assert (
        TrainingRun._early_stop(SimpleNamespace(config=config, record=record), STOP_STEPS) is None
    )
    record.steps[1] = (1.0, math.nan)
    assert (
        TrainingRun._early_stop(SimpleNamespace(config=config, record=record), STOP_STEPS)
        is not None
    )


def test_a_warm_up_without_rewards_says_so(tmp_path):
    demonstrations = 8
    seen = []

    def reward(trajectory):
        seen.append(trajectory)
        return float(trajectory.final_text == "yes") if len(seen) <= demonstrations else None

    env = tw.tool_env(
        tools=[],
        reward=reward,
        max_turns=2,
        solver=lambda m, r: "yes",
        demonstrator=lambda m, r: "yes",
    )
    with pytest.raises(TurnwrightError) as error:
        tw.train(
            model=tw.tiny(**TINY),
            env=env,
            tasks=[tw.Task(f"Say {n}", answer="yes") for n in range(40)],
            out=tmp_path / "run",
            display="none",
            limits={"turns": 2, "turn_tokens": 8},
            warmup={"demos": demonstrations, "steps": 2, "gate_every": 1, "gate_tasks": 4},
            train={"steps": 1},
            eval={"tasks": 4},
        )
    first, _, rest = str(error.value).partition(":")
    assert "no episode had a reward, all 4 were None" in first
    assert "raise warmup.demos" not in rest
    assert "--resume" in rest
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    gates = [row for row in rows if row["phase"] == "gate"]
    assert len(gates) == 2
    assert {(row.get("reward"), row.get("success"), row["n"]) for row in gates} == {(None, None, 0)}


def test_a_gate_without_rewards_is_diagnosed_as_that():
    rows = [
        {"phase": "gate", "step": n, "n": 0, "success": None, "reward": None, "gate_passed": False}
        for n in range(6)
    ]
    (found,) = diagnose(rows)
    assert "no episode of the warmup gate had a reward" in repr(found)
    assert "0%" not in repr(found)


def test_steps_without_rewards_are_diagnosed_as_that():
    row = {
        "phase": "train",
        "reward": None,
        "success": None,
        "groups": 4,
        "groups_no_signal": 4,
        "trajectories": 0.0,
    }
    titles = [found.name for found in diagnose([{**row, "step": n} for n in range(60)])]
    assert titles == ["no episode had a reward"]


@pytest.mark.parametrize(("count", "refused"), [(1, True), (2, False)])
def test_adapt_needs_several_environments(tmp_path, count, refused):
    tables = "".join(f'[[env]]\nuse = "hop"\nname = "e{n}"\n' for n in range(count))
    (tmp_path / "r.toml").write_text(f"{tables}[rollout]\nadapt = 0.5\n")
    if refused:
        with pytest.raises(
            ConfigError, match=r"rollout\.adapt.*has no effect with one environment"
        ):
            load(tmp_path / "r.toml")
    else:
        assert load(tmp_path / "r.toml")


def test_a_reward_of_1e308_is_an_error_of_its_episode_and_the_run_goes_on(tmp_path):
    count = iter(range(10**6))

    def reward(trajectory):
        return 1e308 if next(count) % 8 == 3 else float(len(trajectory.final_text) % 2)

    tw.train(
        model=tw.tiny(**TINY),
        env=tw.tool_env(tools=[], reward=reward, max_turns=1),
        tasks=[tw.Task(f"Say {n}") for n in range(40)],
        out=tmp_path / "run",
        display="none",
        limits={"turns": 1, "turn_tokens": 4},
        rollout={"groups": 4, "group_size": 4, "max_failed": 0.5},
        train={"steps": 2},
        eval={"tasks": 4},
    )
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    steps = [row for row in rows if row["phase"] == "train"]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(0.0 <= row["reward"] <= 1.0 for row in steps)
    assert all(row["errors"] == {"reward/RewardError": 2} for row in steps)


def test_the_table_of_an_evaluation_without_rewards_has_no_figures():
    from turnwright.cli.evaluate import evaluation_lines

    lines = evaluation_lines({"sampled": summarize(played(None, None)).row()})
    assert "0%" not in "\n".join(lines)
    assert "2 sampled episodes failed and are not counted" in lines
