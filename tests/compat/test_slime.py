"""User files of slime and Miles: interaction environments and generate
functions, played by our loop."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from kit.outbound import make_model
from kit.stand_ins import USERS
from kit.vision import tiny_vlm_directory
from PIL import Image as Pillow

import turnwright as tw
from turnwright.config import ModelConfig
from turnwright.config.schema import EnvConfig
from turnwright.engines.local import LocalEngine
from turnwright.envs.resolve import resolve_env
from turnwright.errors import ConfigError
from turnwright.renderers import byte_renderer, load_renderer
from turnwright.training import load_model_and_renderer
from turnwright.training.advantages import CreditSettings, advantages
from turnwright.types import Group

HOME = USERS / "slime"
MATH = {"rm_type": "math"}


def play(
    use, replies, tasks, *, engine=None, renderer=None, limits=None, samples=1, rules=None, **args
):
    spec = resolve_env(EnvConfig(use=use, args=args), base=HOME)
    return tw.rollout(
        spec.agent_function or spec.factory,
        tasks,
        engine or tw.ScriptedEngine(replies),
        samples=samples,
        renderer=renderer or byte_renderer(),
        limits=limits or tw.Limits(turns=4, turn_tokens=200),
        rules=rules,
    )


def trained(found):
    (row,) = found.samples()
    assert row.weights == [float(one) for one in row.mask]
    return byte_renderer().decode(
        [one for one, mask in zip(row.ids, row.mask, strict=True) if mask]
    )


def test_an_interaction_environment_gets_replies_with_their_end_token():
    task = tw.Task("2 + 5?", "7")
    (found,) = play("guess_env.py:build_env", ["hm", "\\boxed{7}"], [task], **MATH)
    assert found.error is None, found.error
    assert (found.reward, found.stop, len(found.turns)) == (1.0, "done", 2)
    assert found.messages[2].text == "turn 1 of 4: box it"
    assert found.turns[0].info == {"turn": 1}
    assert trained(found) == "hm<|im_end|>\\boxed{7}<|im_end|>"
    wrong = play("guess_env.py:build_env", ["\\boxed{8}"], [task], **MATH)[0]
    assert (wrong.reward, wrong.stop) == (0.0, "done")


def test_arguments_come_from_the_custom_config(tmp_path):
    (tmp_path / "run.yaml").write_text("max_turns: 9\n")
    (found,) = play(
        "guess_env.py:build_env",
        ["hm", "\\boxed{7}"],
        [tw.Task("?", "7")],
        custom_config_path=str(tmp_path / "run.yaml"),
        **MATH,
    )
    assert found.messages[2].text == "turn 1 of 9: box it"


def test_a_text_that_is_cut_has_no_end_token(monkeypatch):
    limits = tw.Limits(turns=2, turn_tokens=2, on_turn_length="continue")
    (found,) = play(
        "guess_env.py:build_env", ["hmhm", "no"], [tw.Task("?", "7")], limits=limits, **MATH
    )
    assert found.turns[0].finish == "length"
    assert found.turns[0].info == {"turn": 1}


def test_pictures_reach_a_vision_model(tmp_path):
    renderer = load_renderer(tiny_vlm_directory(tmp_path / "vlm"))
    task = tw.Task("Name the colours.", info={"metadata": {"colours": ["red", "blue"]}})
    (found,) = play("picture_env.py:build_env", ["red", "blue", "red"], [task], renderer=renderer)
    assert found.error is None, found.error
    assert found.reward == 1.0
    assert sum(len(span.media) for span in found.spans) == 2
    assert [len(message.images) for message in found.messages if message.role == "user"] == [
        0,
        1,
        1,
    ]


def test_a_generate_function_of_images_has_the_models_processor(tmp_path):
    """Ids and `multimodal_train_inputs` that user code computes are those of the trainer,
    and others are refused."""
    renderer = load_renderer(tiny_vlm_directory(tmp_path / "vlm"))
    picture = tw.Image(Pillow.new("RGB", (84, 56), "green"))
    row = tw.Task(
        [tw.Message("user", ("Name the colours.", picture))],
        info={"metadata": {"colours": ["red", "blue"]}},
    )
    replies = ["green", "red", "blue"]
    (found,) = play(
        "vision_generate.py:generate", replies, [row], renderer=renderer, args={"shift": 0}
    )
    assert (found.error, found.reward, len(found.turns)) == (None, 1.0, 3)
    (sample,) = found.samples()
    assert [(block.media.width, block.media.height) for block in sample.media] == [
        (84, 56),
        (56, 28),
        (56, 28),
    ]
    renderer.vision.check(sample.ids, sample.media)
    said = [one for one, mask in zip(sample.ids, sample.mask, strict=True) if mask]
    assert said == [one for reply in replies for one in renderer.encode_reply(reply)]
    (wrong,) = play(
        "vision_generate.py:generate", replies, [row], renderer=renderer, args={"shift": 0.01}
    )
    assert (
        "multimodal_train_inputs: pixel_values differs by 0.01 from what the trainer computes"
        in wrong.error.message
    )


def test_an_episode_that_is_cut_before_its_first_step_has_reward_0():
    (found,) = play(
        "judged_env.py:build_env", ["good"], [JUDGED], limits=tw.Limits(turns=2, turn_tokens=2)
    )
    assert found.error is None, found.error
    assert (found.stop, found.reward) == ("turn_length", 0.0)


def test_episodes_do_not_wait_for_each_other():
    tasks = [tw.Task(f"{number}?", str(number)) for number in range(64)]

    def speak(messages, rng):
        return "hm" if len(messages) == 1 else f"\\boxed{{{messages[0].text[:-1]}}}"

    at_once = play("guess_env.py:build_env", speak, tasks, **MATH)
    alone = [play("guess_env.py:build_env", speak, [task], **MATH)[0] for task in tasks]
    assert [one.reward for one in at_once] == [1.0] * 64
    assert [next(iter(one.samples())).ids for one in at_once] == [
        next(iter(one.samples())).ids for one in alone
    ]


def test_episodes_wait_for_a_judge_side_by_side_and_ask_it_again():
    tasks = [
        tw.Task(f"{number}?", info={"metadata": {"question": f"q{number}"}}) for number in range(16)
    ]
    rules = tw.EnvRules(retries=tw.RetryRules(turn=2, wait_s=0.01))
    found = play("judged_env.py:build_env", ["good", "bad"], tasks, rules=rules)
    assert [one.error for one in found] == [None] * 16
    assert [one.reward for one in found] == [1.0] * 16
    assert [[turn.retries for turn in one.turns] for one in found] == [[1, 0]] * 16
    assert {failure.kind for one in found for failure in one.failures} == {"environment"}


JUDGED = tw.Task("?", info={"metadata": {"question": "?"}})
SEARCH = {
    "args": {"index": {"amber": "seven"}},
    "custom_rm_path": f"{HOME}/search_generate.py:reward_func",
}


def test_a_generate_function_that_sends_texts_trains_the_sampled_ids():
    replies = ["<search>amber</search>", "<answer>seven</answer>"]
    (found,) = play(
        "search_generate.py:generate",
        replies,
        [tw.Task("amber?", "seven")],
        reward_key="score",
        **SEARCH,
    )
    assert found.error is None, found.error
    assert (found.reward, len(found.turns)) == (1.0, 2)
    assert found.rewards == {"score": 1.0, "format": 1.0}
    (row,) = found.samples()
    text = byte_renderer().decode(row.ids)
    assert text.endswith(
        "assistant\n<search>amber</search>\n\n<information>seven</information>\n\n<answer>seven</answer>"
    )
    assert trained(found) == "<search>amber</search><answer>seven</answer>"
    (found,) = play("search_generate.py:generate", replies, [tw.Task("amber?", "seven")], **SEARCH)
    assert "name one by [env.args] reward_key" in found.error.message


def test_a_generate_function_of_miles():
    (found,) = play("miles_generate.py:generate", ["\\boxed{7}"], [tw.Task("?", "7")], **MATH)
    assert found.error is None, found.error
    assert (found.reward, trained(found)) == (1.0, "\\boxed{7}<|im_end|>")


def test_each_of_several_samples_is_trained_with_its_own_reward():
    (found,) = play("others.py:fan_out", ["a", "b"], [tw.Task("?")])
    assert found.error is None, found.error
    assert found.reward == 0.5
    rows = list(found.samples())
    assert sorted(row.reward for row in rows) == [0.0, 1.0]
    credit = advantages([Group(found.task, [found, found])], CreditSettings("mean")).credits[0]
    assert [credit.advantages_of(row.slots[-1:])[0] for row in rows] == [
        row.reward - 0.5 for row in rows
    ]
    (judged,) = play(
        "others.py:fan_out_unscored",
        ["a", "bb"],
        [tw.Task("?")],
        custom_rm_path=f"{HOME}/others.py:batch_length",
    )
    assert (judged.error, judged.reward) == (None, 1.5)
    assert sorted(row.reward for row in judged.samples()) == [1.0, 2.0]


PLAIN = {"rollout_skip_special_tokens": True}


@pytest.mark.parametrize(
    ("rule", "reply", "answer", "reward"),
    [
        ("deepscaler", "<think>x</think> \\boxed{7}", "7", 1.0),
        ("deepscaler", "\\boxed{7}", "7", 0.0),
        ("dapo", "so\nAnswer: 7", "7", 1.0),
        ("dapo", "Answer: 8", "7", -1.0),
        ("boxed_f1", "\\boxed{the Baltic Sea}", "Baltic Sea, north", 0.8),
        ("f1", "yes, it is", "yes", 0.0),
        ("gpqa", "The answer is B", "B", 1.0),
        ("gpqa", "I think Rome", 1, 1.0),
    ],
)
def test_rewards_by_name(rule, reply, answer, reward):
    """Values of slime's own rules at 624b824a8."""
    task = tw.Task(
        "?", answer, info={"metadata": {"choices": ["Paris", "Rome"]} if rule == "gpqa" else {}}
    )
    key = {"reward_key": "score"} if rule == "dapo" else {}
    (found,) = play("slime:generate", [reply], [task], rm_type=rule, args=PLAIN, **key)
    assert (found.error, found.reward) == (None, pytest.approx(reward))
    row = tw.Task("?", answer, info={"metadata": {**task.info["metadata"], "rm_type": rule}})
    (named,) = play("slime:generate", [reply], [row], args=PLAIN, **key)
    assert named.reward == found.reward


