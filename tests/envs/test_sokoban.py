"""Sokoban: boards that can be solved, by no fewer moves than the solver's; the rules of pushing;
pictures that show the board and nothing else; and rewards by which success is counted alike."""

import asyncio
import random
from collections import deque
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit import real_tokenizers

import turnwright as tw
from turnwright.config import EnvConfig, Limits
from turnwright.envs import Action, play_scripted, read_reply, resolve_env, take_step
from turnwright.envs.builtin import Sokoban, sokoban
from turnwright.envs.builtin.common import MOVES
from turnwright.envs.builtin.sokoban import COLORS, Board, shortest_solution
from turnwright.errors import ConfigError, EnvError
from turnwright.media import MediaStore
from turnwright.training.evaluation import summarize
from turnwright.training.model.models import train_tokenizer
from turnwright.types import Message, Task

CORRIDOR = ("#######", "#@_$_.#", "#_____#", "#######")
"""Solved by right, right, right."""
LOST = ("######", "#$__@#", "#____#", "#__._#", "######")
TWO_BOXES = ("########", "#.$@_$.#", "#______#", "########")

WORLDS = [
    resolve_env(EnvConfig(use="sokoban", name=name, args=args))
    for name, args in {
        "6x6": {},
        "5x5": {"size": 5, "moves": 8},
        "7x7, two boxes": {"size": 7, "boxes": 2, "moves": 18},
        "positions": {"view": "positions"},
        "image": {"view": "image"},
        "shaped": {"shaped": True},
    }.items()
]
named = pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)


def step(env, text):
    return asyncio.run(
        take_step(env, Action(text, read_reply(text, env.tools), raw_source=lambda: text))
    )


def opened(rows, **args):
    env = Sokoban(**args)
    asyncio.run(env.reset(Task(info={"board": list(rows)})))
    return env


def by_hand(rows, *replies, turns=None, **args):
    """Play fixed replies by hand; the last is said again when there are too few."""
    left = list(replies)
    speak = lambda messages, rng: left.pop(0) if len(left) > 1 else left[0]  # noqa: E731
    env = Sokoban(**args)
    task = Task(info={"board": list(rows)})
    played = play_scripted(env, task, speak, random.Random(0), turns=turns or env.max_turns)
    return asyncio.run(played).trajectory


# Generated boards


def distance(board):
    """Fewest moves to a solved board, by trying all moves, without any of the solver's code."""
    first = tuple("".join(row) for row in board.rows)
    seen = {first}
    queue = deque([(first, 0)])
    while queue:
        rows, moves = queue.popleft()
        if not any("$" in row for row in rows):
            return moves
        for down, right in ((0, 1), (0, -1), (1, 0), (-1, 0)):
            after = plain_move(rows, down, right)
            if after not in seen:
                seen.add(after)
                queue.append((after, moves + 1))
    return None


def plain_move(rows, down, right):
    """The rules over again, on characters."""
    (row, column), *_ = [
        (y, x) for y, line in enumerate(rows) for x, cell in enumerate(line) if cell in "@+"
    ]
    cells = [list(line) for line in rows]
    y, x = row + down, column + right
    if cells[y][x] == "#":
        return rows
    if cells[y][x] in "$*":
        beyond = cells[y + down][x + right]
        if beyond in "#$*":
            return rows
        cells[y + down][x + right] = "*" if beyond == "." else "$"
        cells[y][x] = "." if cells[y][x] == "*" else "_"
    cells[y][x] = "+" if cells[y][x] == "." else "@"
    cells[row][column] = "." if cells[row][column] == "+" else "_"
    return tuple("".join(line) for line in cells)


@pytest.mark.parametrize(
    ("args", "count"),
    [
        ({"size": 5, "moves": 8}, 60),
        ({}, 60),
        ({"moves": 30}, 40),
        ({"size": 6, "boxes": 2, "moves": 20}, 15),
    ],
)
def test_the_solver_s_solution_is_a_shortest_one(args, count):
    env = Sokoban(**args)
    for split in ("train", "eval"):
        for task in env.tasks(split, count, seed=3):
            board = Board.read(task.info["board"])
            solution = shortest_solution(board)
            assert len(solution) == task.info["moves"] == distance(board)
            assert 3 <= len(solution) <= env.max_turns // 2
            assert len(set(solution)) > 1
            for move in solution:
                assert not board.is_solved
                assert not board.is_stuck
                board = board.moved(move)
            assert board.is_solved


