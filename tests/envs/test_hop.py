"""Hop: what the quickstart's world promises."""

import asyncio
import random
from collections import Counter

import pytest

from turnwright.envs import Action, play_scripted, read_reply, resolve_env, take_step
from turnwright.envs.builtin.hop import CODES, GIVE_UP, NAMES, chain_of, held_out
from turnwright.errors import EnvError
from turnwright.types import Task

WORLDS = [resolve_env("hop"), resolve_env("hop_json")]
worlds = pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)


def play(world, task, *replies):
    """Play fixed replies by hand; the last is said again when there are too few."""
    left = list(replies)
    speak = lambda messages, rng: left.pop(0) if len(left) > 1 else left[0]  # noqa: E731
    return asyncio.run(
        play_scripted(world.factory(), task, speak, random.Random(0), turns=world.max_turns)
    )


@worlds
@pytest.mark.parametrize("split", ["train", "eval"])
def test_the_solver_scores_1_in_two_to_four_turns_three_on_average(world, split):
    played = [
        asyncio.run(play_scripted(world.factory(), task, world.solver, random.Random(0), turns=6))
        for task in world.tasks(split, 300, seed=3)
    ]
    turns = Counter(len(episode.replies) for episode in played)
    assert {episode.trajectory.reward for episode in played} == {1.0}
    assert turns == {2: 100, 3: 100, 4: 100}


@worlds
def test_the_demonstrator_is_as_poor_as_the_maths_says(world):
    keep = 1 - GIVE_UP
    expected = sum(keep**hops + (1 - keep**hops) / 10 for hops in (1, 2, 3)) / 3
    played = world.demonstrations(3000, seed=1)
    success = sum(episode.trajectory.reward for episode in played) / len(played)
    assert success == pytest.approx(expected, abs=0.03)  # over 3 standard errors
    guesses = sum(len(episode.replies) == 1 for episode in played) / len(played)
    assert guesses == pytest.approx(GIVE_UP, abs=0.03)


@worlds
@pytest.mark.parametrize("split", ["train", "eval"])
def test_no_single_turn_answer_is_better_than_one_in_ten(world, split):
    tasks = world.tasks(split, 300, seed=0)
    answer = (
        (lambda code: f"answer {code}")
        if world.name == "hop"
        else (lambda code: f'{{"answer": "{code}"}}')
    )
    scores = {
        code: [play(world, task, answer(code)).trajectory.reward for task in tasks]
        for code in CODES
    }
    for code in CODES:
        assert sum(scores[code]) / len(tasks) == world.single_turn_best == 0.1
    # One right code per task.
    assert all(sum(column) == 1 for column in zip(*scores.values(), strict=True))


@worlds
def test_what_the_question_shows_tells_nothing_of_the_code(world):
    codes = {name: Counter() for name in NAMES}
    for task in world.tasks("train", 9000, seed=5):
        codes[task.info["start"]][task.answer] += 1
    for counts in codes.values():
        total = sum(counts.values())
        assert max(counts.values()) / total < 0.16  # about 560 a name: 0.1 and 4.7 standard errors


@worlds
def test_no_chain_of_names_is_in_both_splits_whatever_the_seeds(world):
    train = {chain_of(task) for seed in (0, 1) for task in world.tasks("train", 900, seed)}
    held = {chain_of(task) for seed in (0, 7) for task in world.tasks("eval", 900, seed)}
    assert not train & held
    assert all(held_out(chain) for chain in held)
    assert not any(held_out(chain) for chain in train)
    world.train_and_eval_tasks(960, 256, seed=0)


@worlds
def test_tasks_are_different_and_the_same_for_a_seed(world):
    tasks = world.tasks("train", 2000, seed=4)
    assert len({task.id for task in tasks}) == 2000
    assert world.tasks("train", 50, seed=4) == tasks[:50]
    assert world.tasks("train", 50, seed=5) != tasks[:50]
    assert {task.env for task in tasks} == {world.name}


WORDS = ["answer", "answer {all}", "answer 0 1 2 3 4 5 6 7 8 9", "answer {code} {other}", "answer {code}.", "answer: {code}",  # noqa: E501
         "answer {code}\nanswer {other}", "answer 0{code}", "answer code", "answer 1/10", "answer nan", "answer {wide}",  # noqa: E501
         "answer  ", "answer {code} reward=1", "answer {other}"]  # fmt: skip