def test_slimes_own_generate_function_sees_the_images_of_a_row(tmp_path):
    renderer = load_renderer(tiny_vlm_directory(tmp_path / "vlm"))
    picture = tw.Image(Pillow.new("RGB", (84, 56), "green"))
    row = tw.Task([tw.Message("user", ("Which?", picture))], "green")
    (found,) = play("slime:generate", ["green"], [row], renderer=renderer, rm_type="f1", args=PLAIN)
    assert (found.error, found.reward) == (None, 1.0)
    (sample,) = found.samples()
    assert [(block.media.width, block.media.height) for block in sample.media] == [(84, 56)]


def test_user_code_asks_for_rewards_itself():
    (found,) = play("others.py:rewarded", ["\\boxed{7}"], [tw.Task("?", "7")], **MATH)
    assert (found.error, found.reward) == (None, 2.0)
    (found,) = play(
        "others.py:rewarded",
        ["abc"],
        [tw.Task("?", "7")],
        custom_rm_path=f"{HOME}/others.py:batch_length",
    )
    assert (found.error, found.reward) == (None, 6.0)


def test_statuses_and_removed_samples():
    (found,) = play("others.py:aborted", ["a"], [tw.Task("?")])
    assert found.stop.status == "aborted"
    (found,) = play("others.py:removed", ["a"], [tw.Task("?")])
    assert found.error is None, found.error
    assert [sum(row.weights) for row in found.samples()] == [0]


