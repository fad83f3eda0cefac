"""Environments of `verifiers.legacy` (release 0.3.1), as they are, under a scripted model."""

import asyncio
import itertools
import json
import re
import threading
from pathlib import Path

import pytest

import turnwright as tw
from turnwright.envs.check import check_env
from turnwright.errors import ConfigError
from turnwright_compat import verifiers_env

pytest.importorskip("verifiers.legacy", reason="needs verifiers below 0.4")
pytest.importorskip("turnwright_verifiers_legacy", reason="pip install ./contrib/verifiers_legacy")
import verifiers.legacy as vf
from datasets import Dataset


def play(env, replies, tasks=None, **kwargs):
    kwargs = {"limits": tw.Limits(turns=8)} | kwargs
    tasks = tasks or tw.as_env_spec(env).tasks("train", 1)
    return tw.rollout(env, tasks, engine=tw.ScriptedEngine(replies), **kwargs)


def alone(*args, **kwargs):
    (trajectory,) = play(*args, **kwargs)
    return trajectory


def rows(n=10):
    return Dataset.from_list(
        [
            {"question": f"A number up to {n}.", "answer": str(number), "hint": -number}
            for number in range(n)
        ]
    )


class Guess(vf.MultiTurnEnv):
    """Higher or lower; a rubric of one's own and a metric."""

    def __init__(self, **kwargs):
        async def found(completion, answer):
            return float(completion[-1].content == "Yes." and completion[-2].content == answer)

        def brief(state, hint):
            self.threads.add(threading.current_thread())
            assert hint == -int(state["answer"])
            return 1.0 / len(state["trajectory"])

        self.open, self.threads, self.trouble = 0, set(), {}
        rubric = vf.Rubric(funcs=[found, brief], weights=[1.0, 0.5])
        super().__init__(
            **{"dataset": rows(), "rubric": rubric, "max_turns": 5, "system_prompt": "Guess."}
            | kwargs
        )

    async def setup_state(self, state):
        self.open += 1
        state["low"] = 0
        return await super().setup_state(state)

    async def env_response(self, messages, state, **kwargs):
        said = messages[-1].content
        if error := self.trouble.pop(said, None):
            raise error
        if not said.isdigit():
            return "Say a number."
        if said == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "Yes."}]
            return state["final_env_response"]
        return [
            {"role": "user", "content": "Higher." if int(said) < int(state["answer"]) else "Lower."}
        ]

    @vf.cleanup
    async def leave(self, state):
        self.open -= 1


def task_of(env, answer):
    return next(
        t
        for split in ("train", "eval")
        for t in tw.as_env_spec(env).tasks(split)
        if t.answer == str(answer)
    )


def test_an_episode_of_several_turns():
    world = Guess()
    env = verifiers_env(world)
    trajectory = alone(env, ["1", "9", "4"], [task_of(env, 4)])
    assert trajectory.error is None
    assert (trajectory.reward, trajectory.stop, len(trajectory.turns)) == (
        1.0 + 0.5 / 3,
        tw.StopReason.DONE,
        3,
    )
    heard = [message.text for message in trajectory.messages if message.role != "assistant"]
    assert heard == ["Guess.", "A number up to 10.", "Higher.", "Lower."]
    assert trajectory.final[0].text == "Yes."
    assert trajectory.rewards == {"found": 1.0, "brief": 1 / 3}
    assert trajectory.metrics["num_turns"] == 3
    assert trajectory.turns[-1].info["stop_condition"] == "has_final_env_response"
    assert world.open == 0
    assert threading.main_thread() not in world.threads


def test_the_same_reward_as_verifiers_own_loop():
    """Its own rollout, its own scoring, and a client that says the same."""
    from verifiers.legacy.clients import Client

    replies = ["1", "9", "4"]

    async def speak(self, prompt, model, sampling_args, tools=None, **kwargs):
        message = vf.types.ResponseMessage(
            content=said.pop(0), finish_reason="stop", is_truncated=False
        )
        return vf.types.Response(id="x", created=0, model=model, message=message)

    async def nothing(self, *args, **kwargs):
        return None

    methods = dict.fromkeys(Client.__abstractmethods__, nothing) | {"get_response": speak}
    said = list(replies)
    world = Guess()
    env = verifiers_env(world)
    row = next(row for row in world.get_dataset() if row["answer"] == "4")
    theirs = asyncio.run(world.run_rollout(row, type("Says", (Client,), methods)(None), "m", {}))
    ours = alone(env, replies, [task_of(env, 4)])
    assert said == []
    assert ours.reward == theirs["reward"]
    assert [m.text for m in ours.messages] + ["Yes."] == [
        m["content"] for m in [*theirs["prompt"], *theirs["completion"]]
    ]
    assert {**ours.rewards, "num_turns": 3.0} == theirs["metrics"]


