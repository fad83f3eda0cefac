"""Plugins of ms-swift in the forms of its examples: loops of their own, trees, OpenEnv,
media, and rewards by name."""

import importlib.util
import sys
import textwrap
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.stand_ins import USERS

import turnwright as tw
from turnwright.config.schema import EnvConfig
from turnwright.envs.resolve import resolve_env
from turnwright.errors import ConfigError

RENDERER = tw.byte_renderer()
HEAD = """
from swift.rewards import ORM, orms
from swift.rollout.gym_env import Env, envs
from swift.rollout.multi_turn import GYMScheduler, MultiTurnScheduler, multi_turns
"""


def spec(folder, source, use, **args):
    (folder / "plugin.py").write_text(HEAD + textwrap.dedent(source))
    return resolve_env(
        EnvConfig(use=use, args={"external_plugins": ["plugin.py"], **args}), base=folder
    )


def played(made, replies, *, task=None, turns=5, tokens=50, samples=1, error=None):
    engine = tw.ScriptedEngine(replies if callable(replies) else list(replies))
    limits = tw.Limits(turns=turns, turn_tokens=tokens)
    found = tw.rollout(
        made.agent_function,
        [task or tw.Task("Go.")],
        engine,
        renderer=RENDERER,
        limits=limits,
        samples=samples,
    )
    if error is None:
        assert [one.error for one in found] == [None] * samples
    else:
        assert error in found[0].error.message
    return found if samples > 1 else found[0]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), branches=st.lists(st.integers(1, 3), max_size=3))
def test_replies_of_a_tree_are_in_the_rows_of_all_their_paths(data, branches):
    """A reply was in the first path alone, a mask of another path was refused, and one
    that began alike was cut."""
    replies = {}

    def reply(messages, rng):
        way = tuple(message.text for message in messages)
        if way not in replies:
            replies[way] = data.draw(st.text("ab", min_size=1, max_size=3))
        return replies[way]

    args = {"external_plugins": ["paths.py"], "reward_funcs": ["length"]}
    made = resolve_env(EnvConfig(use="swift:paths", args=args), base=USERS / "swift")
    found = played(made, reply, task=tw.Task("Go.", info={"branches": branches}), turns=100)
    assert [turn.weights for turn in found.turns] == [None] * len(found.turns)

    ways = [
        tuple(message.text for message in found.conversation(number))
        for number in range(len(found.turns))
    ]
    leaves = [way for way in ways if len(way) == 2 + 2 * len(branches)]
    lengths = sorted(float(len(leaf[-1])) for leaf in leaves)
    assert found.reward == pytest.approx(sum(lengths) / len(lengths))
    if len(leaves) == 1:
        return
    assert sorted(row.reward for row in found.row_rewards) == lengths
    for number, way in enumerate(ways):
        below = [float(len(leaf[-1])) for leaf in leaves if leaf[: len(way)] == way]
        rows = [row.reward for row in found.row_rewards if number in row.turns]
        assert sorted(rows) == sorted(below)


MEDIA = """
class Adds(MultiTurnScheduler):
    def check_finished(self, infer_request, response_choice, current_turn):
        return current_turn == 2

    def step(self, infer_request, response_choice, current_turn):
        infer_request.images = [*infer_request.images, "second"] if {new} else infer_request.images
        infer_request.images.append("third")
        infer_request.messages.append({{"role": "user", "content": "Go on."}})
        infos = {{"images": ["told"]}} if {told} else {{}}
        return {{"infer_request": infer_request, "rollout_infos": infos}}

class Sees(ORM):
    def __call__(self, completions, **kwargs):
        assert kwargs.get("images") == {seen}, kwargs.get("images")
        return [1.0]

multi_turns["adds"], orms["sees"] = Adds, Sees
"""


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize(("told", "seen"), [(True, [["told"]]), (False, None)])
def test_rewards_see_the_rows_media_or_those_that_rollout_infos_has(new, told, seen, tmp_path):
    made = spec(
        tmp_path, MEDIA.format(new=new, told=told, seen=seen), "swift:adds", reward_funcs=["sees"]
    )
    assert played(made, "ab").reward == 1.0


GYM_FLAG = """
class Counts(MultiTurnScheduler):
    async def on_turn_end(self, infer_request, response_choice, current_turn):
        return {"done": True, "rollout_infos": {"total_reward": 4.0}}

    def step(self, infer_request, response_choice, current_turn): ...

class Gym(GYMScheduler):
    async def on_trajectory_start(self, requests): ...
    on_turn_end = Counts.on_turn_end

class One(ORM):
    def __call__(self, completions, **kwargs):
        return [1.0]

multi_turns["counts"], multi_turns["gym"], orms["one"] = Counts, Gym, One
"""