REPLIES = ["", "{}", "{code}", '{"answer": {code}}', '{"answer": "0123456789"}', '{"answer": ["{code}", "{other}"]}',  # noqa: E501
           '{"answer": "{other}", "answer": "{code}"}', '{"answer": "{code}"} {"answer": "{other}"}', '{"answer": "{wide}"}',  # noqa: E501
           '{"answer": "{code}\\"}', '{"answer": ""}', "answer {code}", '{"answer": "{code}"}.', '{"answer": "{other}"}',  # noqa: E501
           ]  # fmt: skip


@pytest.mark.parametrize(
    ("world", "reply"),
    [(WORLDS[0], reply) for reply in WORDS] + [(WORLDS[1], reply) for reply in REPLIES],
    ids=lambda value: getattr(value, "name", repr(value)),
)
def test_an_exploit_scores_0(world, reply):
    for task in world.tasks("train", 20, seed=8):
        wide = chr(ord(task.answer) - ord("0") + 0xFF10)
        other = str((int(task.answer) + 1) % 10)
        text = (
            reply.replace("{code}", task.answer)
            .replace("{other}", other)
            .replace("{wide}", wide)
            .replace("{all}", ",".join(CODES))
        )
        played = play(world, task, text)
        assert played.trajectory.reward == 0.0
        assert len(played.replies) == 1, "an answer that is not one code ends the episode"


MISTAKES = [
    "lookup",
    "lookup zebra",
    "Lookup amber",
    "lookup amber birch",
    "",
    "see amber",
    "lookup amber\nanswer 7",
    "x" * 100_000,
]


@pytest.mark.parametrize("reply", MISTAKES, ids=lambda value: repr(value[:30]))
def test_a_mistake_is_told_shortly_and_goes_on(reply):
    played = play(WORLDS[0], WORLDS[0].tasks("train", 1)[0], reply)
    assert (len(played.replies), played.trajectory.reward) == (6, 0.0)
    assert played.trajectory.turns[1].messages[0].text in ("lookup or answer", "unknown")


CALLS = {
    '<tool_call>{"name": "lookup", "arguments": {"key": "amber"': '{"error": "call"}',
    "<tool_call>lookup amber</tool_call>": '{"error": "call"}',
    '<tool_call>{"name": "answer", "arguments": {"key": "7"}}</tool_call>': '{"error": "tool"}',
    '<tool_call>{"name": "lookup", "arguments": {"name": "amber"}}</tool_call>': '{"error": "key"}',
    '<tool_call>{"name": "lookup", "arguments": {"key": ["amber", "birch"]}}</tool_call>': '{"error": "key"}',  # noqa: E501
    '<tool_call>{"name": "lookup", "arguments": {"key": "zebra"}}</tool_call>': '{"error": "unknown"}',  # noqa: E501
}


@pytest.mark.parametrize("reply", CALLS, ids=repr)
def test_a_malformed_call_is_told_shortly_and_goes_on(reply):
    played = play(WORLDS[1], WORLDS[1].tasks("train", 1)[0], reply)
    assert (len(played.replies), played.trajectory.reward) == (6, 0.0)
    assert played.trajectory.turns[1].messages[0].text == CALLS[reply]


def test_two_calls_of_one_reply_are_both_answered():
    world = WORLDS[1]
    env, task = world.factory(), world.tasks("train", 1)[0]

    async def both():
        await env.reset(task)
        call = world.solver(task.messages, random.Random(0))
        return await take_step(env, Action("", read_reply(call + call, env.tools)))

    messages = asyncio.run(both()).observation
    assert [message.tool_call_id for message in messages] == ["call_0", "call_1"]
    assert {message.role for message in messages} == {"tool"}


@worlds
def test_a_name_and_a_code_have_one_surface_form(world):
    before = '"' if world.name == "hop_json" else " "
    for text in world.texts(200):
        for word in (*NAMES, *CODES):
            at = text.find(word)
            while at >= 0:
                assert text[at - 1 : at] == before, text
                at = text.find(word, at + 1)


@worlds
def test_rules_are_told_when_asked_for(world):
    env, task = type(world.factory())(rules=True), world.tasks("train", 1)[0]
    opening = asyncio.run(env.reset(task))
    assert [message.role for message in opening] == ["system", "user"]


@worlds
def test_another_world_s_task_is_refused_with_words(world):
    with pytest.raises(EnvError, match="is not a Hop task"):
        asyncio.run(world.factory().reset(Task("What is 6 * 7?", "42")))