def test_the_environment_s_own_limit_truncates():
    env = verifiers_env(Guess(max_turns=2))
    late = alone(env, ["1", "2", "3"], [task_of(env, 7)])
    assert (late.stop, len(late.turns), late.reward) == (tw.StopReason.ENV_TRUNCATED, 2, 0.25)
    assert late.turns[-1].info["stop_condition"] == "max_turns_reached"
    cut = alone(env, ["1"], [task_of(env, 7)], limits=tw.Limits(turns=1))
    assert (cut.stop, cut.reward) == (tw.StopReason.MAX_TURNS, 0.5)


def test_what_breaks_is_a_failure_and_everything_is_cleaned_up():
    world = Guess()
    env = verifiers_env(world)
    world.trouble = {"2": ValueError("no number")}
    bug = alone(env, ["2"], [task_of(env, 7)])
    assert (bug.error.type, bug.error.kind, bug.reward) == ("ValueError", "user_bug", None)
    world.trouble = {"2": vf.InfraError("no sandbox")}
    theirs = alone(env, ["2"], [task_of(env, 7)])
    assert (theirs.error.type, theirs.error.kind, theirs.error.phase) == (
        "InfraError",
        "environment",
        "step",
    )
    world.trouble = {"2": vf.InfraError("no sandbox")}
    again = alone(
        env,
        ["2", "7"],
        [task_of(env, 7)],
        rules=tw.EnvRules(retries=tw.RetryRules(turn=1, wait_s=0.0)),
    )
    assert again.rewards == {"found": 1.0, "brief": 0.5}
    assert [failure.recovery for failure in again.failures] == ["replayed"]
    assert world.open == 0


def test_a_reward_that_breaks_is_none_where_verifiers_counts_zero():
    def broken(completion):
        raise OSError("the judge is out")

    env = verifiers_env(vf.SingleTurnEnv(dataset=rows(), rubric=vf.Rubric(funcs=[broken])))
    trajectory = alone(env, ["1"])
    assert (trajectory.stop, trajectory.error.type, trajectory.reward) == (
        tw.StopReason.REWARD_ERROR,
        "OSError",
        None,
    )