def test_what_cannot_be_trained_is_an_error_of_the_episode():
    (found,) = play("others.py:wrong_mask", ["a"], [tw.Task("?")])
    assert "loss_mask[2] is 1, and the engine did not sample that id" in found.error.message
    (found,) = play("others.py:pixels", ["a"], [tw.Task("?")])
    assert (
        "multimodal_train_inputs: a text-only model has none; the trainer computes its own"
        in found.error.message
    )
    (found,) = play("guess_env.py:build_env", ["\\boxed{7}"], [tw.Task("?", "7")])
    assert "give [env.args] custom_rm_path or rm_type" in found.error.message


@pytest.mark.parametrize(
    ("use", "args", "says"),
    [
        ("others.py:generate_rollout", {}, "plays all samples of a step"),
        (
            "miles_rollout.py:RolloutOfMiles",
            {},
            "plays all samples of a step .* name what it calls for each sample",
        ),
        ("guess_env.py:build_env", {"custom_config": "x"}, "has no argument 'custom_config'"),
        ("guess_env.py:build_env", {"rm_type": "maths"}, "rm_type = 'maths'"),
        ("guess_env.py:build_env", {"custom_config_path": "none.yaml"}, "cannot be read"),
    ],
)
def test_what_cannot_be_used_is_one_line(use, args, says):
    with pytest.raises(ConfigError, match=says):
        resolve_env(EnvConfig(use=use, args=args), base=HOME)


