"""A user's own generator of SkyRL over our engine: what it masks, rewards and returns is
honoured, or named as wrong."""

from types import SimpleNamespace

import pytest
from kit.rollouts import renderer
from kit.stand_ins import USERS

import turnwright as tw
from turnwright.envs.resolve import as_env_spec, load_object
from turnwright.errors import ConfigError, EnvError
from turnwright_compat.sampled_rows import EngineCall, read_output

HOME = USERS / "skyrl"


def test_a_generator_samples_masks_and_rewards():
    spec = as_env_spec(
        load_object("own_generator.py:DraftGenerator", base=HOME), where="own", args={"bonus": 0.5}
    )
    task = tw.Task("Go.", info={"reward_spec": {"ground_truth": "12"}})
    engine = tw.ScriptedEngine(["a draft", "it is 12"])
    limits = tw.Limits(turns=4, turn_tokens=64)
    (found,) = tw.rollout(
        spec.agent_function, [task], engine, renderer=renderer("bpe"), limits=limits
    )
    assert found.error is None, found.error
    assert found.reward == 0.5
    assert [turn.reward or 0.0 for turn in found.turns] == [0.0, 0.5]
    replies = [renderer("bpe").encode_reply(text) for text in ("a draft", "it is 12")]
    assert found.turns[0].weights == (0.0,) * len(replies[0])
    (row,) = found.samples()
    assert [i for i, weight in zip(row.ids, row.weights, strict=True) if weight] == replies[1]
    second = renderer("bpe").decode(found.prompt_ids(1))
    assert second.endswith(
        "a draft<|im_end|>\n<|im_start|>user\nAgain.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert found.metrics["generate/drafts"] == 2


def call(context, ids, logprobs=None):
    return EngineCall(
        context, SimpleNamespace(ids=tuple(ids), logprobs=logprobs or [0.0] * len(ids))
    )


def read(calls, **output):
    weights = {}
    scores = read_output(
        {"prompt_token_ids": [[1]], **output},
        calls,
        lambda reply, given: weights.setdefault(id(reply), given),
    )
    return scores, [weights[id(one.reply)] for one in calls]


def test_rewards_by_token_belong_to_the_reply_that_they_follow():
    calls = [call([1], [2, 3]), call([1, 2, 3, 9], [4])]
    scores, weights = read(
        calls,
        response_ids=[[2, 3, 9, 4]],
        loss_masks=[[1, 1, 0, 1]],
        rewards=[[0.0, 0.5, 0.25, 1.0]],
    )
    assert (scores.own, scores.turns) == (0.0, (0.75, 1.0))
    assert weights == [[1.0, 1.0], [1.0]]


def test_one_reward_and_a_call_that_is_not_returned():
    calls = [call([1], [7, 7]), call([1], [2, 3])]
    scores, weights = read(calls, response_ids=[[2, 3]], loss_masks=[[1, 0]], rewards=[2.0])
    assert (scores.own, scores.turns) == (2.0, (0.0, 0.0))
    assert weights == [[0.0, 0.0], [1.0, 0.0]]


def test_rows_by_step():
    calls = [call([1], [2]), call([1, 2, 9], [3])]
    scores, weights = read(
        calls,
        prompt_token_ids=[[1], [1, 2, 9]],
        response_ids=[[2, 9], [3]],
        loss_masks=[[1, 0], [1]],
        rewards=[[0.5, 0.0], [1.0]],
        is_last_step=[False, True],
    )
    assert scores.turns == (0.5, 1.0)
    assert weights == [[1.0], [1.0]]


def test_a_response_that_the_loop_cut():
    calls = [call([1], [2, 3, 4])]
    _, weights = read(calls, response_ids=[[2, 3]], loss_masks=[[1, 1]], rewards=[1.0])
    assert weights == [[1.0, 1.0, 0.0]]


def test_replies_to_messages_are_found_in_order():
    calls = [call(None, [2]), call(None, [2])]
    _, weights = read(calls, response_ids=[[2, 9, 2]], loss_masks=[[0, 0, 1]], rewards=[1.0])
    assert weights == [[0.0], [1.0]]


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (
            {"response_ids": [[2, 9]], "loss_masks": [[1, 1]], "rewards": [1.0]},
            r"loss_masks\[1\] is 1, and the engine did not",
        ),
        (
            {"response_ids": [[5]], "loss_masks": [[1]], "rewards": [1.0]},
            r"loss_masks\[0\] is 1, and the engine did not sample",
        ),
        (
            {"response_ids": [[2]], "loss_masks": [[1, 0]], "rewards": [1.0]},
            "1 response_ids and 2 loss_masks",
        ),
        (
            {"response_ids": [[2]], "loss_masks": [[1]], "rewards": [[1.0, 0.0]]},
            "1 response_ids and 2 rewards",
        ),
        (
            {"response_ids": [[2]], "loss_masks": [], "rewards": [1.0]},
            "loss_masks has 0 rows and response_ids 1",
        ),
        (
            {
                "response_ids": [[2]],
                "loss_masks": [[1]],
                "rewards": [1.0],
                "rollout_logprobs": [[-1.5]],
            },
            r"rollout_logprobs\[0\] is -1\.5, the engine's is -0\.5",
        ),
        (
            {
                "response_ids": [[2]],
                "loss_masks": [[1]],
                "rewards": [1.0],
                "rollout_logprobs": [[]],
            },
            "rollout_logprobs has 0 values for 1 response_ids",
        ),
    ],
)
def test_wrong_outputs_are_named(output, words):
    with pytest.raises(EnvError, match=words):
        read([call([1], [2], [-0.5])], **output)


def test_an_argument_that_the_constructor_lacks():
    target = load_object("own_generator.py:DraftGenerator", base=HOME)
    with pytest.raises(ConfigError, match=r"own has no argument 'bonos'; did you mean 'bonus'"):
        as_env_spec(target, where="own", args={"bonos": 1})