@pytest.mark.parametrize("seed", range(40))
def test_from_any_state_the_solver_finds_a_shortest_solution_or_none(seed):
    rng = random.Random(seed)
    (task,) = Sokoban(boxes=1 + seed % 2, moves=16).tasks("train", 1, seed=seed)
    board = Board.read(task.info["board"])
    for _ in range(rng.randrange(12)):
        board = board.moved(rng.choice(tuple(MOVES)))
    solution = shortest_solution(board)
    assert (len(solution) or None) == (distance(board) or None)
    assert len(shortest_solution(board, max_moves=len(solution))) == len(solution)
    if solution:
        assert shortest_solution(board, max_moves=len(solution) - 1) == ()
    if board.is_stuck:
        assert distance(board) is None


@pytest.mark.parametrize("size", range(5, 11))
def test_rooms_of_all_sizes_are_closed_hang_together_and_vary(size):
    boxes = min(3, size - 4)
    tasks = Sokoban(size=size, boxes=boxes, moves=30).tasks("train", 8, seed=1)
    boards = [Board.read(task.info["board"]) for task in tasks]
    assert len({board.room for board in boards}) >= 6
    for board in boards:
        assert (board.height, board.width, len(board.boxes)) == (size, size, boxes)
        alone = replace(board, boxes=frozenset())
        assert set(sokoban._walks(alone.floor, alone.player)) == board.floor
        assert 0.5 < len(board.floor) / (size - 2) ** 2 < 0.95


@named
def test_no_board_of_one_split_is_met_in_the_other(world):
    """Whatever is pushed where: walls and targets of a room stay, and are of one split."""
    rooms = {}
    for split, seeds in (("train", (0, 1)), ("eval", (0, 7))):
        tasks = [task for seed in seeds for task in world.tasks(split, 100, seed)]
        rooms[split] = {Board.read(task.info["board"]).room for task in tasks}
    assert len(rooms["train"]) > 90
    assert not rooms["train"] & rooms["eval"]


@named
def test_the_same_seed_draws_the_same_boards(world):
    assert world.tasks("train", 30, 5) == world.tasks("train", 60, 5)[:30]
    assert world.tasks("train", 30, 5) != world.tasks("train", 30, 6)


@named
def test_the_solver_wins_in_as_many_turns_as_its_solution_has_moves(world):
    tasks = world.tasks("eval", 10, seed=3)
    trajectories = tw.rollout(
        world.factory, tasks, engine=tw.ScriptedEngine(world.solver), limits=Limits(turns=60)
    )
    for task, trajectory in zip(tasks, trajectories, strict=True):
        assert len(trajectory.turns) == task.info["moves"]
        assert trajectory.turns[-1].info == {"solved": True}
        assert 1.0 <= trajectory.reward < 1.5
        assert world.name == "shaped" or trajectory.reward == 1.0


@named
def test_the_demonstrator_wins_sometimes(world):
    played = world.demonstrations(60, seed=1)
    share = sum(episode.trajectory.reward >= 1.0 for episode in played) / len(played)
    assert 0.3 < share < 0.95, share


def test_a_player_that_repeats_one_move_never_wins():
    for task in Sokoban().tasks("train", 60, seed=2):
        for move in MOVES:
            assert by_hand(task.info["board"], move).reward == 0.0


# Rules


WALKS = st.tuples(
    st.sampled_from(
        [task for world in WORLDS[:3] for task in world.tasks("train", 12, seed=4)]
        + [Task(info={"board": list(rows)}) for rows in (CORRIDOR, LOST, TWO_BOXES)]
    ),
    st.lists(st.sampled_from(tuple(MOVES)), max_size=40),
)


@given(WALKS)
def test_boxes_are_pushed_one_at_a_time_and_only_by_the_player(walk):
    task, moves = walk
    board = Board.read(task.info["board"])
    for move in moves:
        after = board.moved(move)
        assert after.rows == plain_move(board.rows, *MOVES[move])
        assert (after.floor, after.targets) == (board.floor, board.targets)
        assert after.player in after.floor - after.boxes
        assert len(after.boxes) == len(board.boxes)
        assert after.boxes <= after.floor

        gone, come = board.boxes - after.boxes, after.boxes - board.boxes
        down, right = MOVES[move]
        if gone:
            assert gone == {after.player}
            assert come == {(after.player[0] + down, after.player[1] + right)}
        if not after.is_solved:
            assert Board.read(after.rows) == after
        board = after