SEED = (
    Path(os.environ.get("TURNWRIGHT_SEEDS") or Path(__file__).parents[2].parent / "shared/seeds")
    / "slime-vlm-multi-turn.md"
)
PRINTED = (HOME / "seed_generate.txt").read_text(encoding="utf-8")


def test_the_printed_generate_function(tmp_path):
    """As printed, but that its call of the servers is awaited: our engine blocks nobody."""
    shutil.copy(HOME / "guess_env.py", tmp_path)
    awaited = PRINTED.replace("= sglang_generate(", "= await sglang_generate(")
    assert awaited != PRINTED
    (tmp_path / "seed.py").write_text((HOME / "seed_generate.py").read_text() + awaited)
    args = {
        "args": {"rollout_interaction_env_path": "guess_env", "max_turns": 3},
        "rm_type": "math",
    }
    (found,) = play(
        f"{tmp_path}/seed.py:generate", ["hm", "\\boxed{7}"], [tw.Task("2 + 5?", "7")], **args
    )
    assert found.error is None, found.error
    assert (found.reward, len(found.turns)) == (1.0, 2)
    (row,) = found.samples()
    assert "turn 1 of 3: box it" in byte_renderer().decode(row.ids)
    assert trained(found) == "hm<|im_end|>\\boxed{7}<|im_end|>"


@pytest.mark.skipif(not SEED.is_file(), reason="the document is not there")
def test_the_printed_function_is_that_of_the_document():
    assert PRINTED in SEED.read_text(encoding="utf-8")
    assert len(PRINTED.splitlines()) > 30


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "m")


@pytest.mark.parametrize("use", ["guess_env.py:build_env", "miles_generate.py:generate"])
def test_a_real_model_samples_and_the_logprobs_are_the_models(path, use):
    model, renderer = load_model_and_renderer(path, path, ModelConfig())
    engine = LocalEngine(model, renderer=renderer)
    limits = tw.Limits(turns=3, turn_tokens=16, on_turn_length="continue")
    tasks = [tw.Task(f"{number}?", str(number)) for number in range(8)]
    found = play(
        use, None, tasks, samples=2, engine=engine, renderer=renderer, limits=limits, **MATH
    )
    assert [one.error for one in found] == [None] * 16
    assert sum(one.reward is not None for one in found) > 8
    for trajectory in found:
        (row,) = trajectory.samples()
        assert sum(row.mask) == trajectory.sampled_tokens
        with torch.no_grad():
            logits = model(torch.tensor([row.ids])).logits[0, :-1]
        logprobs = tw.token_logprobs(logits, torch.tensor(row.ids[1:]), row.sampling)
        for at, logprob in enumerate(row.logprobs):
            assert logprob is None or abs(logprob - logprobs[at - 1]) < 1e-4
