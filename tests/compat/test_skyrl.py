"""Environments written for SkyRL-Gym run unchanged, with our stand-ins of its modules."""

import sqlite3

import pytest
from kit.stand_ins import USERS
from kit.vision import tiny_vlm_directory

import turnwright as tw
from turnwright.config.schema import EnvConfig
from turnwright.envs.resolve import as_env_spec, resolve_env
from turnwright.errors import ConfigError
from turnwright.types import Origin, StopReason
from turnwright_compat.skyrl.adapter import FRAMEWORK

LIMITS = tw.Limits(turns=3, turn_tokens=2000)


def spec(use, **config):
    return resolve_env(EnvConfig(use=use, **config), base=USERS / "skyrl")


def play(made, replies, row=None, limits=LIMITS, samples=1, **kwargs):
    task = tw.Task("Go.", info=row or {})
    found = tw.rollout(
        made.factory,
        [task],
        engine=tw.ScriptedEngine(replies),
        limits=limits,
        samples=samples,
        **kwargs,
    )
    for trajectory in found:
        assert trajectory.error is None, trajectory.error
        for row_ in trajectory.samples():
            assert all(
                not m or i in sampled(trajectory) for i, m in zip(row_.ids, row_.mask, strict=True)
            )
    return found[0]


def sampled(trajectory):
    return {i for span in trajectory.spans if span.origin is Origin.MODEL for i in span.ids}


def truth(value, **row):
    return {"reward_spec": {"method": "rule", "ground_truth": value}, **row}


def test_one_turn_is_rewarded_from_the_row():
    trajectory = play(spec("digits.py:DigitsEnv"), ["so #### 12"], truth("12", env_class="digits"))
    assert (trajectory.reward, trajectory.stop) == (1.0, StopReason.DONE)
    assert trajectory.turns[0].info == {"answer": "12"}
    assert play(spec("digits.py:DigitsEnv"), ["#### 13"], truth("12")).reward == 0.0


def test_turns_have_their_rewards_and_the_environment_knows_the_limit_of_the_run():
    made = spec("guess.py:GuessEnv")
    trajectory = play(made, ["5", "9", "7"], truth("7"))
    assert [turn.reward for turn in trajectory.turns] == [0.1 / 3, 0.1 / 3, 1.0]
    assert [m.text for m in trajectory.messages if m.role == "user"] == ["Go.", "higher", "lower"]
    assert trajectory.metrics["environment/steps"] == 3.0
    assert "environment/note" not in trajectory.metrics
    (row,) = trajectory.samples()
    ends = [trajectory.spans[turn.spans[-1]].end - 1 for turn in trajectory.turns]
    assert {at: one for at, one in enumerate(row.token_rewards or ()) if one} == dict(
        zip(ends, [0.1 / 3, 0.1 / 3, 1.0], strict=True)
    )
    short = play(made, ["5", "9", "7"], truth("7"), limits=tw.Limits(turns=2, turn_tokens=2000))
    assert (short.reward, short.stop, len(short.turns)) == (0.1, StopReason.DONE, 2)


def test_tool_groups_and_the_configuration_of_an_environment():
    row = truth({"target": "the Baltic"})
    replies = ["<search>amber</search>", "<answer>the Baltic</answer>"]
    trajectory = play(spec("lookup.py:LookupEnv"), replies, row, stop=["</search>", "</answer>"])
    assert trajectory.reward == 1.0
    assert trajectory.messages[2].text == "\n<information>the Baltic</information>\n"
    assert trajectory.turns[0].info == {"tool_group": "LookupToolGroup", "tool_name": "search"}
    named = play(
        spec("lookup.py:LookupEnv", args={"prefix": "> "}), ["<search>nil</search>", "x", "y"], row
    )
    assert named.messages[2].text == "nothing found for 'nil'"
    with pytest.raises(
        ConfigError, match=r"lookup\.py:LookupEnv has no setting 'prefx'; did you mean 'prefix'"
    ):
        spec("lookup.py:LookupEnv", args={"prefx": "> "})


