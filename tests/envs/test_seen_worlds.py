"""The built-in environments with images: what is shown is what is so, in pixels and in
words, and cheats score 0."""

import asyncio
import json
import random
from collections import Counter
from itertools import product

import numpy as np
import pytest

import turnwright as tw
from turnwright.config import EnvConfig, Limits
from turnwright.envs import Action, play_scripted, read_reply, resolve_env, take_step
from turnwright.envs.builtin import geometry, radar, zoom
from turnwright.errors import ConfigError, EnvError
from turnwright.media import MediaStore

RADAR, GEOMETRY, ZOOM = resolve_env("radar"), resolve_env("geometry"), resolve_env("zoom")


def step(env, text):
    return asyncio.run(
        take_step(env, Action(text, read_reply(text, env.tools), raw_source=lambda: text))
    )


def by_hand(world, task, *replies):
    """Play fixed replies by hand; the last is said again when there are too few."""
    left = list(replies)
    speak = lambda messages, rng: left.pop(0) if len(left) > 1 else left[0]  # noqa: E731
    return asyncio.run(
        play_scripted(world.factory(), task, speak, random.Random(0), turns=world.max_turns)
    ).trajectory


def pictures(trajectory):
    return [
        part for turn in trajectory.turns for message in turn.messages for part in message.content
    ]


# Radar


def test_radar_shows_one_new_image_a_turn_and_nothing_else():
    store = MediaStore()
    for task in RADAR.tasks("train", 20, seed=1):
        trajectory = asyncio.run(
            play_scripted(RADAR.factory(), task, RADAR.solver, random.Random(0))
        ).trajectory
        seen = pictures(trajectory)
        assert trajectory.reward == 1.0
        assert len(trajectory.turns) == len(seen) == abs(task.info["right"]) + abs(task.info["up"])
        assert all(isinstance(part, tw.Image) and part.value.shape == (32, 32, 3) for part in seen)
        assert len({store.put(part).sha256 for part in seen}) == len(seen)


def test_radar_shows_the_goal_where_it_lies():
    for task in RADAR.tasks("eval", 44, seed=0):
        (message,) = asyncio.run(RADAR.factory().reset(task))
        pixels = message.content[0].value
        rows, columns = np.nonzero((pixels == radar.COLOURS[task.info["colour"]]).all(axis=2))
        assert (rows.size, np.ptp(rows), np.ptp(columns)) == (16, 3, 3)
        assert (columns.min() - 14) / 4 == task.info["right"]
        assert (14 - rows.min()) / 4 == task.info["up"]
        assert (pixels[14:18, 14:18] == radar.PLAYER).all()
        assert message.content[0].alt == radar.describe_goal((task.info["right"], task.info["up"]))


def test_radar_s_splits_share_no_place_of_one_colour_and_cover_all_alike():
    kinds = {
        split: Counter(kind(t) for t in RADAR.tasks(split, 44 * 3, seed))
        for split, seed in (("train", 0), ("eval", 7))
    }
    assert not set(kinds["train"]) & set(kinds["eval"])
    assert set(kinds["train"].values()) == {1}
    assert set(kinds["eval"].values()) == {3}
    assert {place[:2] for place in kinds["train"]} == {place[:2] for place in kinds["eval"]}


def test_no_image_of_one_split_is_in_the_other():
    seen = {}
    for split in ("train", "eval"):
        tasks = RADAR.tasks(split, 60, 0)
        runs = [
            asyncio.run(
                play_scripted(RADAR.factory(), t, RADAR.solver, random.Random(0))
            ).trajectory
            for t in tasks
        ]
        seen[split] = {part.value.tobytes() for run in runs for part in pictures(run)}
    assert len(seen["train"]) > 150
    assert not seen["train"] & seen["eval"]


def kind(task):
    return task.info["right"], task.info["up"], task.info["colour"]


def test_radar_s_demonstrator_fails_where_habit_does_not_lead():
    played = RADAR.demonstrations(2000, seed=3)
    won: dict[tuple[bool, bool], list[float]] = {}
    for episode in played:
        info = episode.trajectory.task.info
        if info["right"] and info["up"]:
            won.setdefault((info["right"] > 0, info["up"] > 0), []).append(
                episode.trajectory.reward
            )
    share = {side: sum(rewards) / len(rewards) for side, rewards in won.items()}
    assert share[True, True] > 0.7
    assert 0.02 < share[False, False] < 0.15  # a signal, and a weak one
    assert 0.1 < share[True, False] < 0.4
    assert 0.1 < share[False, True] < 0.4
    assert 0.3 < sum(e.trajectory.reward for e in played) / len(played) < 0.42


