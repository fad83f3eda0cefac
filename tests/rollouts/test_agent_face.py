"""What an agent function can say and ask: training weights, statuses, sampling per call, images of
ids, a tokenizer's face."""

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.rollouts import bpe, renderer
from kit.training import credit_settings
from kit.vision import tiny_vlm_directory
from transformers import AutoModelForCausalLM

import turnwright as tw
from turnwright.config import ModelConfig, TrainConfig
from turnwright.engines import Generation
from turnwright.engines.local import LocalEngine
from turnwright.errors import UsageError
from turnwright.records.run_dir import RunDir
from turnwright.records.serialization import read_trajectory, rebuild_trajectories, trajectory_row
from turnwright.renderers import CHATML, load_renderer
from turnwright.training import create_tiny_model
from turnwright.training.advantages import advantages
from turnwright.training.untrained_reasons import WEIGHED
from turnwright.types import Group, Origin, Status, StopReason
from turnwright_view.replay.compare import as_json

TASK = tw.Task("Go.", id="0")
TEXTS = ["one and two", "three", "four and five and six"]


def play_with(function, texts=TEXTS, *, out=None, **given):
    (found,) = tw.rollout(
        function, [TASK], tw.ScriptedEngine(texts), renderer=renderer("bpe"), out=out, **given
    )
    return found


def talk(weights):
    """An agent function of as many turns as there are weights, each a function
    of the number of ids."""

    async def play(task, model):
        messages = [*task.messages]
        for number, weight in enumerate(weights):
            reply = await model.generate(messages)
            if weight is not None:
                model.weigh(reply, weight(len(reply.ids)))
            messages += [reply.message, tw.Message("user", f"On, {number}.")]
        return 1.0

    return play


weight_lists = st.lists(
    st.one_of(st.none(), st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=8, max_size=8)),
    min_size=1,
    max_size=3,
)


@settings(max_examples=25, deadline=None)
@given(weight_lists)
def test_weights_are_in_the_rows_the_journal_and_the_account(lists):
    with tempfile.TemporaryDirectory() as folder:
        asked = [
            None if one is None else (lambda size, one=one: [one[at % 8] for at in range(size)])
            for one in lists
        ]
        found = play_with(talk(asked), out=Path(folder) / "run")
        assert found.error is None
        expected = [
            weight
            for turn, one in zip(found.turns, lists, strict=True)
            for weight in _each(sum(len(found.spans[index].ids) for index in turn.spans), one)
        ]
        (row,) = found.samples()
        assert [
            weight for weight, sampled in zip(row.weights, row.mask, strict=True) if sampled
        ] == expected
        assert not any(
            weight for weight, sampled in zip(row.weights, row.mask, strict=True) if not sampled
        )
        run = RunDir(Path(folder) / "run")
        (again,) = rebuild_trajectories(run.events(), lambda name: TASK).values()
        run.close()
        assert [turn.weights for turn in again.turns] == [turn.weights for turn in found.turns]
    other = play_with(talk([None] * len(lists)))
    other.reward = 0.0
    config = TrainConfig()
    credits = advantages([Group("0", [found, other])], credit_settings(config))
    zeros = Counter(expected)[0.0]
    assert credits.tokens.get(WEIGHED, 0) == zeros
    assert sum(credits.tokens.values()) == found.sampled_tokens + other.sampled_tokens


def rows_of(*rewards, own=0.0, pick=lambda replies: replies):
    async def play(task, model):
        replies = await model.generate(task.messages, n=len(rewards))
        return tw.Scores(
            own,
            rows=tuple(
                (reward, (reply,)) for reward, reply in zip(rewards, pick(replies), strict=True)
            ),
        )

    return play