def test_a_database_named_by_the_row(tmp_path):
    (tmp_path / "spider").mkdir()
    with sqlite3.connect(tmp_path / "spider/shop.sqlite") as connection:
        connection.executescript("create table sold(n int); insert into sold values (3), (4);")
    made = spec("ledger.py:LedgerEnv", args={"db_path": str(tmp_path)})
    row = truth("7", db_id="shop", data="spider")
    trajectory = play(
        made,
        ["<sql>select sum(n) from sold</sql>", "<sql>nonsense</sql>", "<solution>7</solution>"],
        row,
    )
    assert (
        trajectory.messages[2].text
        == "<observation>[(7,)]\n<reminder>2 turns left</reminder></observation>"
    )
    assert trajectory.messages[4].text.startswith("Error: near")
    assert trajectory.reward == 1.0
    (failed,) = tw.rollout(
        made.factory,
        [tw.Task("Go.", info=truth("7", db_id="none", data="spider"))],
        engine=tw.ScriptedEngine(["x"]),
    )
    assert failed.error is not None
    assert failed.error.type == "FileNotFoundError"
    assert failed.error.phase == "reset"


def test_init_writes_the_prompt_and_a_step_returns_several_messages():
    trajectory = play(
        spec("interview.py:InterviewEnv"), ["a", "b", "c"], {"questions": ["Why?", "How?"]}
    )
    assert [(m.role, m.text) for m in trajectory.messages] == [
        ("system", "2 questions follow."),
        ("user", "Go."),
        ("assistant", "a"),
        ("tool", "noted: a"),
        ("user", "Why?"),
        ("assistant", "b"),
        ("tool", "noted: b"),
        ("user", "How?"),
        ("assistant", "c"),
    ]
    assert trajectory.reward == 1.5
    assert trajectory.turns[0].info["seen"] == [1, 2]


def test_a_postprocessed_action_is_recorded_and_the_sampled_ids_stay():
    trajectory = play(spec("trim.py:TrimEnv"), ["<think>a</think> b", "stop"], {})
    assert trajectory.turns[0].info == {"postprocessed_action": "<think>a</think>"}
    assert trajectory.turns[1].info == {}
    assert trajectory.reward == 1.0
    renderer = tw.byte_renderer()
    assert "<think>a</think> b" in renderer.decode(trajectory.prompt_ids(1))


def test_registered_ids_with_their_arguments():
    spec("registered.py:EchoEnv")
    assert "turnwright_echo" in FRAMEWORK.ids()
    made = as_env_spec(FRAMEWORK.find("turnwright_echo_bonus"), where="skyrl:turnwright_echo_bonus")
    assert play(made, ["say yes"], {"word": "yes"}).reward == 1.5
    assert FRAMEWORK.find("nothing") is None


def test_modules_beside_the_file_and_a_configuration_read_as_a_mapping():
    made = spec("multiply.py:MultiplyEnv", args={"credit": 0.25})
    assert play(made, ["\\boxed{5}", "no", "\\boxed{6}"], truth("6")).reward == 1.0
    assert play(made, ["\\boxed{5}"] * 3, truth("6")).reward == 0.25


def test_images_of_an_observation_reach_the_model(tmp_path_factory):
    renderer = tw.load_renderer(tiny_vlm_directory(tmp_path_factory.mktemp("vlm"), "qwen3_vl"))
    trajectory = play(spec("sketch.py:SketchEnv"), ["show", "red"], renderer=renderer)
    assert trajectory.reward == 1.0
    (sample,) = trajectory.samples()
    assert len(sample.media) == 1