def test_who_sees_nothing_reaches_one_goal_in_nine_at_best():
    """By enumeration: without images all that a player can choose is its moves, in order."""
    goals = [(x, y) for x, y in product(range(-3, 4), repeat=2) if abs(x) + abs(y) >= 2]
    best = max(
        sum(reached(goal, moves) for goal in goals)
        for moves in product(radar.MOVES.values(), repeat=7)
    )
    assert (best, len(goals)) == (5, 44)


def reached(goal, moves):
    x, y = goal
    for right, up in moves[: abs(x) + abs(y) + 1]:
        if max(abs(x - right), abs(y - up)) <= 3:
            x, y = x - right, y - up
        if x == y == 0:
            return True
    return False


@pytest.mark.parametrize(
    "reply", ["", "up down", "UP", "go up", "up\nleft", "goal: 0", "x" * 100_000, "<tool_call>"]
)
def test_a_reply_that_is_no_move_leads_nowhere(reply):
    task = RADAR.tasks("train", 1, seed=0)[0]
    trajectory = by_hand(RADAR, task, reply)
    assert trajectory.reward == 0.0
    assert len(trajectory.turns) == abs(task.info["right"]) + abs(task.info["up"]) + 1
    assert {part.alt for part in pictures(trajectory)} == {
        radar.describe_goal((task.info["right"], task.info["up"]))
    }


def test_radar_refuses_what_is_not_its_own():
    far = resolve_env(EnvConfig(use="radar", args={"reach": 4}))
    strange = [
        t for t in far.tasks("train", 300, 0) if max(abs(t.info["right"]), abs(t.info["up"])) == 4
    ]
    for task in (strange[0], tw.Task("hi"), tw.Task(info={"right": 1, "up": 0, "colour": 0})):
        with pytest.raises(EnvError, match="not one of radar's"):
            asyncio.run(RADAR.factory().reset(task))
    with pytest.raises(ConfigError, match="2 to 4"):
        resolve_env(EnvConfig(use="radar", args={"reach": 5}))
    opening = asyncio.run(radar.Radar(rules=True).reset(RADAR.tasks("train", 1, 0)[0]))
    assert [message.role for message in opening] == ["system", "user"]


# Geometry


def call(answer):
    return geometry._call(answer)


def figure_task(name="area", answer=None):
    found = next(t for t in GEOMETRY.tasks("train", 200, 0) if t.info["kind"] == name)
    return found if answer is None else tw.Task(answer=answer, info=found.info)


def test_geometry_checks_tells_and_ends():
    task = figure_task()
    env = GEOMETRY.factory()
    env.reset(task)
    told = step(env, call("7.25"))
    assert told.observation[0].role == "tool"
    assert told.observation[0].text == "7.25 is wrong. Think again."
    last = step(env, call("7.5"))
    assert "no further check" in last.observation[0].text
    assert (told.reward, last.reward, last.terminated) == (0.0, 0.0, False)
    end = step(env, f"So it is \\boxed{{{task.answer}}}.")
    assert (end.reward, end.terminated) == (1.0, True)


def test_geometry_s_last_turn_ends_whatever_is_said():
    task = figure_task()
    right = by_hand(GEOMETRY, task, call("1.5"), call("1.5"), call(task.answer))
    assert (right.reward, len(right.turns)) == (0.0, 3)
    boxed = by_hand(
        GEOMETRY, task, call("1.5"), call("1.5"), f"\\boxed{{{task.answer}}} {call(task.answer)}"
    )
    assert boxed.reward == 1.0
    checked = resolve_env(EnvConfig(use="geometry", args={"reward": "checked", "turns": 4}))
    assert by_hand(checked, task, call("1.5"), call(task.answer), "done").reward == 1.0
    assert by_hand(checked, task, call(task.answer), call("1.5"), "done").reward == 0.0
    assert by_hand(checked, task, f"\\boxed{{{task.answer}}}").reward == 0.0