def test_a_single_turn_is_done_after_one():
    def right(completion, answer):
        return float(completion[-1].content == answer)

    env = verifiers_env(vf.SingleTurnEnv(dataset=rows(), rubric=vf.Rubric(funcs=[right])))
    trajectory = alone(env, ["5", "6"], [task_of(env, 5)])
    assert (trajectory.reward, trajectory.stop, len(trajectory.turns)) == (
        1.0,
        tw.StopReason.DONE,
        1,
    )


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one.
        b: the other.
    """
    return a + b


def call(**arguments):
    return f"<tool_call>{json.dumps({'name': 'add', 'arguments': arguments})}</tool_call>"


def test_tools():
    def right(completion, answer):
        return float(answer in completion[-1].content)

    world = vf.ToolEnv(tools=[add], dataset=rows(), rubric=vf.Rubric(funcs=[right]))
    env = verifiers_env(world)
    one = env()
    asyncio.run(one.reset(task_of(env, 3)))
    (told,) = one.tools
    assert (told["function"]["name"], [*told["function"]["parameters"]["properties"]]) == (
        "add",
        ["a", "b"],
    )
    trajectory = alone(
        env, [call(a=1, b=2), call(a=1), "<tool_call>{</tool_call>", "It is 3."], [task_of(env, 3)]
    )
    assert trajectory.error is None
    assert (trajectory.reward, trajectory.stop, len(trajectory.turns)) == (
        1.0,
        tw.StopReason.DONE,
        4,
    )
    first, second = [message for message in trajectory.messages if message.role == "tool"]
    assert first.text == "3"
    assert "missing 1 required positional argument: 'b'" in second.text
    assert trajectory.metrics["invalid_actions"] == 1
    assert trajectory.metrics["add_calls"] == 2


def test_siblings_do_not_meet():
    world = Guess()
    env = verifiers_env(world)
    tasks = tw.as_env_spec(env).tasks("train")

    def speak(messages, rng):
        return str(sum(message.role == "assistant" for message in messages))

    found = play(env, speak, tasks, samples=3)
    assert len(found) == 3 * len(tasks)
    for trajectory in found:
        steps = int(trajectory.task.answer) + 1
        assert len(trajectory.turns) == min(steps, 5)
        assert trajectory.rewards["found"] == float(steps <= 5)
    assert world.open == 0


def test_rows_are_tasks_and_some_are_held_out():
    train, held_out = tw.as_env_spec(verifiers_env(Guess())).train_and_eval_tasks(0, 0)
    assert (len(train), len(held_out)) == (8, 2)
    assert train[0].info["hint"] == -int(train[0].answer)
    assert [message.role for message in train[0].messages] == ["system", "user"]
    other = Dataset.from_list([{"question": "Other.", "answer": "1", "hint": -1}])
    own = tw.as_env_spec(verifiers_env(Guess(eval_dataset=other)))
    assert [len(tasks) for tasks in own.train_and_eval_tasks(3, 0)] == [3, 1]


def test_the_check_passes():
    def bisect(messages, rng):
        low, high = 0, 9
        for asked, heard in itertools.pairwise(messages):
            if asked.role == "assistant":
                low, high = (
                    (int(asked.text) + 1, high)
                    if heard.text == "Higher."
                    else (low, int(asked.text) - 1)
                )
        return str((low + high) // 2)

    def found(completion):
        return float(completion[-1].content == "Yes.")

    env = verifiers_env(Guess(rubric=vf.Rubric(funcs=[found])), solver=bisect)
    findings = check_env(tw.as_env_spec(env), n=2)
    assert [f.text for f in findings if f.severity != "ok"] == []


def test_what_cannot_be_played():
    def best(completions):
        return [0.0 for _ in completions]

    with pytest.raises(ConfigError, match="best compares the rollouts of a group"):
        verifiers_env(vf.SingleTurnEnv(dataset=rows(), rubric=vf.Rubric(funcs=[best])))
    with pytest.raises(ConfigError, match="give a MultiTurnEnv of"):
        verifiers_env(Guess)
    with pytest.raises(ConfigError, match="gave int, no MultiTurnEnv"):
        verifiers_env(lambda: 3)

    class Forgets(Guess):
        async def get_prompt_messages(self, state):
            return (await super().get_prompt_messages(state))[-1:]

    env = verifiers_env(Forgets())
    assert "rewrites earlier messages" in alone(env, ["1"], [task_of(env, 7)]).error.message

    env = verifiers_env(Guess())
    shown = tw.Task(
        [{"role": "user", "content": ["See:", tw.Image(b"png", alt="a cat")]}], info={"hint": 0}
    )
    assert "a task with images" in alone(env, ["1"], [shown]).error.message

    class Asks(Guess):
        async def env_response(self, messages, state, **kwargs):
            return await state["client"].get_response(messages, "m", {})

    env = verifiers_env(Asks())
    assert "here the rollout does" in alone(env, ["1"], [task_of(env, 7)]).error.message


def made():
    return Guess()


def test_a_function_that_gives_one():
    env = verifiers_env(made)
    trajectory = alone(env, ["7"], [task_of(env, 7)], rules=tw.EnvRules(isolation="process"))
    assert trajectory.error is None
    assert trajectory.rewards == {"found": 1.0, "brief": 1.0}


def test_an_environment_itself_is_enough():
    spec = tw.as_env_spec(Guess())
    assert (len(spec.tasks("train")), len(spec.tasks("eval")), len(spec.factory().tools)) == (
        8,
        2,
        0,
    )


def test_the_example_of_the_docs():
    page = (Path(__file__).parents[2] / "docs/environments.md").read_text(encoding="utf-8")
    (block,) = [
        text
        for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        if text.startswith("import verifiers.legacy as legacy")
    ]
    exec(compile(block, "docs/environments.md", "exec"), {"tw": tw, "__name__": "__docs__"})