def test_a_truncated_reply_ends_the_episode_and_reaches_the_environment_only_where_faithful():
    limits = tw.Limits(turns=3, turn_tokens=4)
    ours = play(spec("guess.py:GuessEnv"), ["5 because of", "7"], truth("7"), limits)
    assert (ours.stop, len(ours.turns), ours.turns[0].reward) == (StopReason.TURN_LENGTH, 1, None)
    theirs = play(
        spec("guess.py:GuessEnv", faithful=True), ["5 because of", "7"], truth("7"), limits
    )
    assert (theirs.stop, [m.text for m in theirs.messages if m.role == "user"]) == (
        StopReason.DONE,
        ["Go.", "a number, please"],
    )
    assert theirs.reward == 1.0


def test_all_turns_in_one_assistant_message():
    replies = ["<search>amber</search>", "<answer>the Baltic</answer>"]
    row = truth({"target": "the Baltic"})
    stop = ["</search>", "</answer>"]
    trajectory = play(spec("lookup.py:LookupEnv"), replies, row, history="inline", stop=stop)
    renderer = tw.byte_renderer()
    (sample,) = trajectory.samples()
    text = renderer.decode(sample.ids)
    assert text.endswith(
        "<|im_start|>assistant\n<search>amber</search>\n<information>the "
        "Baltic</information>\n<answer>the Baltic</answer>"
    )
    trained = renderer.decode([i for i, m in zip(sample.ids, sample.mask, strict=True) if m])
    assert trained == "<search>amber</search><answer>the Baltic</answer>"
    assert [turn.reward for turn in trajectory.turns] == [0.0, 1.0]


def test_synchronous_steps_do_not_wait_for_each_other(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import time\nfrom skyrl_gym.envs.base_text_env import BaseTextEnv\nclass "
        "Slow(BaseTextEnv):\n    def __init__(self, env_config=None, extras={}):\n        "
        "super().__init__()\n    def step(self, action):\n        time.sleep(0.3)\n        return "
        "{'observations': [], 'reward': 1.0, 'done': True, 'metadata': {'at': "
        "time.monotonic()}}\n"
    )
    made = resolve_env(EnvConfig(use="slow.py:Slow"), base=tmp_path)
    tasks = [tw.Task(f"Go {n}.", id=f"t{n}") for n in range(16)]
    found = tw.rollout(made.factory, tasks, engine=tw.ScriptedEngine(["x"]), limits=LIMITS)
    ends = [trajectory.turns[0].info["at"] for trajectory in found]
    assert max(ends) - min(ends) < 16 * 0.3 / 2


BAD = {
    "NoArguments": "    def __init__(self):\n        super().__init__()\n",
    "NoStep": "    def __init__(self, env_config=None, extras={}):\n        "
    "super().__init__()\n    step = None\n",
}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "NoArguments",
            r"got an unexpected keyword argument 'env_config'; SkyRL-Gym calls it as NoArguments\(",
        ),
        ("NoStep", "NoStep has no step; a SkyRL-Gym environment has init and step"),
    ],
)
def test_a_class_that_cannot_be_used_is_one_line(tmp_path, name, words):
    head = f"from skyrl_gym.envs.base_text_env import BaseTextEnv\nclass {name}(BaseTextEnv):\n"
    (tmp_path / "bad.py").write_text(head + BAD[name])
    with pytest.raises(ConfigError, match=words) as raised:
        resolve_env(f"bad.py:{name}", base=tmp_path)
    assert "\n" not in str(raised.value)


def test_a_wrong_return_value_is_named(tmp_path):
    (tmp_path / "odd.py").write_text(
        "from skyrl_gym.envs.base_text_env import BaseTextEnv\n"
        "class Odd(BaseTextEnv):\n"
        "    def __init__(self, env_config=None, extras={}):\n"
        "        super().__init__()\n"
        "    def step(self, action):\n"
        "        return [], 1.0, True\n"
    )
    made = resolve_env("odd.py:Odd", base=tmp_path)
    (found,) = tw.rollout(made.factory, [tw.Task("Go.")], engine=tw.ScriptedEngine(["x"]))
    assert found.error is not None
    assert "return BaseTextEnvStepOutput(" in found.error.message
