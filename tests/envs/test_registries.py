"""Registered ids of other libraries, without the libraries: a small registry of each,
written to their interface."""

import random
import sys
import threading
import types
from dataclasses import dataclass

import pytest

from turnwright.config import EnvConfig
from turnwright.envs import resolve_env
from turnwright.envs.check import check_env
from turnwright.envs.env import Action
from turnwright.errors import ConfigError
from turnwright.types import Message


def said(text):
    return Action(text, Message("assistant", text))


@dataclass
class SumConfig:
    seed: int = 0
    size: int = 50
    top: int = 99

    def validate(self):
        assert self.top > 0, "top must be positive"


class Sums:
    def __init__(self, config):
        self.config = config

    def __len__(self):
        return self.config.size

    def __getitem__(self, index):
        rng = random.Random(self.config.seed + index)
        first, second = rng.randint(0, self.config.top), rng.randint(0, self.config.top)
        return {
            "question": f"{first} + {second} = ?",
            "answer": str(first + second),
            "metadata": {},
        }

    def score_answer(self, answer, entry):
        return float(answer == entry["answer"])


@pytest.fixture
def reasoning(monkeypatch):
    factory = types.ModuleType("reasoning_gym.factory")
    factory.DATASETS = {"sums": (Sums, SumConfig)}
    monkeypatch.setitem(sys.modules, "reasoning_gym", types.ModuleType("reasoning_gym"))
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)


@pytest.mark.beside("compat")
def test_a_dataset_by_id(reasoning):
    spec = resolve_env(EnvConfig(use="reasoning_gym:sums", args={"top": 500, "system": "Add."}))
    assert [finding.text for finding in check_env(spec) if finding.severity == "error"] == []
    train, held_out = spec.train_and_eval_tasks(200, 100)
    assert (len(train), len(held_out)) == (200, 100)
    assert spec.tasks("train", 50, seed=1) != train[:50] == spec.tasks("train", 50)
    env = spec.factory()
    assert env.reset(train[0])[0] == Message("system", "Add.")
    for text, reward in (
        (train[0].answer, 1.0),
        (f"<answer>0</answer> <answer> {train[0].answer}\n</answer>", 1.0),
        ("0.5", 0.0),
    ):
        step = env.step(said(text))
        assert (step.reward, step.terminated) == (reward, True)


@pytest.mark.parametrize(
    ("use", "args", "said"),
    [
        ("reasoning_gym:sum", {}, "reasoning_gym has no 'sum'; did you mean 'sums'?"),
        ("reasoning_gym:sums", {"tops": 3}, "reasoning_gym:sums cannot be made: TypeError: "),
        (
            "reasoning_gym:sums",
            {"top": 0},
            "reasoning_gym:sums cannot be made: AssertionError: top must be positive",
        ),
        (
            "textarena:x",
            {},
            "textarena: cannot be imported (No module named 'textarena'); pip install textarena",
        ),
    ],
)
@pytest.mark.beside("compat")
def test_wrong_ids_and_arguments(reasoning, use, args, said):
    with pytest.raises(ConfigError) as caught:
        resolve_env(EnvConfig(use=use, args=args))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


class State:
    def __init__(self):
        self.current_player_id, self.rewards, self.done = 0, None, False
        self.role_mapping = {0: "Player 0", 1: "Player 1", -1: "GAME"}
        self.game_info = {0: {}, 1: {}}


class Duel:
    """Two players take 1 or 2 of a heap whose size is drawn from Python's shared generator;
    who takes the last wins."""

    def reset(self, num_players, seed):
        """TwoPlayerState(num_players): the words that tell the number of players."""
        self.state = State()
        random.seed(seed)
        self.heap = random.randint(5, 50)
        self.sent = {
            player: [(-1, f"The heap has {self.heap}. Take [1] or [2].", None)]
            for player in range(num_players)
        }

    def get_observation(self):
        player = self.state.current_player_id
        sent, self.sent[player] = self.sent[player], []
        return player, sent

    def step(self, action):
        player = self.state.current_player_id
        if action not in ("[1]", "[2]"):
            self.state.rewards = {player: -1, 1 - player: 1}
            self.state.game_info[player] = {"invalid_move": True, "reason": "no such move"}
            return True, {}
        self.heap -= int(action[1]) + random.randint(0, 0)
        for other in (0, 1):
            self.sent[other].append((player, action, None))
        self.state.current_player_id = 1 - player
        if self.heap <= 0:
            self.state.rewards = {player: 1, 1 - player: -1}
        return self.heap <= 0, {}


@pytest.fixture
def arena(monkeypatch):
    registration = types.ModuleType("textarena.envs.registration")
    registration.ENV_REGISTRY = {"Duel-v0": None}
    registration.make = lambda id, **kwargs: Duel(**kwargs)
    for name in ("textarena", "textarena.envs"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "textarena.envs.registration", registration)


def play(spec, task, texts):
    env = spec.factory()
    seen = [env.reset(task)[-1].text]
    for text in texts:
        step = env.step(said(text))
        if step.observation is None:
            return seen, step
        seen.append(step.observation)
    return seen, step


@pytest.mark.beside("compat")
def test_a_game_against_a_random_opponent(arena):
    spec = resolve_env("textarena:Duel-v0")
    assert (spec.factory()._factory.players, spec.factory()._factory.seat) == (2, 0)
    assert [finding.text for finding in check_env(spec) if finding.severity == "error"] == []
    tasks = spec.tasks("train", 40)
    alone = [play(spec, task, ["[2]"] * 60) for task in tasks]
    assert {step.reward for _, step in alone} == {-1.0, 1.0}
    assert all("[Player 1] [" in seen[1] and "[Player 0]" not in seen[1] for seen, _ in alone)
    together = {}
    before = random.getstate()
    threads = [
        threading.Thread(
            target=lambda n=n: together.update({n: play(spec, tasks[n], ["[2]"] * 60)})
        )
        for n in range(40)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[n] for n in range(40)] == alone
    assert random.getstate() == before
    _, step = play(spec, tasks[0], ["nonsense"])
    assert (step.reward, step.terminated, step.info["invalid_move"]) == (-1.0, True, True)


@pytest.mark.beside("compat")
def test_an_opponent_of_one_s_own(arena, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def legal(seen, rng):\n    return '[1]'\ndef broken(seen, rng):\n    return 'pass'\n"
    )
    spec = resolve_env(
        EnvConfig(use="textarena:Duel-v0", args={"opponent": "mine.py:legal", "seat": 1}),
        base=tmp_path,
    )
    seen, step = play(spec, spec.tasks("train", 1)[0], ["[1]"] * 60)
    assert seen[1] == "[Player 0] [1]"
    assert abs(step.reward) == 1
    spec = resolve_env(
        EnvConfig(use="textarena:Duel-v0", args={"opponent": "mine.py:broken"}), base=tmp_path
    )
    _, step = play(spec, spec.tasks("train", 1)[0], ["[1]"])
    assert (step.reward, step.truncated, step.info["opponent_invalid"]) == (0.0, True, True)
    for args, said in (
        ({"seat": 2}, "seat is 2 of 2 players"),
        ({"opponent": "chess"}, "opponent is 'chess'; write random"),
    ):
        with pytest.raises(ConfigError, match=said):
            resolve_env(EnvConfig(use="textarena:Duel-v0", args=args))
