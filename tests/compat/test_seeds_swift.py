"""The code blocks of ms-swift's guide to multi-turn rollouts (3.6), which lost their
indentation in our copy of it."""

import os
from pathlib import Path

import pytest
from kit.rollouts import Sampler, check_record, renderer

import turnwright as tw
from turnwright.config.schema import EnvConfig
from turnwright.envs.resolve import resolve_env
from turnwright.envs.user_imports import import_foreign

SEED = (
    Path(os.environ.get("TURNWRIGHT_SEEDS") or Path(__file__).parents[2].parent / "shared/seeds")
    / "ms-swift-multi-turn.md"
)

BASE = """\
class MultiTurnScheduler(ABC):
    def __init__(self, max_turns: Optional[int] = None, *args, **kwargs):
        self.max_turns = max_turns
    @abstractmethod
    def step(self, infer_request: 'RolloutInferRequest', result: 'RolloutResponseChoice',
             current_turn: int) -> Union['RolloutInferRequest', Tuple['RolloutInferRequest', Dict]]:
        pass
    def check_finished(self, infer_request: 'RolloutInferRequest', result: 'RolloutResponseChoice',
                       current_turn: int) -> bool:
        if result.finish_reason == 'length':
            return True
        if self.max_turns and current_turn >= self.max_turns:
            return True
        return False
"""

SKELETON = """\
class Scheduler():
    def step(self, infer_request: 'RolloutInferRequest', result: 'RolloutResponseChoice',
             current_turn: int) -> Union['RolloutInferRequest', Tuple['RolloutInferRequest', Dict]]:
        ...
        return infer_request, extra_dict
class RewardFunction():
    def __call__(self, completions, **kwargs):
        infos = kwargs.get('multi_turn_infos', {})
        ...
"""

REWARD = """\
class Reward(ORM):
    def __call__(completions, **kwargs):
        print(kwargs.keys())
        # dict_keys(['problem', 'solution', 'messages', 'is_truncated'])
        messages = kwargs.get('messages')
        ...
"""

REQUEST = """\
RolloutInferRequest(
    messages=[
        {'role': 'system', 'content': 'A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant first thinks about the reasoning process in the mind and then provides the user with the answer. The reasoning process and answer are enclosed within <think> </think> and <answer> </answer> tags, respectively, i.e., <think> reasoning process here </think><answer> answer here </answer>\\n'}, {'role': 'user', 'content': 'What is the value of $\\\\sqrt{36 \\\\times \\\\sqrt{16}}$?'},
"""  # noqa: E501

TYPES = "from abc import ABC, abstractmethod\nfrom typing import Dict, Optional, Tuple, Union\n"
TASK = tw.Task("Say it.", info={"solution": "4"}, id="a")


def bare(text):
    return "".join(line.lstrip() + "\n" for line in text.splitlines())


@pytest.mark.parametrize(
    "block", [BASE, SKELETON, REWARD, REQUEST], ids=["base", "skeleton", "reward", "request"]
)
def test_the_blocks_are_those_of_the_document(block):
    if not SEED.is_file():
        pytest.skip("the document is not beside the checkout")
    assert bare(block) in bare(SEED.read_text("utf-8"))


def episodes(tmp_path, name, text, **args):
    (tmp_path / "plugin.py").write_text(TYPES + text)
    return resolve_env(EnvConfig(use=f"plugin.py:{name}", args=args), base=tmp_path).agent_function


MINE = """

class Mine(MultiTurnScheduler):
    def step(self, infer_request, result, current_turn):
        infer_request.messages.append({"role": "user", "content": f"Again, {current_turn}."})
        return infer_request
"""


def test_the_printed_base_class_with_a_step(tmp_path):
    """The class needs nothing of ours: its loop and its engine are given to it."""
    play = episodes(tmp_path, "Mine", BASE + MINE)
    limits = tw.Limits(turns=3, turn_tokens=100)
    (found,) = tw.rollout(
        play,
        [TASK],
        tw.ScriptedEngine(["one", "two", "three"]),
        renderer=renderer("bpe"),
        limits=limits,
    )
    assert found.error is None, found.error
    assert [turn.reply.text for turn in found.turns] == ["one", "two", "three"]
    assert renderer("bpe").decode(found.prompt_ids(2)).count("Again, ") == 2


def test_the_printed_base_class_ends_at_a_cut_reply(tmp_path):
    play = episodes(tmp_path, "Mine", BASE + MINE)
    limits = tw.Limits(turns=3, turn_tokens=2)
    engine = tw.ScriptedEngine(["one two three four"])
    (found,) = tw.rollout(play, [TASK], engine, renderer=renderer("bpe"), limits=limits)
    assert (found.error, len(found.turns), found.turns[0].finish) == (None, 1, "length")


def test_the_printed_skeletons(tmp_path):
    """As printed, the scheduler continues the reply as it is, and the reward returns nothing."""
    given = "extra_dict = {'seen': 1}\n"
    play = episodes(
        tmp_path, "Scheduler", given + SKELETON, reward_funcs=["plugin.py:RewardFunction"]
    )
    limits = tw.Limits(turns=2, turn_tokens=100)
    (found,) = tw.rollout(
        play, [TASK], tw.ScriptedEngine(["one", " two"]), renderer=renderer("bpe"), limits=limits
    )
    assert (found.error, found.reward) == (None, None)
    decoded = renderer("bpe").decode(found.prompt_ids(1))
    assert decoded == renderer("bpe").decode(found.prompt_ids(0)) + "one"