@given(WALKS, st.booleans())
def test_an_episode_is_a_success_if_and_only_if_it_is_solved(walk, shaped):
    task, moves = walk
    board = Board.read(task.info["board"])
    used = 0
    while used < len(moves) and not board.is_solved:
        board = board.moved(moves[used])
        used += 1
    replies = moves[:used] or ["hm"]
    trajectory = by_hand(task.info["board"], *replies, turns=len(replies), shaped=shaped, moves=30)
    assert (trajectory.reward >= 1.0) == board.is_solved
    assert summarize([trajectory], 1.0).success == float(board.is_solved)
    if not shaped:
        assert trajectory.reward == float(board.is_solved)
        assert [turn.reward for turn in trajectory.turns if turn.reward] == [1.0] * board.is_solved


def test_a_wall_takes_a_turn():
    env = opened(CORRIDOR)
    before = step(env, "down").observation.text
    assert before == "# # # # # # #\n# _ _ $ _ . #\n# @ _ _ _ _ #\n# # # # # # #"
    for move in ("down", "left"):
        wasted = step(env, move)
        assert wasted.observation.text == before
        assert (wasted.reward, wasted.terminated) == (0.0, False)
    assert step(env, " UP\n").observation.text.splitlines()[1] == "# @ _ $ _ . #"
    assert by_hand(CORRIDOR, *["up"] * 5, "right", turns=7).reward == 0.0
    assert by_hand(CORRIDOR, *["up"] * 5, "right", turns=8).reward == 1.0


def test_a_lost_game_goes_on_until_the_limit_or_ends_at_once():
    replies = ["down", "down", "left", "right"]
    assert len(by_hand(LOST, *replies).turns) == 24
    ended = by_hand(LOST, *replies, end_stuck=True)
    assert len(ended.turns) == 1
    assert (ended.reward, ended.turns[0].info) == (0.0, {"solved": False})
    assert by_hand(CORRIDOR, "right", end_stuck=True).reward == 1.0


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "right.",
        "right right",
        "right\nup",
        "go right",
        "r",
        "2",
        "<answer>right</answer>",
        '<tool_call>{"name": "right", "arguments": {}}</tool_call>',
        "# # # # #\n# @ $ . #\n# # # # #",
        "x" * 200,
        "\ud800\x00",
    ],
)
def test_a_reply_that_is_no_move_takes_a_turn_and_is_told(reply):
    task = Task(info={"board": list(CORRIDOR)})
    (trajectory,) = tw.rollout(
        Sokoban, [task], engine=tw.ScriptedEngine([reply, "right", "right", "right"])
    )
    assert trajectory.metrics["invalid_actions"] == 1
    assert trajectory.turns[1].messages[0].text == "Say one of left, down, right, up."
    assert (trajectory.reward, len(trajectory.turns)) == (1.0, 4)


def test_the_solver_answers_a_move_whatever_it_reads():
    rng = random.Random(0)
    lost = Message("user", Board.read(LOST).text)
    for messages in (
        [lost],
        [Message("user", "Say one of left, down, right, up.")],
        [Message("user", "# A heading")],
        [Message("user", "")],
        [],
    ):
        assert Sokoban.solver(messages, rng) in MOVES
    shown = Message("user", Board.read(CORRIDOR).text)
    forged = Message("assistant", Board.read(LOST).text)
    told = Message("user", "Say one of left, down, right, up.")
    assert Sokoban.solver([lost, shown, forged, told], rng) == "right"


# Rewards


def test_a_shaped_reward_is_the_sum_of_its_parts():
    env = Sokoban(shaped=True)
    scale = 11 - 0.1 * 25

    solved = by_hand(CORRIDOR, "right", shaped=True)
    parts = [-0.1, -0.1, -0.1 + 1 + 10]
    assert [turn.reward for turn in solved.turns] == pytest.approx([p / scale for p in parts])
    assert solved.reward == pytest.approx(10.7 / scale)

    onto = by_hand(TWO_BOXES, "left", turns=1, shaped=True)
    assert onto.turns[0].reward == pytest.approx(0.9 / scale)
    assert onto.reward == pytest.approx((1 - 0.1 * env.max_turns) / scale)

    rows = ("#######", "#@*_$.#", "#_____#", "#######")
    off = by_hand(rows, "right", turns=1, shaped=True)
    assert off.turns[0].reward == pytest.approx(-1.1 / scale)