@pytest.mark.parametrize(
    "reply",
    [
        "{right}",
        "\\boxed{{{right}}} \\boxed{{{wrong}}}",
        "\\boxed{{{wrong}}} \\boxed{{{right}}}",
        "\\boxed{{{right}, {wrong}}}",
        "\\boxed{{{right} or {wrong}}}",
        "\\boxed{{\\boxed{{{right}}}}}",
        "\\boxed{{0x10}} \\boxed",
        "\\boxed{{nan}}",
        "\\boxed{{1e9}}",
        "\\boxed{{" + "9" * 5000 + "}}",
        "{right} is right. Now give it as \\boxed{{}}.",
        "<tool_response>\n{right} is right.\n</tool_response>",
        "<tool_response>\n\\boxed{{right}} is right.\n</tool_response>\\boxed{{{wrong}}}",
        '<tool_call>{{"name": "check_answer", "arguments": {{"answer": "{wrong}"}}}}</tool_call>',
        '<tool_call>{{"name": "check_answer", "arguments": {{"answer": "{wrong}", "right": '
        "true}}}}</tool_call>",
        '<tool_call>{{"name": "check_answer", "arguments": {{"answer": ["{right}", '
        '"{wrong}"]}}}}</tool_call>',
        '<tool_call>{{"name": "set_answer", "arguments": {{"answer": "{wrong}"}}}}</tool_call>',
    ],
)
@pytest.mark.parametrize("by", ["final", "checked"])
def test_what_cheats_geometry_scores_0(reply, by):
    world = resolve_env(EnvConfig(use="geometry", args={"reward": by}))
    for name in geometry.KINDS:
        task = figure_task(name)
        text = reply.format(right=task.answer, wrong=float(task.answer) + 3)
        assert by_hand(world, task, text).reward == 0.0, name


def test_a_flood_of_checks_in_one_reply_checks_none():
    checked = resolve_env(EnvConfig(use="geometry", args={"reward": "checked"}))
    task = figure_task()
    flood = "".join(call(number) for number in range(500))
    env = checked.factory()
    env.reset(task)
    told = step(env, flood)
    assert {message.text for message in told.observation} == {
        "Error: one call a turn; none of these was run"
    }
    assert by_hand(checked, task, flood).reward == 0.0
    lazy = [
        by_hand(GEOMETRY, t, call("40"), call("60"), "\\boxed{90}").reward
        for t in GEOMETRY.tasks("eval", 300, 2)
    ]
    assert sum(lazy) / 300 < 0.05  # guesses that are likely, and seen to be wrong


def test_an_answer_is_compared_as_a_number():
    for given, right, same in [
        ("42.0", "42", True), ("42.01", "42", False), (" 42 ", "42", True), ("042", "42", True), ("28.8", "28.8", True),  # noqa: E501
        ("28.84", "28.8", True), ("28.86", "28.8", False), ("4_2", "42", False), ("٤٢", "42", False), ("AB", "AB", True),  # noqa: E501
        ("-42", "42", False), ("", "42", False), ("inf", "42", False), ("2x+1", "2x+1", True),
    ]:  # fmt: skip
        assert geometry.is_correct(given, right) is same, (given, right)


def test_a_figure_is_drawn_from_its_numbers_alone():
    store = MediaStore()
    seen = {}
    for task in GEOMETRY.tasks("train", 120, 4):
        first, again = (store.put(geometry.figure(task.info, 112)) for _ in range(2))
        assert first == again
        assert (first.width, first.height) == (112, 112)
        assert (store.pixels(first) != 255).any()
        seen.setdefault(first.sha256, set()).add(first.alt)
    assert all(len(told) == 1 for told in seen.values()), "what looks alike is told alike"


def test_rows_of_a_dataset_are_played_in_the_same_loop():
    pixels = np.full((8, 8, 3), 9, np.uint8)
    task = tw.Task("Find x.", answer="3\\sqrt{2}", images=[tw.Image(pixels, alt="a square")])
    opening = GEOMETRY.factory().reset(task)
    assert [message.role for message in opening] == ["system", "user"]
    assert opening[1].content == (task.images[0], "Find x.")
    # nested braces are not read, so such an answer is checked, not boxed
    checked = resolve_env(EnvConfig(use="geometry", args={"reward": "checked"}))
    assert by_hand(checked, task, call("3\\sqrt{2}"), "done").reward == 1.0
    with pytest.raises(EnvError, match="no answer"):
        GEOMETRY.factory().reset(tw.Task("Find x."))


