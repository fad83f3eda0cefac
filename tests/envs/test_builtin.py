"""The built-in environments besides Hop: each can be won, is played poorly by its
demonstrator, and holds tasks out."""

import asyncio
import random
from collections import Counter

import pytest

import turnwright as tw
from turnwright.cli.main import main
from turnwright.config import EnvConfig, Limits
from turnwright.envs import Action, play_scripted, read_reply, resolve_env, take_step
from turnwright.envs.builtin import Code, FrozenLake, HintedMath, Search
from turnwright.errors import ConfigError, EnvError
from turnwright.media import media_as_text
from turnwright.types import Message, Task

NAMES = [
    *("calculator", "search", "frozen_lake", "sokoban", "hinted_math"),
    *("radar", "geometry", "zoom", "code"),
]
TURNS = {
    "calculator": 2.0,
    "search": 3.0,
    "code": 1.0,
    "hinted_math": 1.0,
    "geometry": 2.0,
    "zoom": 2.0,
}
named = pytest.mark.parametrize(
    "world", [resolve_env(name) for name in NAMES], ids=lambda world: world.name
)
continuation = resolve_env(EnvConfig(use="hinted_math", args={"form": "continuation"}))


def step(env, text):
    return asyncio.run(
        take_step(env, Action(text, read_reply(text, env.tools), raw_source=lambda: text))
    )


@named
def test_the_solver_wins_a_rollout(world):
    tasks = world.tasks("eval", 12, seed=3)
    trajectories = tw.rollout(
        world.factory, tasks, engine=tw.ScriptedEngine(world.solver), limits=Limits(turns=20)
    )
    assert {trajectory.reward for trajectory in trajectories} == {1.0}
    turns = sum(len(trajectory.turns) for trajectory in trajectories) / len(tasks)
    assert turns == TURNS.get(world.name, turns)


@named
def test_the_demonstrator_sometimes_wins(world):
    # A program takes a sandbox.
    played = world.demonstrations(16 if world.name == "code" else 40, seed=1)
    success = sum(episode.trajectory.reward for episode in played) / len(played)
    assert 0.05 < success < 0.95


@named
def test_held_out_tasks_are_held_out_whatever_the_seeds(world):
    train = {content(task) for seed in (0, 1) for task in world.tasks("train", 150, seed)}
    held = {content(task) for seed in (0, 7) for task in world.tasks("eval", 150, seed)}
    assert not train & held
    assert world.tasks("train", 40, 5) == world.tasks("train", 150, 5)[:40]
    assert world.tasks("train", 20, 5) != world.tasks("train", 20, 6)
    world.train_and_eval_tasks(150, 40, seed=2)
    with pytest.raises(ValueError, match="'train' or 'eval'"):
        world.tasks("test", 1, 0)


def content(task):
    return (task.messages[0].text if task.messages else "", repr(task.info))


@named
def test_check_finds_nothing_wrong(world, capsys):
    assert main(["check", world.name]) == 0
    said = capsys.readouterr().out
    assert "warning" not in said
    assert "none rewarded" in said


@named
def test_texts_for_a_tokenizer_hold_what_is_said(world):
    texts = " ".join(world.texts(20, 0))
    task = world.tasks("train", 1, 0)[0]
    opening = media_as_text(world.demonstrations(1, 0)[0].trajectory.turns[0].messages)[-1].text
    assert opening.split()[0] in texts
    assert task.id not in texts