def test_each_row_has_its_reward_in_the_record_and_the_journal(tmp_path):
    found = play_with(rows_of(1.0, 0.0, own=0.25), out=tmp_path / "run")
    assert (found.error, found.reward) == (None, 0.75)
    assert [(row.reward, row.turns) for row in found.row_rewards] == [(1.0, (0,)), (0.0, (1,))]
    assert [row.reward for row in found.samples()] == [1.25, 0.25]
    run = RunDir(tmp_path / "run")
    (again,) = rebuild_trajectories(run.events(), lambda name: TASK).values()
    read = read_trajectory(as_json(trajectory_row(found, renderer("bpe"))))
    run.close()
    assert again.row_rewards == read.row_rewards == found.row_rewards


def test_only_replies_of_the_episode_have_rows():
    found = play_with(rows_of(1.0, pick=lambda replies: ["a reply"]))
    assert "rows has a reply that is not of this episode" in found.error.message
    assert "by row" in play_with(rows_of(float("nan"))).error.message


def _each(size, one):
    return [1.0] * size if one is None else [one[at % 8] for at in range(size)]


@pytest.mark.parametrize("weights", [[1.0], -1.0, float("nan"), [0.0] * 99])
def test_wrong_weights_are_refused(weights):
    found = play_with(talk([lambda size: weights]))
    assert found.error is not None
    assert "weigh: " in found.error.message


def test_only_replies_of_the_episode_have_weights():
    kept = []

    async def keeps(task, model):
        kept.append(await model.generate(task.messages))
        return 1.0

    async def weighs(task, model):
        model.weigh(kept[0], 0.0)

    assert play_with(keeps).error is None
    assert "not of this episode" in play_with(weighs).error.message


@pytest.mark.parametrize(
    ("status", "stop"),
    [
        ("completed", StopReason.DONE),
        ("truncated", StopReason.ENV_TRUNCATED),
        ("aborted", StopReason.ABORTED),
        ("failed", StopReason.ENV_ERROR),
    ],
)
def test_a_function_says_how_its_episode_ended(status, stop):
    async def play(task, model):
        await model.generate(task.messages)
        return tw.Scores(1.0, status=status)

    found = play_with(play)
    assert found.stop is stop
    assert found.stop.status is Status(status)
    assert found.reward == (None if status in ("aborted", "failed") else 1.0)
    other = play_with(talk([None]))
    config = TrainConfig(min_group=1)
    credits = advantages([Group("0", [found, other])], credit_settings(config))
    reasons = {credit.trajectory.stop: credit.reason for credit in credits.credits}
    assert (reasons[stop] == "failed") == (status in ("aborted", "failed"))


def test_an_unknown_status_is_refused():
    async def play(task, model):
        await model.generate(task.messages)
        return tw.Scores(1.0, status="done")

    assert "write 'completed', 'truncated', 'aborted' or 'failed'" in play_with(play).error.message


class Listens:
    """Engine that keeps what it is asked."""

    context = None
    version = 0

    def __init__(self, texts):
        self.requests, self.texts = [], list(texts)

    async def generate(self, request):
        self.requests.append(request)
        ids = renderer("bpe").encode_reply(self.texts[len(self.requests) - 1])
        end = next((at for at, one in enumerate(ids) if one in request.stop_ids), len(ids))
        return Generation(ids[: end + 1], [-0.5] * len(ids[: end + 1]), "stop", 0)

    def release(self, session):
        pass

    async def close(self):
        pass


def test_sampling_of_one_call():
    reply = renderer("bpe").encode_reply("one two three")
    stop = reply[2]
    engine, replies = Listens(["one two three", "four"]), []

    async def play(task, model):
        given = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1}
        replies.append(await model.generate(task.messages, stop_ids=[stop], **given))
        replies.append(
            await model.generate([*task.messages, replies[0].message, tw.Message("user", "On.")])
        )
        return 1.0

    (found,) = tw.rollout(play, [TASK], engine, renderer=renderer("bpe"))
    assert found.error is None, found.error
    first, second = engine.requests
    assert (
        first.sampling.temperature,
        first.sampling.top_p,
        first.sampling.top_k,
        first.sampling.min_p,
    ) == (0.5, 0.9, 7, 0.1)
    assert second.sampling == tw.Sampling()
    assert stop in first.stop_ids
    assert stop not in second.stop_ids
    assert replies[0].ids[-1] == stop
    assert list(replies[0].ids) == reply[: reply.index(stop) + 1]
    assert replies[0].raw_text == renderer("bpe").decode(replies[0].ids)
    assert replies[1].raw_text == "four<|im_end|>"
    (row,) = found.samples()
    assert row.samplings[row.mask.index(1)].min_p == 0.1


