"""Environments, tools and rewards written for TRL's GRPOTrainer run unchanged, with our
stand-ins of its modules."""

import asyncio
import json

import pytest
from kit.stand_ins import USERS
from kit.vision import tiny_vlm_directory

import turnwright as tw
from turnwright.config.schema import EnvConfig
from turnwright.envs.check import check_env
from turnwright.envs.resolve import as_env_spec, resolve_env
from turnwright.errors import ConfigError
from turnwright_compat.trl.adapter import FRAMEWORK

HOME = USERS / "trl"
LIMITS = tw.Limits(turns=6, turn_tokens=2000)


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def made(use="trl:GRPOTrainer", faithful=False, **args):
    return resolve_env(EnvConfig(use=use, args=args, faithful=faithful), base=HOME)


def play(spec, replies, row=None, answer=None, prompt="Go.", limits=LIMITS, **kwargs):
    task = tw.Task(prompt, answer, info=row or {})
    limits = tw.Limits(turns=spec.max_turns or limits.turns, turn_tokens=limits.turn_tokens)
    (found,) = tw.rollout(spec.factory, [task], tw.ScriptedEngine(replies), limits=limits, **kwargs)
    assert found.error is None, found.error
    return found


def results(trajectory):
    return [message.text for message in trajectory.messages if message.role == "tool"]


def test_methods_are_tools_and_the_row_resets():
    spec = made("guess.py:Guess")
    replies = [
        call("guess", number=3) + call("ask", question="even?"),
        call("guess", number=4),
        call("guess", number=4),
        "done",
    ]
    found = play(spec, replies, {"secret": 4, "level": 2})
    assert found.messages[0].text == "Go. Between 0 and 9."
    assert results(found) == [
        "too low",
        '{"answer": true, "times": 1}',
        "right",
        "Error: Game over.",
    ]
    assert found.reward == 0.5
    names = [tool["function"]["name"] for tool in spec.factory().tools]
    assert names == ["ask", "guess"]


def test_words_and_limits_of_trl():
    spec = made("guess.py:Guess", faithful=True, max_tool_calling_iterations=3)
    assert spec.max_turns == 4
    replies = [
        call("guess", number=3) + call("ask", question="even?"),
        call("nope") + call("guess", wrong=1),
        call("guess", number=4),
        call("guess", number=4),
    ]
    found = play(spec, replies, {"secret": 4})
    assert results(found) == [
        "too low",
        "{'answer': True, 'times': 1}",
        "{'error': 'Tool nope not found.'}",
        "{'error': \"Guess.guess() got an unexpected keyword argument 'wrong'\"}",
        "right",
    ]
    assert found.reward == 0.5
    assert found.stop == "env_truncated"


def test_calls_that_are_no_json_end_a_faithful_episode():
    broken = '<tool_call>{"name": "guess", "arguments": {</tool_call>'
    assert len(play(made("guess.py:Guess"), [broken, "done"], {"secret": 4}).turns) == 2
    assert (
        len(play(made("guess.py:Guess", faithful=True), [broken, "done"], {"secret": 4}).turns) == 1
    )


def test_instances_are_fresh_or_reused():
    for faithful, kept in ((False, [1, 1, 1]), (True, [1, 2, 3])):
        factory, sizes = made("guess.py:Guess", faithful=faithful).factory, []

        async def one(factory=factory, sizes=sizes):
            env = factory()
            await env.reset(tw.Task("Go.", info={"secret": 4}))
            sizes.append(len(env._environment.history))
            await env.close()

        for _ in range(3):
            asyncio.run(one())
        assert sizes == kept


def test_asynchronous_tools_and_reward():
    spec = made("ledger.py:Ledger")
    replies = [
        call("total") + call("pay", amount=2.0) + call("pay", amount=3.5),
        call("total"),
        "done",
    ]
    found = play(spec, replies, {"goal": 5.5})
    assert (results(found)[1:], found.reward) == (["paid 2.0", "paid 3.5", "5.5"], 1.0)
    assert play(spec, ["done"], {"goal": None}).reward is None
    ordered = play(
        made("ledger.py:Ledger", faithful=True),
        [replies[1] + call("pay", amount=1.0) + call("total"), "done"],
        {"goal": 1},
    )
    assert [message.name for message in ordered.messages if message.role == "tool"] == [
        "total",
        "total",
        "pay",
    ]


def test_a_row_chooses_its_environment():
    args = {"reward_funcs": ["rewards.py:said", "rewards.py:calls"], "reward_weights": [1.0, 0.25]}
    spec = made("several.py:ENVIRONMENTS", **args)
    echo = play(spec, [call("say", text="hello"), "done"], {"environment": "echo", "word": "x"})
    assert (results(echo), echo.reward) == (["HELLO"], 1.25)
    guess = play(spec, [call("guess", number=1), "done"], {"environment": "guess", "secret": 1})
    # get_reward, and a quarter for the call; the other reward does not apply.
    assert guess.reward == 1.25
    named = made(
        environment_factory={"guess": "guess.py:Guess", "echo": "several.py:make_echo"}, **args
    )
    assert (
        play(
            named, [call("say", text="hello"), "done"], {"environment": "echo", "word": "x"}
        ).reward
        == 1.25
    )
    (wrong,) = tw.rollout(
        spec.factory,
        [tw.Task("Go.", info={"environment": "gues"})],
        tw.ScriptedEngine(["x"]),
        limits=LIMITS,
    )
    assert "the column environment is 'gues'" in wrong.error.message
    assert "did you mean 'guess'" in wrong.error.message