FILLED = """

class Filled(RewardFunction):
    def __call__(self, completions, **kwargs):
        super().__call__(completions, **kwargs)
        return [float(sum(infos["seen"])) for infos in kwargs.get('multi_turn_infos', {})]
"""


def test_the_printed_skeletons_filled_in(tmp_path):
    given = "extra_dict = {'seen': 1}\n"
    play = episodes(
        tmp_path, "Scheduler", given + SKELETON + FILLED, reward_funcs=["plugin.py:Filled"]
    )
    limits = tw.Limits(turns=3, turn_tokens=100)
    (found,) = tw.rollout(
        play, [TASK], tw.ScriptedEngine(["a", "b", "c"]), renderer=renderer("bpe"), limits=limits
    )
    assert (found.error, found.reward) == (None, 2.0)


def test_the_printed_reward_reads_its_columns(tmp_path, capsys):
    """It is printed without `self`."""
    play = episodes(
        tmp_path,
        "Mine",
        "from swift.plugin import ORM\n" + BASE + MINE + REWARD,
        reward_funcs="plugin.py:Reward",
    )
    task = tw.Task("What?", info={"problem": "What?", "solution": "4"})
    limits = tw.Limits(turns=1)
    (found,) = tw.rollout(
        play, [task], tw.ScriptedEngine(["4"]), renderer=renderer("bpe"), limits=limits
    )
    assert (found.error, found.reward) == (None, None)
    printed = capsys.readouterr().out
    assert all(f"'{key}'" in printed for key in ("problem", "solution", "messages", "is_truncated"))


SEEN = """

class Seen(MultiTurnScheduler):
    def step(self, infer_request, result, current_turn):
        from copy import deepcopy
        SEEN.append((deepcopy(infer_request), result, current_turn))
        infer_request.messages.append({"role": "user", "content": "Again."})
        return infer_request
SEEN = []
"""


@pytest.mark.skipif(not SEED.is_file(), reason="the document is not beside the checkout")
def test_the_printed_request_and_result_are_what_step_receives(tmp_path):
    text = SEED.read_text("utf-8")
    protocol = import_foreign("swift.infer_engine.protocol")
    names = ("RolloutInferRequest", "RolloutResponseChoice", "ChatMessage")
    types = {name: getattr(protocol, name) for name in names}
    request, result = (
        eval(
            text[text.index(f'{name}\n"""\n') + len(name) + 5 :]
            .partition('"""')[0]
            .partition("# result")[0]
            .strip(),
            types,
        )
        for name in ("infer_request", "result")
    )
    play = episodes(tmp_path, "Seen", BASE + SEEN)
    task = tw.Task(request.messages[:2], info=request.data_dict)
    reply = request.messages[2]["content"]
    limits = tw.Limits(turns=2, turn_tokens=4000)
    (found,) = tw.rollout(
        play, [task], tw.ScriptedEngine([reply, "12"]), renderer=renderer("bpe"), limits=limits
    )
    assert found.error is None, found.error
    ((seen, choice, turn),) = import_seen(play)
    assert turn == 1
    for name in ("messages", "images", "audios", "videos", "tools", "objects", "data_dict"):
        assert getattr(seen, name) == getattr(request, name), name
    for name in ("index", "message", "finish_reason", "messages"):
        assert getattr(choice, name) == getattr(result, name), name


def import_seen(play):
    return play.scheduler.step.__globals__["SEEN"]


def test_the_printed_base_class_with_a_model(tmp_path):
    """A tiny model of its own, whatever it says; its ids are the record, and
    each is trained once."""
    from turnwright.config import ModelConfig
    from turnwright.engines.local import LocalEngine
    from turnwright.renderers import load_renderer
    from turnwright.training.model import models

    folder = models.create_tiny_model(
        ModelConfig(hidden=32, layers=2), ["Say it.", "Again, 1."], tmp_path / "model"
    )
    play = episodes(tmp_path, "Mine", BASE + MINE)
    engine = LocalEngine(models.load(folder)[0], renderer=load_renderer(folder), context=400)
    tasks = [tw.Task(f"Say {n}.", id=f"t{n}") for n in range(4)]
    rows = tw.rollout(
        play, tasks, engine, samples=2, limits=tw.Limits(turns=3, turn_tokens=16), seed=3
    )
    assert [row.error for row in rows] == [None] * 8
    assert {len(row.turns) for row in rows} <= {1, 2, 3}
    for row in rows:
        assert sum(sum(sample.weights) for sample in row.samples()) == row.sampled_tokens > 0
        for number, turn in enumerate(row.turns[1:], 1):
            last = row.prompt_ids(number - 1) + [
                i for s in row.turns[number - 1].spans for i in row.spans[s].ids
            ]
            assert row.prompt_ids(number)[: len(last)] == last
            assert turn.reply.role == "assistant"


def test_the_printed_base_class_with_random_ids(tmp_path):
    play = episodes(tmp_path, "Mine", BASE + MINE)
    engine = Sampler()
    tasks = [tw.Task(f"Say {n}.", id=f"t{n}") for n in range(10)]
    rows = tw.rollout(
        play,
        tasks,
        engine,
        renderer=renderer("bpe"),
        limits=tw.Limits(turns=3, turn_tokens=20),
        seed=4,
    )
    for row in rows:
        assert row.error is None, row.error
        check_record(row, engine.calls)
    assert max(len(row.turns) for row in rows) == 3
