"""Built-in schedulers and environments of ms-swift by name, its own example
plugins' forms, and rewards."""

import asyncio
import random

import pytest
from kit.rollouts import Sampler, check_record, facts, renderer
from kit.stand_ins import USERS

import turnwright as tw
from turnwright.config.schema import EnvConfig
from turnwright.envs.resolve import resolve_env
from turnwright.errors import ConfigError

HOME = USERS / "swift"
LIMITS = tw.Limits(turns=4, turn_tokens=300)
TEXT = renderer("bpe")


def spec(use, **args):
    return resolve_env(EnvConfig(use=use, args=args), base=HOME)


def one(made, task, replies, limits=LIMITS, **options):
    (found,) = tw.rollout(
        made.agent_function,
        [task],
        tw.ScriptedEngine(replies),
        renderer=TEXT,
        limits=limits,
        **options,
    )
    assert found.error is None, found.error
    return found


SIX = tw.Task("What is 6 times 7?", info={"solution": "\\boxed{42}"}, id="six")


def test_math_tip_trick_goes_back_into_the_thoughts():
    pytest.importorskip("math_verify")
    wrong = "<think>six sevens are forty one.</think><answer>41</answer>"
    right = " it is forty two.</think><answer>42</answer>"
    found = one(spec("swift:math_tip_trick", reward_funcs="accuracy"), SIX, [wrong, right])
    opened = TEXT.decode(found.prompt_ids(1)).removeprefix(TEXT.decode(found.prompt_ids(0)))
    assert opened.startswith("<think>six sevens are forty one.")
    assert opened.endswith("But wait... It seems I made a mistake,")
    assert found.reward == 1.0
    sampled = TEXT.encode_reply(wrong)
    kept = sum(map(bool, found.turns[0].weights))
    assert 0 < kept < len(sampled)
    assert "forty one." in TEXT.decode(sampled[:kept])
    assert "<answer>" not in TEXT.decode(sampled[:kept])
    rows = list(found.samples())
    trained = sum(weight > 0 for row in rows for weight in row.weights)
    assert trained == kept + len(found.turns[1].weights or TEXT.encode_reply(right))


def test_math_tip_trick_leaves_a_right_answer():
    pytest.importorskip("math_verify")
    found = one(
        spec("swift:math_tip_trick", reward_funcs=["accuracy"]), SIX, ["<answer>42</answer>"]
    )
    assert (len(found.turns), found.reward) == (1, 1.0)


def test_math_tip_trick_multi_turn_asks_in_a_new_turn():
    pytest.importorskip("math_verify")
    made = spec(
        "swift:math_tip_trick_multi_turn",
        reward_funcs=["accuracy", "format"],
        reward_weights=[1.0, 0.5],
    )
    found = one(made, SIX, ["<answer>41</answer>", "<think>x</think><answer>42</answer>"])
    assert "you need to recheck very carefully.<|im_end|>" in TEXT.decode(found.prompt_ids(1))
    assert found.reward == 1.5
    assert found.rewards == {"accuracy": 1.0, "format": 1.0}


def test_one_turn_with_rewards_by_name():
    pytest.importorskip("math_verify")
    found = one(
        spec("swift:single_turn", reward_funcs=["accuracy", "format"]),
        SIX,
        ["<think>x</think><answer>42</answer>"],
    )
    assert (len(found.turns), found.reward) == (1, 2.0)


def test_thinking_tips_return_a_row_for_each_turn():
    pytest.importorskip("math_verify")
    made = spec("swift:thinking_tips_scheduler", reward_funcs=["accuracy"])
    found = one(
        made, SIX, ["<think>a</think><answer>41</answer>", "<think>b</think><answer>42</answer>"]
    )
    assert len(found.turns) == 2
    assert all(turn.weights is None for turn in found.turns)
    # ms-swift refuses that.
    assert [(row.reward, row.turns) for row in found.row_rewards] == [
        (0.0, (0,)),
        (1.0, (1,)),
    ]
    assert (found.reward, found.rewards) == (0.5, {"accuracy": 0.5})