def several(path, generate):
    """Play an episode that asks for four replies to one prompt and continues the
    third, with a real model."""
    kept = []

    async def play(task, model):
        replies = await generate(model, task.messages)
        kept.extend(reply.ids for reply in replies)
        await model.generate([*task.messages, replies[2].message, tw.Message("user", "On.")])
        return 1.0

    engine = LocalEngine(AutoModelForCausalLM.from_pretrained(path), slots=8)
    given = {
        "renderer": tw.load_renderer(path),
        "limits": tw.Limits(turn_tokens=12, on_turn_length="continue"),
        "seed": 8,
    }
    (found,) = tw.rollout(play, [TASK], engine, **given)
    assert found.error is None, found.error
    return found, kept


def test_several_replies_of_one_call(tmp_path):
    path = create_tiny_model(
        ModelConfig(hidden=32, layers=1), ["alpha kilo tango zulu"] * 20, tmp_path / "m"
    )

    async def at_once(model, prompt):
        return await model.generate(prompt, n=4)

    async def in_turn(model, prompt):
        return [await model.generate(prompt) for _ in range(4)]

    found, ids = several(path, at_once)
    other, same = several(path, in_turn)
    assert ids == same
    assert len(set(ids)) == 4  # each draws from a seed of its own
    rows, others = (
        sorted((row.ids, row.mask, row.logprobs) for row in one.samples()) for one in (found, other)
    )
    assert rows == others
    assert len(rows) == 4
    assert sum(sum(mask) for _, mask, _ in rows) == found.sampled_tokens
    assert found.branches == other.branches


def test_several_replies_are_a_list_and_at_least_one():
    async def play(task, model):
        assert [reply.text for reply in await model.generate(task.messages, n=1)] == ["one and two"]
        with pytest.raises(UsageError, match="n must be at least 1, not 0"):
            await model.generate(task.messages, n=0)
        return 1.0

    assert play_with(play).error is None


def test_an_error_of_one_reply_is_that_of_the_call():
    async def play(task, model):
        await model.generate(task.messages, n=5)

    found = play_with(play)
    assert found.error.type == "EngineError"
    assert "the script has 3 replies" in found.error.message
    assert len(found.turns) == 3


@pytest.mark.parametrize(
    "given", [{"top_p": 0.0}, {"top_k": -1}, {"temperature": -1.0}, {"min_p": 1.0}]
)
def test_sampling_out_of_range_is_refused(given):
    async def play(task, model):
        await model.generate(task.messages, **given)

    (name,) = given
    message = play_with(play).error.message
    assert message.startswith("generate: ")
    assert f"{name} must be" in message


def test_ids_that_follow_a_reply_are_observations():
    codec = renderer("bpe")

    async def play(task, model):
        ids = codec.encode("<|im_start|>user\nGo.<|im_end|>\n<|im_start|>assistant\n")
        for _ in range(2):
            reply = await model.generate(ids)
            ids = [
                *ids,
                *reply.ids,
                *codec.encode("\n<|im_start|>user\nOn.<|im_end|>\n<|im_start|>assistant\n"),
            ]
        await model.generate([*ids[:12], *codec.encode("other")])
        return 1.0

    found = play_with(play)
    assert found.error is None
    origins = [span.origin for span in found.spans]
    assert origins[:4] == [Origin.PROMPT, Origin.MODEL, Origin.ENV, Origin.MODEL]
    assert origins[4] is Origin.PROMPT, "what replaces earlier ids is a prompt of its own"
    assert found.observed_tokens == len(found.spans[2].ids)