def test_tools_and_rewards_without_an_environment():
    spec = made(
        tools=["rewards.py:multiply"], reward_funcs=["rewards.py:exact", "rewards.py:brief"]
    )
    found = play(spec, [call("multiply", a=6, b=7), "42"], answer="42")
    assert results(found) == ["42"]
    after = len(found.path(found.turns[-1].spans[-1])) - found.turns[0].context
    assert found.reward == pytest.approx(1.0 - after / 100)
    assert found.rewards["exact"] == 1.0
    assert found.metrics["ids"] == after


def test_rewards_of_text():
    spec = made(reward_funcs="rewards.py:length", conversational=False)
    assert play(spec, ["four"]).reward == 4.0


def test_pictures_of_reset_and_tools(tmp_path):
    spec = made("pictures.py:Pictures")
    vision = tw.load_renderer(tiny_vlm_directory(tmp_path / "vlm"))
    found = play(spec, [call("look", size=84), "red"], {"color": "red"}, renderer=vision)
    assert [len(message.images) for message in found.messages] == [1, 0, 1, 0]
    assert found.messages[0].content[0] == "Go."
    assert found.messages[0].content[-1] == "Which color?"
    assert found.reward == 1.0


def test_an_environment_that_brings_its_own_data():
    class Own:
        def reset(self, seed=0, **row):
            self.seed = seed
            return f"Write {seed}."

        def get_reward(self):
            return float(self.seed)

    spec = as_env_spec(Own)
    (task, _) = spec.tasks("train", 2, 0)
    (found,) = tw.rollout(spec.factory, [task], tw.ScriptedEngine(["x"]), limits=LIMITS)
    assert found.messages[0].text == f"Write {task.info['seed']}."
    assert found.reward == task.info["seed"]


def test_64_episodes_at_once_equal_64_one_after_another():
    def episodes(concurrency):
        tasks = [tw.Task(f"Go {n}.", id=str(n), info={"secret": n % 10}) for n in range(64)]
        replies = [call("guess", number=3), call("guess", number=4), "done"]
        found = tw.rollout(
            made("guess.py:Guess").factory,
            tasks,
            tw.ScriptedEngine(replies * 64),
            limits=LIMITS,
            concurrency=concurrency,
        )
        return {one.task.id: (one.reward, results(one)) for one in found}

    assert episodes(64) == episodes(1)
    assert len(set(map(str, episodes(64).values()))) == 4


def test_the_check_passes(tmp_path):
    rows = "".join(json.dumps({"prompt": f"Go {n}.", "secret": n % 10}) + "\n" for n in range(20))
    (tmp_path / "rows.jsonl").write_text(rows)
    spec = resolve_env(
        EnvConfig(use=str(HOME / "guess.py") + ":Guess", tasks=str(tmp_path / "rows.jsonl"))
    )
    assert [one.text for one in check_env(spec, n=4) if one.severity == "error"] == []


def test_rewards_of_trl_by_module():
    spec = made(reward_funcs=["trl.rewards:think_format_reward"])
    assert play(spec, ["<think>a</think>b"]).reward == 1.0
    assert play(spec, ["b"]).reward == 0.0


@pytest.mark.parametrize(
    ("use", "args", "said"),
    [
        ("broken.py:NoReward", {}, "has no reward; give reward_funcs under"),
        ("broken.py:NeedsArguments", {}, "TRL calls environment_factory without arguments"),
        ("broken.py:NoDocstring", {}, "shout: no docstring"),
        (
            "broken.py:RewardNeeds",
            {},
            "RewardNeeds.get_reward needs completion; it is called without arguments",
        ),
        ("trl:GRPOTrainer", {"environment_factory": "broken.py:NoReset"}, "NoReset has no reset"),
        ("trl:GRPOTrainer", {"environment_factory": "guess.py:Gues"}, "did you mean 'Guess'"),
        ("trl:GRPOTrainer", {}, "has nothing to play"),
        ("trl:GRPOTrainer", {"reward_func": []}, "did you mean 'reward_funcs'"),
        ("trl:GRPOTrainer", {"reward_funcs": ["some/reward-model"]}, "a model is no reward here"),
        (
            "trl:GRPOTrainer",
            {"reward_funcs": ["rewards.py:nothing"]},
            "nothing takes number; a reward takes completions",
        ),
        (
            "trl:GRPOTrainer",
            {"reward_funcs": ["rewards.py:exact"], "reward_weights": [1.0, 2.0]},
            "give one number for each",
        ),
        (
            "trl:GRPOTrainer",
            {"tools": ["guess.py:Guess"], "reward_funcs": ["rewards.py:exact"]},
            "a tool is a function",
        ),
        ("trl:GRPOTraine", {}, "did you mean 'GRPOTrainer'"),
    ],
)
def test_what_cannot_be_used_is_one_line(use, args, said):
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")) as error:
        made(use, **args)
    assert "\n" not in str(error.value)


def test_a_reward_for_another_number_of_completions():
    spec = made(reward_funcs=["rewards.py:two"])
    (found,) = tw.rollout(spec.factory, [tw.Task("Go.")], tw.ScriptedEngine(["x"]), limits=LIMITS)
    assert "two returned 2 rewards for 1 completion" in found.error.message


def test_other_classes_are_not_taken():
    class Game:
        def reset(self):
            return ""

        def step(self, action):
            return ""

    with pytest.raises(
        ConfigError, match=r"is a class but no environment; write class Game\(tw.Env\)"
    ):
        as_env_spec(Game)
    assert FRAMEWORK.find("nothing") is None
