"""Tasksets of `verifiers.v1` (release 0.4.0), as they are, under a scripted model."""

import json
import re
from pathlib import Path

import pytest

import turnwright as tw
from turnwright.envs.check import check_env
from turnwright.errors import ConfigError
from turnwright_compat import verifiers_env

pytest.importorskip("verifiers.v1", reason="needs verifiers; pip install '.[verifiers]'")
import verifiers.v1 as vf

if not hasattr(vf.Taskset, "bounded"):
    pytest.skip("needs verifiers 0.4; pip install '.[verifiers]'", allow_module_level=True)

SUMS = [(2, 3), (4, 4), (1, 9), (7, 5), (6, 6), (8, 3), (5, 9), (3, 3), (9, 9), (1, 1)]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        if trace.last_reply == "broken":
            raise OSError("the judge is out")
        return float(trace.last_reply == self.data.answer)

    @vf.reward
    async def styled(self, task, trace) -> dict[str, float]:
        return {"short": 0.25, "cut": -1.0 * trace.is_truncated}

    @vf.metric
    async def seen(self, trace) -> float:
        return len(trace.nodes) + 100 * trace.num_turns


class Sums(vf.Taskset[SumTask]):
    def load(self):
        for a, b in SUMS:
            data = SumData(prompt=f"{a} + {b}", system_prompt="Only the number.", answer=str(a + b))
            yield SumTask(data, self.config.task)


class Endless(Sums):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            yield SumTask(SumData(prompt=f"{number} + 0", answer=str(number)), self.config.task)
            number += 1


def taskset(kind=Sums):
    return kind(vf.TasksetConfig(id="sums"))


def alone(env, reply, task=None, **kwargs):
    task = task or tw.as_env_spec(env).tasks("train", 1)[0]
    (trajectory,) = tw.rollout(env, [task], engine=tw.ScriptedEngine([reply]), **kwargs)
    return trajectory


def solve(messages, rng):
    return str(sum(int(part) for part in messages[-1].text.split(" + ")))


def test_a_reply_is_scored_by_the_task():
    env = verifiers_env(taskset())
    (task, *_) = tw.as_env_spec(env).tasks("train")
    assert [message.role for message in task.messages] == ["system", "user"]
    right = alone(env, task.info["verifiers"]["answer"], task)
    assert right.error is None
    assert (right.reward, right.stop) == (2.25, tw.StopReason.DONE)
    assert right.rewards == {"right": 1.0, "short": 0.25, "cut": 0.0}
    assert right.metrics["seen"] == 103
    wrong = alone(env, "0", task)
    assert (wrong.reward, wrong.rewards["right"]) == (0.25, 0.0)


def test_a_reply_that_was_cut_is_told_of():
    cut = alone(verifiers_env(taskset()), "1234567890", limits=tw.Limits(turn_tokens=4))
    assert (cut.reward, cut.rewards["cut"]) == (-0.75, -1.0)


def test_a_reward_that_breaks_is_none():
    trajectory = alone(verifiers_env(taskset()), "broken")
    assert (trajectory.stop, trajectory.error.kind, trajectory.reward) == (
        tw.StopReason.REWARD_ERROR,
        "reward",
        None,
    )
    assert "the judge is out" in trajectory.error.traceback


def test_rows_are_tasks_and_some_are_held_out():
    train, held_out = tw.as_env_spec(verifiers_env(taskset())).train_and_eval_tasks(0, 0)
    assert (len(train), len(held_out)) == (8, 2)
    json.dumps(train[0].info)
    train, held_out = tw.as_env_spec(verifiers_env(taskset(Endless))).train_and_eval_tasks(5, 5)
    assert [task.messages[0].text for task in train] == [
        f"{number} + 0" for number in (0, 2, 4, 6, 8)
    ]
    assert [task.messages[0].text for task in held_out] == [
        f"{number} + 0" for number in (1, 3, 5, 7, 9)
    ]


def test_the_check_passes():
    class Plain(Sums):
        pass

    env = verifiers_env(taskset(Plain), solver=solve)
    findings = check_env(tw.as_env_spec(env), n=2)
    assert [f.text for f in findings if f.severity != "ok"] == []


class Boxed(SumTask):
    async def setup(self, trace, runtime):
        pass


class Ran(SumTask):
    @vf.reward
    async def passes(self, trace, runtime) -> float:
        return 1.0


class Silent(SumTask):
    def __init__(self, data, config=None):
        super().__init__(data.model_copy(update={"prompt": None}), config)


class Tooled(SumTask):
    @classmethod
    def toolsets(cls, config):
        return [object()]


class Shared(Sums):
    @classmethod
    def toolsets(cls, config):
        return [object()]


def holding(kind):
    class Held(vf.Taskset[kind]):
        def load(self):
            yield from (
                kind(SumData(prompt=f"{n}", answer=str(n)), self.config.task) for n in range(10)
            )

    return taskset(Held)


def test_what_needs_verifiers_own_loop_is_refused():
    with pytest.raises(ConfigError, match=r"setup\(trace, runtime\) needs a runtime"):
        verifiers_env(holding(Boxed))
    ran = alone(verifiers_env(holding(Ran)), "1")
    assert "is scored in a runtime; here a task is one reply and its score" in ran.error.message
    assert "has tool servers" in alone(verifiers_env(holding(Tooled)), "1").error.message
    with pytest.raises(ConfigError, match="its toolsets are servers"):
        verifiers_env(taskset(Shared))
    silent = verifiers_env(holding(Silent))
    assert "it needs a simulated user to begin" in alone(silent, "1").error.message
    with pytest.raises(ConfigError, match="an instance, not a class"):
        verifiers_env(Sums)
    stranger = alone(verifiers_env(taskset()), "1", tw.Task("1 + 1"))
    assert 'no row in info["verifiers"]' in stranger.error.message


def test_a_function_that_gives_one():
    env = verifiers_env(taskset, solver=solve)
    trajectory = alone(env, "0", rules=tw.EnvRules(isolation="process"))
    assert trajectory.error is None
    assert trajectory.rewards["short"] == 0.25


def test_the_example_of_the_docs():
    page = (Path(__file__).parents[2] / "docs/libraries.md").read_text(encoding="utf-8")
    (block,) = [
        text
        for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        if text.startswith("import verifiers.v1 as vf")
    ]
    exec(compile(block, "docs/libraries.md", "exec"), {"tw": tw, "__name__": "__docs__"})