def test_the_tokenizers_face_equals_that_of_transformers():
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(
        tokenizer_object=bpe(), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    theirs.chat_template = CHATML
    checked = []

    async def play(task, model):
        ours = model.tokenizer
        text = "one <|im_start|>two three\n"
        assert ours(text)["input_ids"] == theirs(text, add_special_tokens=False)["input_ids"]
        assert (
            ours([text, "x"])["input_ids"]
            == theirs([text, "x"], add_special_tokens=False)["input_ids"]
        )
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False)
        for skip in (False, True):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip
            )
        assert ours.batch_decode([ids, ids[:1]]) == theirs.batch_decode([ids, ids[:1]])
        assert (ours.eos_token_id, ours.eos_token) == (theirs.eos_token_id, theirs.eos_token)
        assert ours.convert_tokens_to_ids("<|im_start|>") == theirs.convert_tokens_to_ids(
            "<|im_start|>"
        )
        assert len(ours) == len(theirs)
        rows = [{"role": "system", "content": "Be."}, {"role": "user", "content": "Go."}]
        tools = [
            {
                "type": "function",
                "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
            }
        ]
        for offered in (None, tools):
            for prompt in (False, True):
                given = {"tools": offered, "add_generation_prompt": prompt}
                assert ours.apply_chat_template(
                    rows, tokenize=False, **given
                ) == theirs.apply_chat_template(rows, tokenize=False, **given)
                assert (
                    ours.apply_chat_template(rows, **given)
                    == theirs.apply_chat_template(rows, **given, return_dict=False)
                    == ours.apply_chat_template(rows, **given, return_dict=True)["input_ids"]
                )
        assert model.limits.turns == 8
        checked.append(True)

    found = play_with(play)
    assert found.error is None, found.error.traceback
    assert checked


@pytest.fixture(scope="module")
def sees(tmp_path_factory):
    return load_renderer(tiny_vlm_directory(tmp_path_factory.mktemp("vlm") / "m", "qwen3_vl"))


def images():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 255, (56, size, 3), dtype=np.uint8) for size in (56, 84)]


def test_images_of_ids_are_those_of_messages(sees):
    shown = images()
    content = [tw.Image(shown[0]), "and", tw.Image(shown[1])]

    async def by_messages(task, model):
        await model.generate([tw.Message("user", content)])

    async def by_ids(task, model, expanded):
        ids = model.tokenizer.apply_chat_template(
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "image"},
                        {"type": "text", "text": "and"},
                        {"type": "image"},
                    ],
                }
            ],
            add_generation_prompt=True,
        )
        if expanded:
            ids = first.prompt_ids(0)
        await model.generate(list(ids), media=[tw.Image(one) for one in shown])

    async def compact(task, model):
        await by_ids(task, model, False)

    async def expanded(task, model):
        await by_ids(task, model, True)

    def play(function):
        (found,) = tw.rollout(function, [TASK], tw.ScriptedEngine(["ok"]), renderer=sees)
        assert found.error is None, found.error.traceback
        return found

    first = play(by_messages)
    for function in (compact, expanded):
        other = play(function)
        assert other.prompt_ids(0) == first.prompt_ids(0)
        assert other.spans[0].media == first.spans[0].media


@pytest.mark.parametrize("count", [0, 1, 3])
def test_placeholders_that_do_not_fit_are_refused(sees, count):
    pad = sees.codec.control["<|image_pad|>"]

    async def play(task, model):
        await model.generate([5, *[pad, 6] * count, 7], media=[tw.Image(one) for one in images()])

    (found,) = tw.rollout(play, [TASK], tw.ScriptedEngine(["ok"]), renderer=sees)
    assert f"{count} placeholders among" in found.error.message


def test_media_needs_ids_and_a_model_that_sees(sees):
    async def messages(task, model):
        await model.generate(task.messages, media=[tw.Image(images()[0])])

    async def ids(task, model):
        await model.generate([5, 6], media=[tw.Image(images()[0])])

    (found,) = tw.rollout(messages, [TASK], tw.ScriptedEngine(["ok"]), renderer=sees)
    assert "media belongs to a prompt of ids" in found.error.message
    assert "the model has no vision" in play_with(ids).error.message
