"""`turnwright.rollout` as users write it: the house's worlds, tools, play functions, loops that
run already, mistakes."""

from __future__ import annotations

import asyncio
import functools
import signal
import threading

import pytest
from kit.rollouts import AsyncTalk, Sampler, Talk, check_record, facts, tasks

import turnwright as tw
from turnwright.rollouts import group_by_task


class Guess(tw.Env):
    def reset(self, task, *, seed=None):
        self.secret = int(task.answer)
        return "I think of a number from 1 to 100. Guess."

    def step(self, action):
        if not action.text.strip().isdigit():
            return tw.Step("Say a whole number.")
        guess = int(action.text)
        if guess == self.secret:
            return tw.Step("Yes.", reward=1.0, terminated=True)
        return tw.Step("higher" if guess < self.secret else "lower")


def test_the_guessing_game_of_the_house():
    (trajectory,) = tw.rollout(
        Guess, [tw.Task(answer="42")], tw.ScriptedEngine(["50", "some", "20", "42"])
    )
    assert (trajectory.stop, trajectory.reward, trajectory.error) == ("done", 1.0, None)
    said = [message.text for message in trajectory.messages]
    assert said == [
        "I think of a number from 1 to "
        "100. Guess.", "50", "lower", "some", "Say a whole number.", "20", "higher", "42",
    ]  # fmt: skip
    assert [message.text for message in trajectory.final] == ["Yes."]


def calculator(expression: str) -> str:
    """Evaluate arithmetic.

    Args:
        expression: for example "(3 + 4) * 5".
    """
    return str(tw.arithmetic(expression))