def test_the_gym_scheduler_plays_an_environment_by_name_and_its_rewards_belong_to_turns():
    made = spec("swift:gym_scheduler", external_plugins=["lights.py"], gym_env="lights")
    found = one(made, tw.Task("unused", info={"goal": 2}), ["on", "off", "on"])
    assert [message.role for message in found.turns[0].messages][:2] == ["system", "user"]
    assert [turn.reward for turn in found.turns] == [0.5, -0.25, 0.5]
    assert found.reward == 0.75
    assert found.metrics["environment/total_reward"] == 0.75


def test_a_row_names_its_environment_and_rewards_are_added():
    made = spec("swift:gym_scheduler", external_plugins=["lights.py"], reward_funcs=["short"])
    row = {"goal": 1, "env_config": {"name": "lights", "step": 1.0}}
    assert one(made, tw.Task("unused", info=row), ["on"]).reward == 1.0 + 2.0
    args = {"external_plugins": ["lights.py"], "reward_funcs": ["short"]}
    weighted = spec("swift:gym_scheduler", reward_weights=[0.5, 4.0], **args)
    assert one(weighted, tw.Task("unused", info=row), ["on"]).reward == 4.0 + 1.0
    without = spec("swift:gym_scheduler", use_gym_env=False, **args)
    assert one(without, tw.Task("unused", info=row), ["on"]).reward == 2.0


def test_an_episode_that_a_limit_ends_is_rewarded_as_far_as_it_was_played():
    made = spec("swift:gym_scheduler", external_plugins=["lights.py"], gym_env="lights")
    limits = tw.Limits(turns=8, turn_tokens=20, episode_tokens=30)
    found = one(made, tw.Task("unused", info={"goal": 9}), ["on"] * 8, limits=limits)
    assert 1 <= len(found.turns) < 8
    assert found.reward == 0.5 * len(found.turns)
    asked = spec("tips.py:AskAgain", external_plugins=["tips.py", "kept.py"], reward_funcs=["kept"])
    found = one(asked, tw.Task("2+2?", info={"solution": "4"}), ["five"] * 8, limits=limits)
    ((seen,),) = [function.seen for _, function, _ in asked.agent_function.rewards]
    assert (seen["completions"], seen["is_truncated"]) == (["five"], [True])
    assert found.reward == 0.0


def test_an_environment_class_needs_no_registration():
    found = one(spec("lights.py:Lights"), tw.Task("unused", info={"goal": 1}), ["on"])
    assert found.reward == 0.5


def test_an_async_reward_and_a_reward_with_a_loop_of_its_own():
    made = spec(
        "tips.py:AskAgain",
        external_plugins="rewards.py",
        reward_funcs=["judge", "own_loop", "rewards.py:columns"],
    )
    found = one(made, tw.Task("2+2?", info={"solution": "4", "nums": [1, 2], "audios": []}), ["4"])
    assert found.rewards == {"judge": 0.5, "own_loop": 2.0, "columns": 1.0}


def test_a_tool_scheduler_writes_into_its_message_with_ids_and_masks():
    made = spec("swift:calculate", external_plugins=["calculate.py"], reward_funcs="sums")
    found = one(made, tw.Task("1+2?", info={"solution": "3"}), ["Action: 1+2\n", "It is 3"])
    rows = list(found.samples())
    assert len(rows) == 1
    trained = [i for i, weight in zip(rows[0].ids, rows[0].weights, strict=True) if weight]
    assert trained == [*TEXT.encode_reply("Action: 1+2\n"), *TEXT.encode_reply("It is 3")]
    assert "[3]" in TEXT.decode(found.prompt_ids(1))
    assert found.reward == 1.0
    assert found.metrics["environment/calls"] == 1


def test_a_run_of_its_own():
    found = one(
        spec("own_loops.py:TwoDrafts", external_plugins=[], best=2), tw.Task("Go."), ["a", "b"]
    )
    assert [message.text for message in found.conversation(1)] == [
        "Go.",
        "a",
        "Which is better?",
        "b",
    ]
    assert found.turns[0].weights == (0.0,) * len(TEXT.encode_reply("a"))
    assert found.metrics["environment/best"] == 2