@pytest.mark.parametrize(
    ("use", "args", "reward"),
    [
        ("swift:counts", {"reward_funcs": ["one"]}, 1.0),
        ("swift:counts", {"reward_funcs": ["one"], "use_gym_env": True}, 5.0),
        ("swift:counts", {"reward_funcs": ["one"], "reward_weights": [0.5]}, 0.5),
        ("swift:counts", {"reward_funcs": ["one"], "reward_weights": [0.5, 2.0]}, 8.5),
        (
            "swift:counts",
            {"reward_funcs": ["one"], "reward_weights": [0.5, 2.0], "use_gym_env": False},
            0.5,
        ),
        ("swift:counts", {}, 4.0),
        ("swift:gym", {"reward_funcs": ["one"]}, 5.0),
        ("swift:gym", {"reward_funcs": ["one"], "use_gym_env": False}, 1.0),
    ],
)
def test_a_total_that_a_scheduler_logs_is_a_reward_where_the_flags_say_so(
    use, args, reward, tmp_path
):
    assert played(spec(tmp_path, GYM_FLAG, use, **args), "a").reward == reward


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"reward_model": "some/model"}, "reward_model: no trainer holds a reward model here"),
        ({"reward_model_plugin": "genrm"}, "AsyncORM"),
        ({"reward_func": ["one"]}, "did you mean 'reward_funcs'"),
        ({"use_gym_envs": True}, "did you mean 'use_gym_env'"),
    ],
)
def test_flags_that_the_scheduler_would_swallow_are_refused(args, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        spec(tmp_path, GYM_FLAG, "swift:counts", **args)


def test_a_scheduler_may_have_an_argument_of_a_similar_name(tmp_path):
    source = (
        GYM_FLAG
        + """
class Own(Counts):
    def __init__(self, infer_engine=None, max_turns=None, reward_func=None, **kwargs):
        super().__init__(infer_engine, max_turns, **kwargs)
        assert reward_func == "mine"

multi_turns["own"] = Own
"""
    )
    assert played(spec(tmp_path, source, "swift:own", reward_func="mine"), "a").reward == 4.0


LENGTHS = """
class Flat(ORM):
    def __call__(self, completions, response_token_ids, **kwargs):
        assert [len(ids) for ids in response_token_ids] == [len(text) + 1 for text in completions]
        return [1.0]

orms["flat"] = Flat
"""


def test_one_turn_has_its_ids_and_not_a_list_of_turns(tmp_path):
    assert (
        played(spec(tmp_path, LENGTHS, "swift:single_turn", reward_funcs=["flat"]), ["abcd"]).reward
        == 1.0
    )


def orm(name, **args):
    made = resolve_env(
        EnvConfig(use="swift:single_turn", args={"reward_funcs": [name], **args}), base=USERS
    )
    return made.agent_function.rewards[0][1]


@pytest.mark.parametrize(
    ("name", "args", "replies", "rewards"),
    [
        ("repetition", {}, ["a b c d", "a b c a b c a", "a", ""], [0.0, -0.4, 0.0, 0.0]),
        (
            "repetition",
            {"repetition_n_grams": 1, "repetition_max_penalty": -2.0},
            ["A a b b"],
            [-1.0],
        ),
        (
            "soft_overlong",
            {"soft_max_length": 4, "soft_cache_length": 2},
            ["a", "ab", "abc", "abcd"],
            [0.0, 0.0, -0.5, -1.0],
        ),
        ("soft_overlong", {"max_completion_length": 4, "soft_cache_length": 2}, ["abcde"], [-1.5]),
        (
            "toolbench",
            {},
            ['Action: f\nAction Input: {"a": 1}', 'Action: g\nAction Input: {"a": 1}'],
            [1.0, 0.0],
        ),
        (
            "toolbench",
            {},
            ['Action: f\nAction Input: {"a": 2}', "f", "Action: f\nAction Input: x"],
            [0.0, 0.0, 0.0],
        ),
    ],
)
def test_registered_rewards(name, args, replies, rewards):
    reference = 'Action: f\nAction Input: {"a": 1}'
    found = orm(name, **args)(
        replies,
        solution=[reference] * len(replies),
        response_token_ids=[list(text) for text in replies],
    )
    assert found == pytest.approx(rewards)


def test_the_cosine_reward_depends_on_length_and_answer():
    pytest.importorskip("math_verify")
    replies = ["\\boxed{4}", "\\boxed{5}"]
    for count, right, wrong in ((0, 1.0, -0.5), (5, 0.75, -0.25), (10, 0.5, 0.0)):
        found = orm("cosine", cosine_max_len=10)(
            replies, solution=["4", "4"], response_token_ids=[[0] * count] * 2
        )
        assert found == pytest.approx([right, wrong])
    with pytest.raises(ConfigError, match="cosine_max_len"):
        orm("cosine")


class Counter:
    """A client of a server whose game is over at three; its sessions are counted."""

    open, most = 0, 0

    def __init__(self, base_url):
        assert base_url == "http://127.0.0.1:1"

    def sync(self):
        return self

    def __enter__(self):
        Counter.open += 1
        Counter.most = max(Counter.most, Counter.open)
        return self

    def __exit__(self, *_):
        Counter.open -= 1

    def reset(self, start=0):
        self.sum = start
        return SimpleNamespace(observation={"sum": self.sum}, reward=None, done=False)

    def step(self, action):
        if "add" not in action:
            raise RuntimeError("no such action")
        self.sum += action["add"]
        return SimpleNamespace(
            observation={"sum": self.sum}, reward=float(self.sum), done=self.sum >= 3
        )


@pytest.fixture
def server(monkeypatch):
    for name in ("openenv", "openenv.core", "openenv.core.generic_client"):
        module = ModuleType(name)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    module.GenericEnvClient = Counter
    Counter.open = Counter.most = 0


ROW = {
    "env_config": {
        "base_url": "http://127.0.0.1:1",
        "reset_kwargs": {"start": 1},
        "system_message": "Count.",
    }
}
OPEN = """
from swift.rollout.multi_turn import OpenEnvScheduler

class Words(OpenEnvScheduler):
    async def on_turn_end(self, infer_request, response_choice, current_turn):
        assert getattr(self, "not_there", 4) == 4
        self._total_rewards[infer_request.uuid] += 0.0
        return await super().on_turn_end(infer_request, response_choice, current_turn)

    def parse_action(self, text):
        return {"add": len(text.split())}

    def format_observation(self, observation):
        return f"The sum is {observation['sum']}."

multi_turns["words"] = Words
"""


def test_an_openenv_server_plays_by_the_built_in_scheduler(server, tmp_path):
    made = spec(tmp_path, "", "swift:openenv_scheduler")
    found = played(made, ['```json\n{"add": 1}\n```', '{"add": 1}'], task=tw.Task("Go.", info=ROW))
    said = [message.text for message in found.conversation(1)]
    assert said == ["Count.", '{"sum": 1}', '```json\n{"add": 1}\n```', '{"sum": 2}', '{"add": 1}']
    assert ([turn.reward for turn in found.turns], found.reward, Counter.open) == (
        [2.0, 3.0],
        5.0,
        0,
    )


def test_sessions_are_closed_where_a_limit_or_an_error_ends_the_episode(server, tmp_path):
    made = spec(tmp_path, OPEN, "swift:words", use_gym_env=True)
    cut = played(made, ["a", "one more " * 9], task=tw.Task("Go.", info=ROW), turns=2, samples=3)
    assert [str(one.stop) for one in cut] == ["turn_length"] * 3
    assert [one.reward for one in cut] == [2.0 + 14.0] * 3  # of the 18 words 12 are left
    assert (Counter.open, Counter.most) == (0, 3)
    stopped = played(made, ["", "", ""], task=tw.Task("Go.", info=ROW), turns=2, samples=2)
    assert [len(one.turns) for one in stopped] == [2, 2]
    assert Counter.open == 0
    plain = spec(tmp_path, "", "swift:openenv_scheduler")
    played(plain, ["nothing"], task=tw.Task("Go.", info=ROW), error="no such action")
    assert Counter.open == 0


def test_without_openenv_its_package_is_named(tmp_path):
    if importlib.util.find_spec("openenv") is not None:
        pytest.skip("openenv is installed")
    made = spec(tmp_path, "", "swift:openenv_scheduler")
    played(made, ["a"], task=tw.Task("Go.", info=ROW), error="No module named 'openenv'")


CLOSES = """
class Room(Env):
    closed = []

    async def reset(self, config):
        return "Look.", {}, ""

    async def step(self, action):
        if action[-1]["content"] == "break":
            raise RuntimeError("broken")
        return "Again.", 1.0, action[-1]["content"] == "out", {}

    async def close(self):
        Room.closed.append(self)

envs["room"] = Room
"""


@pytest.mark.parametrize(
    ("replies", "error"),
    [(["in", "out"], None), (["in", "in", "in"], None), (["in", "break"], "broken")],
)
def test_environments_are_closed_once_however_an_episode_ends(replies, error, tmp_path):
    made = spec(tmp_path, CLOSES, "swift:gym_scheduler", gym_env="room")
    played(made, replies, turns=3, error=error)
    (scheduler,) = made.agent_function._by_turns.values()
    assert scheduler._envs == scheduler._pending_obs == {}
    room = scheduler._create_env({})
    assert len(type(room).closed) == 1