def test_the_calculator_of_the_house():
    def correct(trajectory):
        return float(trajectory.final_text.strip() == trajectory.task.answer)

    env = tw.tool_env(tools=[calculator], reward=correct, max_turns=6)
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "6 * 7"}}</tool_call>'
    tasks = [tw.Task("What is 6 * 7?", answer="42")]
    for script, turns in ((["42"], 1), ([call, "42"], 2)):
        (trajectory,) = tw.rollout(env, tasks, engine=tw.ScriptedEngine(script))
        assert (trajectory.stop, trajectory.reward, len(trajectory.turns)) == ("done", 1.0, turns)
    assert [message.role for message in trajectory.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert trajectory.messages[2].text == "42"
    assert "calculator" in tw.byte_renderer().decode(trajectory.prompt_ids(0))


@pytest.mark.parametrize("observation", [
    None, "", "text", ["one", "two"], {"role": "tool", "content": "x", "tool_call_id": "c"},
    [{"role": "system", "content": "s"}, {"role": "tool", "content": ""}, tw.Message("user", "u"), "v"],  # noqa: E501
])  # fmt: skip
@pytest.mark.parametrize("kind", [Talk, AsyncTalk])
def test_observations_of_every_shape_are_what_the_model_sees(observation, kind):
    class Says(kind):
        def say(self):
            return observation

    engine = Sampler()
    (trajectory,) = tw.rollout(Says, tasks(1), engine)
    check_record(trajectory, engine.calls)
    assert trajectory.stop == "done"
    text = tw.byte_renderer()
    messages = trajectory.turns[1].messages
    shown = "".join(f"<|im_start|>{m.role}\n{m.text}<|im_end|>\n" for m in messages)
    assert text.decode(trajectory.spans[2].ids) == f"\n{shown}<|im_start|>assistant\n"


@pytest.mark.parametrize("kind", [Talk, AsyncTalk])
def test_an_invalid_action_is_an_observation(kind):
    class Strict(kind):
        turns = 2

        def say(self):
            return "ok"

    def strict(self, action):
        if not hasattr(self, "warned"):
            self.warned = True
            raise tw.InvalidAction("say a number")
        return Talk.step(self, action)

    async def later(self, action):
        return strict(self, action)

    Strict.step = strict if kind is Talk else later
    engine = Sampler()
    (trajectory,) = tw.rollout(Strict, tasks(1), engine)
    check_record(trajectory, engine.calls)
    assert (trajectory.stop, trajectory.error, len(trajectory.turns)) == ("done", None, 3)
    assert trajectory.turns[1].messages == (tw.Message("user", "say a number"),)
    assert trajectory.turns[0].info == {"invalid_action": "say a number"}
    assert trajectory.metrics["invalid_actions"] == 1


def test_gymnasiums_five_values_are_a_step():
    class Gym(tw.Env):
        async def reset(self, task, *, seed=None):
            return "Go."

        async def step(self, action):
            return "on", 1, False, True, {"k": 1}

    (trajectory,) = tw.rollout(Gym, tasks(1), Sampler())
    assert (trajectory.stop, trajectory.reward, trajectory.turns[0].info) == (
        "env_truncated",
        1.0,
        {"k": 1},
    )


def test_a_factory_makes_one_world_per_episode():
    made = []

    def make():
        made.append(AsyncTalk())
        return made[-1]

    tw.rollout(make, tasks(3), Sampler(), samples=2)
    assert len({id(world) for world in made}) == 6


class Player:
    """A play function with settings of its own."""

    async def __call__(self, task, model):
        await model.generate("a")
        return 0.5


async def plays(prompt, task, model):
    await model.generate(prompt)
    return 0.5


@pytest.mark.parametrize("play", [Player(), functools.partial(plays, "a")])
def test_play_functions_may_be_objects_and_partials(play):
    (trajectory,) = tw.rollout(play, tasks(1), Sampler())
    assert (trajectory.stop, trajectory.reward) == ("done", 0.5)


@pytest.mark.parametrize(("given", "tells"), [
    ({"env": AsyncTalk()}, "write env=AsyncTalk"),
    ({"env": "hopp"}, "did you mean 'hop'"),
    ({"env": 3}, "not int"),
    ({"tasks": tw.Task("x")}, r"write tasks=\[Task"),
    ({"tasks": ["What?"]}, r"write Task\('What\?'\)"),
    ({"concurrency": 0}, "concurrency must be at least 1, not 0"),
    ({"engine": ["42"]}, "engine is of type list"),
    ({"engine": "http://127.0.0.1:9"}, r"VllmEngine\(URL\)"),
])  # fmt: skip
def test_mistakes_are_told_in_one_line_with_the_remedy(given, tells):
    given = {"env": AsyncTalk, "tasks": tasks(1), "engine": Sampler()} | given
    with pytest.raises(tw.UsageError, match=tells) as caught:
        tw.rollout(**given)
    assert "\n" not in str(caught.value)


def test_an_environment_may_be_named():
    hop = tw.resolve_env("hop")
    (trajectory,) = tw.rollout("hop", hop.tasks("eval", 1), tw.ScriptedEngine(hop.solver))
    assert (trajectory.stop, trajectory.reward) == ("done", 1.0)


def test_an_error_is_no_consequence_of_a_missing_loop():
    with pytest.raises(tw.UsageError) as caught:
        tw.rollout(AsyncTalk, tasks(1), "http://127.0.0.1:9")
    assert caught.value.__context__ is None


def test_a_rollout_runs_where_a_loop_runs_already_and_within_one():
    async def notebook():
        return tw.rollout(Talk, tasks(2), Sampler()), await tw.arollout(Talk, tasks(2), Sampler())

    for rows in asyncio.run(notebook()):
        assert [facts(t) for t in rows] == [facts(t) for t in tw.rollout(Talk, tasks(2), Sampler())]


def test_mistakes_are_told_where_a_loop_runs_already():
    async def notebook():
        return tw.rollout(AsyncTalk(), tasks(1), Sampler())

    with pytest.raises(tw.UsageError, match="not an instance"):
        asyncio.run(notebook())


def test_a_notebook_that_is_interrupted_stops_its_rollout_and_closes_the_worlds():
    closed, pressed = [], []

    class Slow(AsyncTalk):
        async def step(self, action):
            pressed.append(self)
            if len(pressed) == 2:  # both are on their way
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            await asyncio.sleep(20)

        async def close(self):
            closed.append(self)

    async def notebook():
        tw.rollout(Slow, tasks(2), Sampler())

    loop = asyncio.new_event_loop()  # asyncio.run would catch the signal for itself
    work = notebook()
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(work)
    loop.close()
    assert len(closed) == 2


def test_episodes_come_back_in_the_order_of_their_tasks_and_in_groups():
    rows = tw.rollout(AsyncTalk, tasks(4), Sampler(delay=1e-3), samples=3)
    assert [(t.task.id, t.key.sample) for t in rows] == [
        (f"t{i}", j) for i in range(4) for j in range(3)
    ]
    groups = group_by_task(rows)
    assert [len(g.trajectories) for g in groups] == [3] * 4
    assert [g.rewards for g in groups] == [
        [t.reward for t in rows[i : i + 3]] for i in (0, 3, 6, 9)
    ]


def test_without_tasks_nothing_is_played():
    assert tw.rollout(AsyncTalk, [], Sampler()) == []
    assert tw.rollout(AsyncTalk, tasks(2), Sampler(), samples=0) == []


def test_a_script_that_is_too_short_says_so():
    (trajectory,) = tw.rollout(AsyncTalk, tasks(1), tw.ScriptedEngine(["one"]))
    assert trajectory.stop == "engine_error"
    assert "1 replies and the episode asks for reply 2" in trajectory.error.message


def test_an_engine_may_answer_with_aborts_and_each_part_keeps_its_version():
    class Updated(Sampler):
        async def generate(self, request):
            self.version = request.call
            self.aborts = 1.0 if request.call % 3 else 0.0
            return await super().generate(request)

    engine = Updated()
    (trajectory,) = tw.rollout(AsyncTalk, tasks(1), engine)
    check_record(trajectory, engine.calls)
    versions = [[trajectory.spans[i].version for i in turn.spans] for turn in trajectory.turns]
    assert any(len(set(row)) > 1 for row in versions), "no reply was sampled by several policies"