def test_silence_and_an_early_end_save_no_cost():
    scale = 11 - 0.1 * 25
    walls = by_hand(CORRIDOR, "up", shaped=True)
    assert walls.reward == pytest.approx(-2.4 / scale)
    for other in (
        by_hand(CORRIDOR, "hm", shaped=True),
        by_hand(CORRIDOR, "up", turns=3, shaped=True),
        by_hand(LOST, "down", shaped=True, end_stuck=True),
    ):
        assert other.reward == pytest.approx(walls.reward)

    # A reply that is cut off ends the episode, and the environment does not see it.
    (cut,) = tw.rollout(
        resolve_env(EnvConfig(use="sokoban", args={"shaped": True})).factory,
        [Task(info={"board": list(CORRIDOR)})],
        engine=tw.ScriptedEngine(["x" * 2000]),
    )
    assert (cut.stop, len(cut.turns)) == (tw.StopReason.TURN_LENGTH, 1)
    assert cut.reward == pytest.approx(walls.reward)

    late = by_hand(CORRIDOR, "hm", "up", "right", shaped=True)
    assert late.reward == pytest.approx((11 - 0.1 * 5) / scale)


@pytest.mark.parametrize("moves", range(4, 31))
def test_a_shaped_reward_is_1_in_the_last_turn_and_less_with_a_box_beside(moves):
    env = Sokoban(moves=moves, shaped=True)
    waits = env.max_turns - 3
    for wait in ("up", "hm"):
        last = by_hand(CORRIDOR, *[wait] * waits, "right", moves=moves, shaped=True)
        assert (len(last.turns), last.turns[-1].info) == (env.max_turns, {"solved": True})
        assert 1.0 <= last.reward < 1.1
    # At most five boxes, of which four arrive.
    assert (sokoban.MAX_BOXES - 1) * sokoban.BOX_REWARD / env._scale < 1.0


def test_a_reply_that_is_sampled_again_costs_no_success():
    task = Task(info={"board": list(CORRIDOR)})
    for shaped in (False, True):
        world = resolve_env(EnvConfig(use="sokoban", args={"moves": 4, "shaped": shaped}))
        (trajectory,) = tw.rollout(
            world.factory,
            [task],
            engine=tw.ScriptedEngine(["hm", "hm", "right"] * 3),
            rules=tw.EnvRules(on_invalid="resample", max_resamples_per_turn=3),
        )
        assert trajectory.reward >= 1.0


# Images


@cache
def looks(symbol, cell):
    """The pixels of a symbol."""
    return sokoban.draw(("###", f"#{symbol}#", "###"), cell)[cell : 2 * cell, cell : 2 * cell]


@pytest.mark.parametrize("cell", [6, 7, 8, 16, 28])
def test_each_symbol_looks_like_no_other(cell):
    images = {symbol: looks(symbol, cell).tobytes() for symbol in "#_.$*@+"}
    assert len(set(images.values())) == 7
    for symbol, things in sokoban.SYMBOLS.items():
        pixels = looks(symbol, cell)
        shown = {name for name in COLORS if (pixels == COLORS[name]).all(axis=2).sum() >= 4}
        assert shown == {"floor", *things}


def test_an_image_shows_the_board_and_nothing_else():
    env = Sokoban(view="image", rules=True)
    store = MediaStore()
    for task in env.tasks("eval", 10, seed=1):
        played = play_scripted(Sokoban(view="image"), task, Sokoban.solver, random.Random(0))
        board = Board.read(task.info["board"])
        trajectory = asyncio.run(played).trajectory
        for turn in trajectory.turns:
            ((image,),) = [message.content for message in turn.messages]
            assert image.value.shape == (48, 48, 3)
            assert store.pixels(store.put(image)).tobytes() == image.value.tobytes()
            assert read_pixels(image.value, 8) == board.rows
            assert image.alt == board.text
            assert not image.value.flags.writeable
            board = board.moved(turn.reply.text)

        system, opening = asyncio.run(env.reset(task))
        assert (system.role, system.text) == ("system", Sokoban.image_rule)
        assert opening.text == ""