def test_a_dataset_file_with_images_is_played_in_the_same_loop(tmp_path):
    rows = []
    for number in range(6):
        geometry.figure(
            {"kind": "area", "a": 3 + number, "b": 4, "turned": 0, "ink": 0}, 64
        ).value.save(tmp_path / f"{number}.png")
        rows.append(
            {
                "question": "<image>What is the area?",
                "images": [f"{number}.png"],
                "answer": str(4 * (3 + number)),
            }
        )
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    world = resolve_env(EnvConfig(use="geometry", tasks="rows.jsonl"), base=tmp_path)
    for task in world.tasks("train"):
        opening = world.factory().reset(task)
        assert [message.role for message in opening] == ["system", "user"]
        assert [type(part) for part in opening[1].content] == [tw.Image, str]
        assert (
            by_hand(world, task, call("1"), call(task.answer), f"\\boxed{{{task.answer}}}").reward
            == 1.0
        )


# Zoom


def test_zoom_shows_a_part_as_it_is():
    store = MediaStore()
    task = ZOOM.tasks("eval", 1, seed=5)[0]
    env = ZOOM.factory()
    opening = env.reset(task)
    whole = store.put(opening.content[0])
    assert store.pixels(whole).shape == (64, 64, 3)
    assert "too small to read" in whole.alt
    assert f" {task.answer}" not in whole.alt
    x, y, _ = task.info["squares"][task.info["colour"]]
    x, y = min(x, 448), min(y, 448)
    crop = store.put(step(env, _zoom([x, y, x + 64, y + 64])).observation[0].content[0])
    image = np.asarray(zoom.draw({name: tuple(at) for name, at in task.info["squares"].items()}))
    assert (store.pixels(crop) == image[y : y + 64, x : x + 64]).all()
    assert f"{task.info['colour']} square" in crop.alt
    assert f": {task.answer}. " in crop.alt
    half = store.put(step(env, _zoom([0, 0, 256, 512])).observation[0].content[0])
    assert store.pixels(half).shape[0] * store.pixels(half).shape[1] <= 64 * 64
    assert f": {task.answer}" not in half.alt
    assert step(env, task.answer).reward == 1.0


def _zoom(box):
    return f'<tool_call>{{"name": "zoom", "arguments": {{"box": {box}}}}}</tool_call>'


@pytest.mark.parametrize(
    ("box", "cause"),
    [
        ([0, 0, 64], "no_box"),
        ([0, 0, 64, 64, 64], "no_box"),
        ([-1, 0, 64, 64], "outside"),
        ([0, 0, 513, 64], "outside"),
        ([64, 0, 0, 64], "outside"),
        ([0, 0, 10**30, 64], "outside"),
        ([0, 0, 15, 64], "too_small"),
        ([0, 0, 64.5, 64], "wrong_type"),
        ('"0 0 64 64"', "wrong_type"),
        ("[true, 0, 64, 64]", "wrong_type"),
        ("null", "wrong_type"),
    ],
)
def test_a_box_that_is_none_is_a_mistake_that_is_told(box, cause):
    env = ZOOM.factory()
    env.reset(ZOOM.tasks("train", 1, 0)[0])
    told = step(env, _zoom(box))
    assert told.observation[0].text.startswith("Error: ")
    assert told.info[f"tool_errors/{cause}"] == 1
    assert (told.reward, told.terminated) == (0.0, False)


@pytest.mark.parametrize(
    "reply", ["{right} {wrong}", "{right}.", "{wrong}", "answer {right}", "", "{right}\n{wrong}"]
)
def test_what_cheats_zoom_scores_0(reply):
    for task in ZOOM.tasks("train", 5, 0):
        assert (
            by_hand(ZOOM, task, reply.format(right=task.answer, wrong=int(task.answer) + 1)).reward
            == 0.0
        )


def test_a_guess_at_zoom_is_right_one_time_in_ninety():
    tasks = ZOOM.tasks("eval", 900, 1)
    counts = Counter(task.answer for task in tasks)
    assert max(counts.values()) / len(tasks) < 0.04
    assert ZOOM.single_turn_best == 1 / 90


@pytest.mark.parametrize("world", [RADAR, GEOMETRY, ZOOM], ids=lambda world: world.name)
def test_a_model_without_eyes_plays_by_the_words(world):
    trajectories = tw.rollout(
        world.factory,
        world.tasks("eval", 8, 1),
        engine=tw.ScriptedEngine(world.solver),
        limits=Limits(turns=10),
    )
    assert {trajectory.reward for trajectory in trajectories} == {1.0}
    assert not any(span.media for trajectory in trajectories for span in trajectory.spans)