@pytest.mark.parametrize("split", ["train", "eval"])
def test_no_constant_answer_finds_more_than_one_founder_in_all(split):
    world = resolve_env("search")
    tasks = world.tasks(split, 0, seed=0)
    counts = Counter(task.answer for task in tasks)
    assert set(counts.values()) == {len(tasks) // 20}
    assert max(counts.values()) / len(tasks) == world.single_turn_best == 0.05


def test_a_search_shows_the_best_documents_and_no_more():
    env = Search(results=2)
    task = env.tasks("train", 1, 0)[0]
    env.reset(task)
    town = task.info["town"]
    assert step(env, f"I look. <search>{town} founded</search>").observation.startswith(
        f"1. {town} was founded by {task.answer}."
    )
    # Two documents, two numbers.
    assert step(env, "<search>was founded by born in</search>").observation.count(".") == 4
    assert step(env, "<search>zebra</search>").observation == "nothing found"
    assert step(env, "<search></search>").observation == "nothing found"
    for reply in (
        "<search>a</search><search>b</search>",
        "<answer>a</answer> <answer>b</answer>",
        "<answer>a",
        "<answer>a</search>",
    ):
        assert (
            step(env, reply).observation == "Say <search>WORDS</search> or <answer>NAME</answer>."
        )
    assert step(env, f"<answer>{task.answer}</answer>").reward == 1.0
    with pytest.raises(EnvError, match="not of this corpus"):
        Search(towns=9).reset(task)
    with pytest.raises(ConfigError):
        Search(people=3)


def test_a_hole_ends_the_game_and_a_wrong_word_does_not():
    lake = Task(info={"map": ["SFF", "HFF", "FFG"]})
    env = FrozenLake(size=3, rules=True)
    opening = env.reset(lake)
    assert (
        opening[0].text == FrozenLake.rule
        if isinstance(opening[0], Message)
        else opening[0]["content"] == FrozenLake.rule
    )
    assert step(env, "hm").observation == "Say one of left, down, right, up."
    assert "S[F]F" in step(env, "right").observation
    step(env, "left")
    assert step(env, "down")[1:3] == (0.0, True)
    env.close()
    with pytest.raises(EnvError, match="needs info"):
        FrozenLake().reset(Task("go"))


def test_wrong_code_is_told_what_the_example_shows():
    env = Code()
    task = Task("f", info={"kind": "line", "numbers": [3, 4], "example": 5})
    asyncio.run(env.reset(task))
    assert step(env, "def f(x): return x + 3 + 4").observation == "f(5) is 12, not 19"
    assert step(env, "def f(x): return 19").observation == "wrong on a hidden test"
    assert (
        step(env, "def f(x)").observation == "no value: [exit status 1]"
        or "SyntaxError" in step(env, "def f(x)").observation
    )
    assert step(env, "def f(x): return float(x * 3 + 4)").observation == "f(5) is 19.0, not 19"
    assert (
        step(env, "```python\n1\n```\n```python\n2\n```").observation == "Give one block of code."
    )
    right = step(
        env,
        "Here it is:\n```python\ndef f(x):\n    print('PASS')\n    return x * 3 + 4\n```\nDone.",
    )
    assert (right.reward, right.terminated) == (1.0, True)
    with pytest.raises(EnvError, match="not one of code's"):
        asyncio.run(Code().reset(Task("f")))


def test_without_a_sandbox_code_is_an_error_of_the_world_not_of_the_model(monkeypatch):
    from turnwright.envs.isolation import sandbox

    monkeypatch.setattr(
        sandbox,
        "_find_bubblewrap",
        lambda python: "no sandbox: bubblewrap (bwrap) is not installed",
    )
    task = Code.tasks("train", 1, 0)[0]
    (trajectory,) = tw.rollout(Code, [task], engine=tw.ScriptedEngine(Code.solver))
    assert trajectory.reward is None
    assert "no sandbox: bubblewrap" in trajectory.error.message


def test_a_hint_in_a_round_of_its_own():
    task = HintedMath.tasks("train", 1, 0)[0]
    answer = int(task.answer)
    replies = [f"#### {answer + 1}", "I do not know", f"#### {answer}"]
    (trajectory,) = tw.rollout(HintedMath, [task], engine=tw.ScriptedEngine(replies))
    assert trajectory.reward == 1.0
    assert [message.role for message in trajectory.messages] == ["user", "assistant"] * 3
    assert trajectory.messages[2].text == f"That is wrong. {task.info['hints'][0]}"
    assert trajectory.messages[4].text == f"That is wrong. {task.info['hints'][1]}"
    for reply in (
        f"#### {answer}\n#### {answer}",
        f"#### {answer}.",
        f"{answer}",
        f"#### {answer} or {answer + 1}",
        "####",
    ):
        (trajectory,) = tw.rollout(HintedMath, [task], engine=tw.ScriptedEngine([reply] * 3))
        assert (trajectory.reward, len(trajectory.turns)) == (0.0, 3)


def test_a_hint_inside_the_message_takes_the_answer_back():
    task = HintedMath.tasks("train", 1, 0)[0]
    wrong = f"so\n#### {int(task.answer) + 1}"
    engine = tw.ScriptedEngine([wrong, f"#### {task.answer}"])
    (trajectory,) = tw.rollout(continuation.factory, [task], engine=engine)
    assert trajectory.reward == 1.0
    assert [message.role for message in trajectory.messages] == ["user", "assistant"]
    assert (
        trajectory.messages[-1].text
        == f"so\n\nWait, that is wrong. {task.info['hints'][0]}\n#### {task.answer}"
    )
    assert trajectory.branches == {"rewound": 1}
    speak = continuation.solver
    played = asyncio.run(
        play_scripted(continuation.factory(), task, speak, random.Random(0), turns=3)
    )
    assert played.trajectory.reward == 1.0


def test_the_calculator_wants_the_bare_number():
    world = resolve_env("calculator")
    task = world.tasks("train", 1, 0)[0]
    for reply, reward in (
        (task.answer, 1.0),
        (f"It is {task.answer}", 0.0),
        (f"{task.answer} {task.answer}", 0.0),
    ):
        (trajectory,) = tw.rollout(world.factory, [task], engine=tw.ScriptedEngine([reply]))
        assert trajectory.reward == reward


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("search", "bm25s", "search"), ("frozen_lake", "gymnasium", "gym")],
)
def test_a_missing_extra_is_named_before_anything_is_played(name, package, extra, monkeypatch):
    monkeypatch.setattr("turnwright.envs.builtin.common.find_spec", lambda wanted: None)
    with pytest.raises(
        ConfigError, match=rf"{package} is not installed; pip install 'turnwright\[{extra}\]'"
    ):
        resolve_env(name)