def read_pixels(pixels, cell):
    """Decode an image by comparing each cell with the symbols' pixels."""
    rows = []
    for top in range(0, pixels.shape[0], cell):
        squares = [
            pixels[top : top + cell, left : left + cell] for left in range(0, pixels.shape[1], cell)
        ]
        row = ""
        for square in squares:
            (symbol,) = [s for s in "#_.$*@+" if np.array_equal(square, looks(s, cell))]
            row += symbol
        rows.append(row)
    return tuple(rows)


# Texts


def test_each_cell_is_a_token():
    tokenizers = [train_tokenizer(Sokoban().texts(100, 0))]
    if real_tokenizers.tekken.at_hand:
        tokenizers += [real_tokenizers.tekken(), real_tokenizers.sentencepiece("always")]
    for tokenizer in tokenizers:
        ids: dict[str, set[int]] = {}
        for task in Sokoban(boxes=2, size=7).tasks("train", 30, 0):
            text = Board.read(task.info["board"]).text
            encoded = tokenizer.encode(text, add_special_tokens=False)
            tokens = zip(encoded.ids, encoded.offsets, strict=True)
            for number, (start, end) in tokens:
                cell = text[start:end].strip()
                assert len(cell) <= 1
                if cell and cell != "#":
                    ids.setdefault(cell, set()).add(number)
        assert set(ids) == set("_.$*@+")
        assert all(len(numbers) == 1 for numbers in ids.values())


def test_the_rules_open_the_conversation():
    system, board = asyncio.run(Sokoban(rules=True).reset(Task(info={"board": list(CORRIDOR)})))
    assert (system.role, system.text) == ("system", Sokoban.rule)
    assert board.text == Board.read(CORRIDOR).text
    task = Task(info={"board": list(CORRIDOR)})
    system, board = asyncio.run(Sokoban(rules=True, view="positions").reset(task))
    assert system.text == Sokoban.positions_rule
    assert board.text.splitlines() == [
        *Board.read(CORRIDOR).text.splitlines(),
        "you 1 1 box 1 3 target 1 5",
    ]
    assert step(opened(TWO_BOXES, view="positions"), "left").observation.text.endswith(
        "\nyou 1 2 box 1 1 box 1 5 target 1 1 target 1 6"
    )


# Refusals


@pytest.mark.parametrize(
    "rows",
    [
        None,
        "#####",
        [],
        [""],
        [1, 2],
        [["#", "#"]],
        ["###", "#@#", "###"],
        ["#####", "#@$.#", "####"],
        ["#####", "#@$._", "#####"],
        ["#####", "#@$@#", "#####"],
        ["#####", "#_$.#", "#####"],
        ["#####", "#@*_#", "#####"],
        ["#####", "#@$o#", "#####"],
        ["#####", "#$+$#", "#####"],
        ["##############", "#@$$$$$$......#", "##############"],
    ],
)
def test_what_is_no_board_is_refused(rows):
    with pytest.raises(EnvError, match="not one of sokoban's: info"):
        asyncio.run(Sokoban().reset(Task(info={"board": rows})))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"size": 4}, "size is 5 to 10"),
        ({"size": 11}, "size is 5 to 10"),
        ({"boxes": 0}, "boxes is 1 to 3"),
        ({"boxes": 4, "size": 10}, "boxes is 1 to 3"),
        ({"boxes": 3, "size": 6}, "at most size - 4"),
        ({"moves": 3}, "moves is 4"),
        ({"boxes": 2, "moves": 7}, "moves is 4"),
        ({"moves": 31}, "moves is 4"),
        ({"view": "pixels"}, "'view' must be"),
        ({"view": "image", "cell": 5}, "cell is 6 to 64"),
    ],
)
def test_arguments_out_of_range_are_refused(args, message):
    with pytest.raises(ConfigError, match=message):
        resolve_env(EnvConfig(use="sokoban", args=args))


def test_boards_that_are_equal_are_one_state():
    """An algorithm that compares equal states reads their names."""
    rows = Sokoban(moves=4).tasks("train", 1, 0)[0].info["board"]
    env = Sokoban(moves=4)
    asyncio.run(env.reset(Task(info={"board": list(rows)})))
    board = Board.read(rows)
    there = next(move for move in MOVES if board.moved(move).boxes == board.boxes != ())
    step = asyncio.run(env.step(Action(there, Message("assistant", there))))
    assert step.info["state"] == list(board.moved(there).rows)