@pytest.mark.parametrize("use", ["tips.py:AskAgain", "tips.py:GoBack", "own_loops.py:Memory"])
def test_64_at_once_equal_64_in_order(use):
    tasks = [tw.Task(f"Question {n}?", info={"solution": "no such"}, id=f"t{n}") for n in range(64)]
    limits = tw.Limits(turns=3, turn_tokens=40)

    def episodes(concurrency, delay):
        made = spec(use)
        engine = Words(delay)
        rows = tw.rollout(
            made.agent_function,
            tasks,
            engine,
            renderer=TEXT,
            limits=limits,
            seed=7,
            concurrency=concurrency,
        )
        assert [row.error for row in rows] == [None] * 64
        return [
            ([(s.origin, s.ids, s.parent) for s in row.spans], [t.weights for t in row.turns])
            for row in rows
        ], engine.peak

    ordered, alone = episodes(1, 0)
    together, peak = episodes(64, 0.003)
    assert (alone, peak > 20) == (1, True)
    assert together == ordered


class Words:
    """Says words by the seed of the request, and an answer; with a delay, none before more than
    20 calls are in flight."""

    context, version = None, 0

    def __init__(self, delay):
        self.delay, self.running, self.peak, self.many = delay, 0, 0, asyncio.Event()

    async def generate(self, request):
        self.running += 1
        self.peak = max(self.peak, self.running)
        if self.peak > 20 or not self.delay:
            self.many.set()
        await self.many.wait()
        await asyncio.sleep(self.delay * random.random())
        self.running -= 1
        chance = random.Random(f"{request.seed}")
        text = (
            " ".join(chance.choices(["the", "of", "it", "was"], k=chance.randint(1, 5)))
            + " Answer: 5"
        )
        ids = TEXT.encode_reply(text)
        from turnwright.engines import Generation

        return Generation(ids, [-0.5] * len(ids), "stop", 0)

    def release(self, session):
        pass

    async def close(self):
        pass


def test_random_ids_keep_the_invariants_of_records():
    engine = Sampler()
    tasks = [tw.Task(f"Say {n}.", info={"solution": "none"}, id=f"t{n}") for n in range(12)]
    made = spec("own_loops.py:Half")
    rows = tw.rollout(
        made.agent_function,
        tasks,
        engine,
        renderer=TEXT,
        limits=tw.Limits(turns=4, turn_tokens=20),
        seed=4,
    )
    assert sum(len(row.turns) for row in rows) > 24
    for row in rows:
        assert row.error is None, row.error
        facts(row)
        check_record(row, engine.calls)


@pytest.mark.parametrize(
    ("use", "args", "words"),
    [
        (
            "swift:math_tip_tricks",
            {},
            r"multi_turns has no 'math_tip_tricks'; did you mean 'math_tip_trick'",
        ),
        (
            "swift:gym_scheduler",
            {"reward_funcs": ["acuracy"]},
            r"orms has no 'acuracy'; did you mean 'accuracy'",
        ),
        (
            "swift:gym_scheduler",
            {"reward_funcs": ["format"], "reward_weights": [1, 2, 3]},
            "1 reward_funcs and 3 reward_weights",
        ),
        ("swift:gym_scheduler", {"external_plugins": ["nowhere.py"]}, "nowhere.py"),
        (
            "broken.py:NoStep",
            {},
            "broken.py:NoStep lacks step; a scheduler has step, or its own run",
        ),
        (
            "broken.py:WrongStep",
            {},
            r"broken.py:WrongStep.step: too many positional arguments; ms-swift calls it with 3",
        ),
    ],
)
def test_what_is_wrong_is_named(use, args, words):
    with pytest.raises(ConfigError, match=words):
        spec(use, **args)


@pytest.mark.parametrize(
    ("column", "words"), [("audios", "has audios: "), ("videos", "has 1 videos; write <video>")]
)
def test_media_that_the_model_would_not_receive(column, words):
    made = spec("tips.py:AskAgain", external_plugins=[])
    task = tw.Task("Go.", info={column: ["a.bin"], "solution": "4"})
    (found,) = tw.rollout(
        made.agent_function, [task], tw.ScriptedEngine(["4"]), renderer=TEXT, limits=LIMITS
    )
    assert words in found.error.message


def test_a_mask_that_trains_what_was_not_sampled():
    made = spec("broken.py:TrainsTips")
    engine = tw.ScriptedEngine(["a", "b", "c", "d"])
    (found,) = tw.rollout(
        made.agent_function, [tw.Task("Go.")], engine, renderer=TEXT, limits=LIMITS
    )
    assert "and the engine did not sample that id there" in str(found.error)
