"""Gymnasium environments as worlds; they are real ones, of Gymnasium's own registry."""

import gymnasium
import pytest

import turnwright as tw
from turnwright.envs import gym_env
from turnwright.envs.check import check_env
from turnwright.errors import ConfigError

MOVES = ["left", "down", "right", "up"]
WAY = ["down", "down", "right", "right", "down", "right"]
LAKE = gym_env(
    "FrozenLake-v1", actions=MOVES, render_mode="ansi", is_slippery=False, system="Reach G."
)


def play(env, replies, task=None, **kwargs):
    kwargs = {"limits": tw.Limits(turns=200)} | kwargs
    (trajectory,) = tw.rollout(
        env, [task or tw.Task(info={"seed": 1})], engine=tw.ScriptedEngine(replies), **kwargs
    )
    return trajectory


def test_the_way_over_the_lake():
    trajectory = play(LAKE, WAY)
    assert (trajectory.reward, trajectory.stop, len(trajectory.turns)) == (
        1.0,
        tw.StopReason.DONE,
        6,
    )
    assert trajectory.messages[0].text == "Reach G."
    assert trajectory.messages[1].text == "[S]FFF\nFHFH\nFFFH\nHFFG"
    assert trajectory.turns[1].messages[0].text == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    assert trajectory.turns[0].info == {"prob": 1.0}


def test_a_hole_terminates_and_the_time_limit_truncates():
    fallen = play(LAKE, ["down", "right"])
    assert (fallen.reward, fallen.stop) == (0.0, tw.StopReason.DONE)
    late = play(
        gym_env("FrozenLake-v1", actions=MOVES, is_slippery=False, max_episode_steps=3),
        ["left"] * 9,
    )
    assert (late.reward, late.stop, len(late.turns)) == (0.0, tw.StopReason.ENV_TRUNCATED, 3)
    assert late.turns[0].messages[-1].text == "State 0."


@pytest.mark.parametrize("reply", ["DOWN", " down\n", "I go down", "not up but down.", "1", "(1)"])
def test_a_reply_that_names_an_action(reply):
    trajectory = play(LAKE, [reply, *WAY[1:]])
    assert trajectory.reward == 1.0
    assert "invalid_actions" not in trajectory.metrics


@pytest.mark.parametrize("reply", ["", "away", "7", "-1", "1.5e9x", "downwards"])
def test_a_reply_that_names_none_is_an_observation(reply):
    trajectory = play(LAKE, [reply, *WAY])
    assert trajectory.reward == 1.0
    assert trajectory.metrics["invalid_actions"] == 1
    assert trajectory.turns[1].messages[0].text == "Say one of left, down, right, up."


def test_functions_of_one_s_own():
    def read(text):
        return MOVES.index(text.strip("<>"))  # ValueError for what is none

    def show(observation, world):
        return [{"role": "user", "content": f"row {observation // 4}, column {observation % 4}"}]

    env = gym_env("FrozenLake-v1", action=read, observation=show, is_slippery=False)
    trajectory = play(env, ["sideways", *(f"<{move}>" for move in WAY)])
    assert trajectory.reward == 1.0
    assert trajectory.turns[1].messages[0].text == "'sideways' is not in list"
    assert trajectory.turns[2].messages[0].text == "row 1, column 0"
    outside = play(gym_env("FrozenLake-v1", action=lambda text: 9), ["x"])
    assert outside.turns[0].info == {"invalid_action": "9 is no action; actions are Discrete(4)"}


def test_the_task_decides_the_world_and_siblings_share_it():
    env = gym_env("Taxi-v4")
    starts = {}
    for task in env.tasks("train", 8, 0):
        group = tw.rollout(
            env,
            [task],
            engine=tw.ScriptedEngine(lambda m, r: "0"),
            samples=3,
            limits=tw.Limits(turns=1),
        )
        said = {trajectory.messages[0].text for trajectory in group}
        assert len(group) == 3
        assert len(said) == 1
        starts[task.id] = said.pop()
    assert len(set(starts.values())) > 3
    named = tw.Task("Begin.", id="one")
    assert (
        play(env, ["0"], named, limits=tw.Limits(turns=1)).messages[1]
        == play(env, ["0"], named).messages[1]
    )


def test_a_slippery_lake_slips_alike_for_the_same_replies():
    env = gym_env("FrozenLake-v1", actions=MOVES, render_mode="ansi")
    ways = [
        [m.text for m in play(env, ["right"] * 99, tw.Task(info={"seed": 5})).messages]
        for _ in range(2)
    ]
    assert ways[0] == ways[1]


def test_spaces_without_a_text_ask_for_functions():
    said = play(gym_env("CartPole-v1"), ["0"]).error.message
    assert "its observations are ndarray" in said
    assert "give observation=" in said
    shown = gym_env("CartPole-v1", observation=lambda o, w: f"{o[0]:.1f}", actions=["left"])
    assert "actions= has 1 names, and the space has 2 actions" in play(shown, ["0"]).error.message
    pendulum = gym_env("Pendulum-v1", observation=lambda o, w: "?")
    assert "give action=a function" in play(pendulum, ["0"]).error.message


def test_an_id_that_there_is_not():
    with pytest.raises(ConfigError, match="FrozenLak"):
        gym_env("FrozenLak-v1")


class Echo(gymnasium.Env):
    """Text in, text out; counts what is open."""

    observation_space = gymnasium.spaces.Text(99)
    action_space = gymnasium.spaces.Text(99)
    open = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        Echo.open += 1
        return "Hello", {}

    def step(self, action):
        return (
            action[::-1],
            float(action == "hello"),
            action == "hello",
            False,
            {"long": self.np_random.random(3)},
        )

    def close(self):
        Echo.open -= 1


def test_text_spaces_need_no_functions_and_every_world_is_closed():
    if "Echo-v0" not in gymnasium.registry:
        gymnasium.register("Echo-v0", Echo)
    trajectory = play(gym_env("Echo-v0"), ["hi", "hello"])
    assert trajectory.reward == 1.0
    assert [message.text for message in trajectory.messages] == ["Hello", "hi", "ih", "hello"]
    assert Echo.open == 0


def test_the_check_passes():
    env = gym_env(
        "FrozenLake-v1",
        actions=MOVES,
        render_mode="ansi",
        is_slippery=False,
        solver=lambda messages, rng: WAY[sum(m.role == "assistant" for m in messages)],
    )
    world = tw.as_env_spec(env)
    findings = check_env(world, n=2)
    assert [f.text for f in findings if f.severity != "ok"] == []
