"""Agent loops of users, over our engine: scripted, and a real model."""

import pytest
import torch
from kit.outbound import make_model
from kit.stand_ins import USERS

import turnwright as tw
from turnwright.config import ModelConfig
from turnwright.config.schema import EnvConfig
from turnwright.engines.local import LocalEngine
from turnwright.envs.resolve import resolve_env
from turnwright.errors import ConfigError
from turnwright.renderers import byte_renderer
from turnwright.training import load_model_and_renderer

HOME = USERS / "verl"


def play(name, replies, tasks, *, samples=1, engine=None, renderer=None, limits=None, **args):
    spec = resolve_env(
        EnvConfig(use=f"{name.partition(':')[0]}_loop.py:{name.partition(':')[2]}", args=args),
        base=HOME,
    )
    return tw.rollout(
        spec.agent_function,
        tasks,
        engine or tw.ScriptedEngine(replies),
        samples=samples,
        renderer=renderer or byte_renderer(),
        limits=limits or tw.Limits(turns=3, turn_tokens=64),
    )


def task(secret="7"):
    row = {
        "reward_model": {"style": "rule", "ground_truth": secret},
        "data_source": "guess",
        "extra_info": {"index": 3},
    }
    return tw.Task("Guess.", secret, info=row)


def test_a_loop_of_several_turns_is_recorded_and_rewarded():
    (found,) = play("guess:GuessLoop", ["9", "3", "7"], [task()], bonus=0.5)
    assert found.error is None, found.error
    assert (found.reward, len(found.turns)) == (1.5, 3)
    (row,) = found.samples()
    text = byte_renderer().decode(row.ids)
    assert text == (
        "<|im_start|>user\nGuess.<|im_end|>\n<|im_start|>assistant\n9<|im_end|>\n<|im_start|>user\nsmaller<|im_end|>\n"
        "<|im_start|>assistant\n3<|im_end|>\n<|im_start|>user\nlarger<|im_end|>\n<|im_start|>assistant\n7<|im_end|>"
    )
    sampled = byte_renderer().decode(
        [one for one, mask in zip(row.ids, row.mask, strict=True) if mask]
    )
    assert sampled == "9<|im_end|>3<|im_end|>7<|im_end|>"
    assert row.weights == [float(one) for one in row.mask]
    assert found.observed_tokens > 0


def test_a_score_of_another_file_and_sampling_of_the_loop():
    found = [
        play("plain:PlainLoop", [reply], [task()], reward=f"{HOME}/plain_loop.py:compute_score")[0]
        for reply in ("7", "no")
    ]
    assert [one.reward for one in found] == [1.0, 0.0]
    assert found[1].rewards["length"] == 2
    (row,) = found[0].samples()
    assert row.sampling.temperature == 0.7


def test_what_cannot_be_trained_is_an_error_of_the_episode():
    (found,) = play("plain:TrainsPrompt", ["7"], [task()])
    assert "response_mask[0] is 1, and the engine did not sample that id" in found.error.message
    (found,) = play("plain:PlainLoop", ["7"], [task()])
    assert "run returned no reward_score" in found.error.message


def test_what_cannot_be_used_is_one_line():
    for args, message in (
        ({"bonsu": 1}, "has no argument 'bonsu'"),
        ({"tokenizer": 1}, "has no argument 'tokenizer'"),
    ):
        with pytest.raises(ConfigError, match=message):
            play(
                "plain:PlainLoop" if "tokenizer" in args else "strict:StrictLoop",
                [],
                [task()],
                **args,
            )


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "m")


def test_a_real_model_samples_for_a_loop_and_the_logprobs_are_the_models(path):
    model, renderer = load_model_and_renderer(path, path, ModelConfig())
    engine = LocalEngine(model, renderer=renderer)
    limits = tw.Limits(turns=3, turn_tokens=24, on_turn_length="continue")
    tasks = [task(str(100 + number)) for number in range(8)]
    found = play(
        "guess:GuessLoop", None, tasks, samples=2, engine=engine, renderer=renderer, limits=limits
    )
    assert [one.error for one in found] == [None] * 16
    assert sum(len(one.turns) > 1 and one.reward is not None for one in found) > 4
    for trajectory in found:
        (row,) = trajectory.samples()
        assert sum(row.mask) == trajectory.sampled_tokens
        end = trajectory.turns[0].context + 3 * 24  # where the loop cuts its response
        assert sum(row.weights) == sum(row.mask[:end]) or trajectory.reward is None, (
            "it ended by a control token"
        )
        with torch.no_grad():
            logits = model(torch.tensor([row.ids])).logits[0, :-1]
        logprobs = tw.token_logprobs(logits, torch.tensor(row.ids[1:]), row.sampling)
        for at, logprob in enumerate(row.logprobs):
            assert logprob is None or abs(logprob - logprobs[at - 1]) < 1e-4
