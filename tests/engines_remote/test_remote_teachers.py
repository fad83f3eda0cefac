"""Teachers on servers: what `turnwright serve` answers is what the same model answers here, text
and images, with branches."""

from __future__ import annotations

import asyncio
import re
from functools import partial

import pytest

pytest.importorskip("torch")
import torch
from kit.serving import CLIENTS, run, served
from kit.sight import episode
from kit.teachers import (
    CONFIGS,
    LAWS,
    TEXTS,
    answers,
    conversation,
    gap,
    gap_to,
    local,
    pictured,
    remote,
    seeing_model,
    text_model,
)

from turnwright.config import ModelConfig, TrainConfig
from turnwright.engines.scoring import ScoreRequest
from turnwright.errors import ConfigError, EngineError
from turnwright.training import Trainer, create_tiny_model, load_model_and_renderer
from turnwright.training.teachers.teacher import Hint, Teachers
from turnwright.types import Group, Task

pytestmark = pytest.mark.filterwarnings(
    "ignore:local engine. on this machine the last bits:UserWarning"
)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return text_model(tmp_path_factory.mktemp("taught"))


@pytest.fixture(scope="module")
def vlm(tmp_path_factory):
    return seeing_model(tmp_path_factory.mktemp("vlm"))


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("signal", CONFIGS)
@pytest.mark.parametrize("law", LAWS)
def test_a_served_teacher_answers_as_one_here(text, kind, signal, law):
    found = gap(kind, text, [conversation(seed) for seed in range(4)], CONFIGS[signal], **LAWS[law])
    assert found.nats < 1e-4
    assert found.first > 0.95


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("signal", CONFIGS)
def test_images_are_seen_by_a_served_teacher(vlm, kind, signal):
    found = gap(kind, vlm.path, pictured(vlm), CONFIGS[signal], pixels=vlm.pixels, temperature=1.3)
    assert found.nats < 1e-4
    assert found.first > 0.95


def test_a_server_of_another_model_is_far_from_the_one_here(text, tmp_path):
    other = create_tiny_model(ModelConfig(hidden=32, layers=1), TEXTS, tmp_path / "other", seed=4)

    async def work():
        async with served(other, "vllm", context=1024) as (_, url):
            return await asyncio.to_thread(
                gap_to, url, text, [conversation(0)], CONFIGS["advantage"]
            )

    assert asyncio.run(work()).nats > 0.01


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_hint_precedes_text_and_images(vlm, kind, tmp_path):
    (tmp_path / "hints.py").write_text("def hint(trajectory):\n    return 'look left'\n")
    trajectories, config = [episode(vlm, [vlm.image(1), vlm.image(2)])], CONFIGS["advantage"]

    def hint(renderer):
        return Hint(f"{tmp_path / 'hints.py'}:hint", renderer)

    assert gap(kind, vlm.path, trajectories, config, pixels=vlm.pixels, hint=hint).nats < 1e-4
    plain = answers(vlm.path, trajectories, partial(local, vlm.path, config), vlm.pixels)
    hinted = answers(
        vlm.path, trajectories, partial(local, vlm.path, config, hint=hint), vlm.pixels
    )
    assert float((plain.logp_n - hinted.logp_n).abs().max()) > 1e-3


@pytest.mark.parametrize("kind", CLIENTS)
def test_what_a_server_does_not_answer_is_no_teacher_and_noted(text, kind):
    trajectories = [conversation(seed) for seed in range(3)]
    asked = trajectories[1].spans[0].ids
    notes = []

    async def work(client, app, url):
        score = app.score

        def flaky(request):
            if list(request.ids[: len(asked)]) == list(asked):
                raise EngineError("no")
            return score(request)

        app.score = flaky

        def learn():
            model, renderer = load_model_and_renderer(text, text, ModelConfig())
            make = partial(
                remote, url, CONFIGS["advantage"], renderer=renderer, on_note=notes.append
            )
            config = TrainConfig(reward_weight=0.0, max_mismatch=1e9)
            trainer = Trainer(model, config, teachers=lambda policy: Teachers([make(policy)], 0.0))
            return trainer.step([Group(Task("t", id="t"), trajectories)], step=0, steps=1).metrics

        return await asyncio.to_thread(learn)

    figures = run(text, kind, work, context=1024)
    assert figures["tokens_no_teacher"] == trajectories[1].sampled_tokens
    assert figures["tokens_trained"] == figures["tokens_sampled"] - trajectories[1].sampled_tokens
    assert re.search("teacher t: 2 rows of episodes have no answer, first: ", notes[0])


@pytest.mark.parametrize(
    ("kind", "law", "error"),
    [
        (
            "vllm",
            {"temperature": 0.7},
            "at temperature 1 with nothing banned, and the policy samples at temperature 0.7",
        ),
        (
            "vllm",
            {"banned_ids": frozenset((1, 2))},
            "temperature 1, and 2 ids are banned|2 ids are banned",
        ),
        (
            "sglang",
            {"temperature": 0.7},
            "at temperature 1, and the policy samples at temperature 0.7",
        ),
    ],
)
def test_a_server_that_computes_another_distribution_is_refused(
    text, kind, law, error, monkeypatch
):
    monkeypatch.setattr(CLIENTS[kind], "seeded", False)  # as vLLM and SGLang answer

    async def work(client, app, url):
        await asyncio.to_thread(
            answers, text, [conversation(0)], partial(remote, url, CONFIGS["advantage"]), **law
        )

    with pytest.raises(ConfigError, match=error):
        run(text, kind, work, context=1024)


def test_sglang_reports_banned_ids_which_are_left_out_of_the_distribution(text):
    """Its own fields, answered here as SGLang does: logprobs of given ids at each position."""
    model, _ = load_model_and_renderer(text, text, ModelConfig())
    ids, banned = [20, 30, 40, 50], frozenset((3, 60))
    with torch.no_grad():
        logp = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    best = logp.topk(6, -1)

    async def post(path, body, seconds, *rest):
        assert body["token_ids_logprob"] == sorted(banned)
        assert body["top_logprobs_num"] == 6
        at = range(1, len(ids))
        meta = {
            "input_token_logprobs": [
                [None, 20, None],
                *([float(logp[n - 1, ids[n]]), ids[n], None] for n in at),
            ],
            "input_token_ids_logprobs": [
                None,
                *([[float(logp[n - 1, b]), b, None] for b in sorted(banned)] for n in at),
            ],
            "input_top_logprobs": [
                None,
                *(
                    [
                        [float(p), int(i), None]
                        for p, i in zip(best.values[n - 1], best.indices[n - 1], strict=True)
                    ]
                    for n in at
                ),
            ],
        }
        return {"meta_info": meta}

    async def work(client, app, url):
        client.server_version, client.http.post = "0.5.19", post
        return await client.scores(ScoreRequest(ids, banned_ids=banned, top=4))

    found = run(text, "sglang", work)
    logits = logp.clone()
    logits[:, sorted(banned)] = -torch.inf
    expected = logits.log_softmax(-1)
    assert found.logprobs == pytest.approx(
        [float(expected[n - 1, ids[n]]) for n in range(1, 4)], abs=1e-5
    )
    for n, row in enumerate(found.top):
        top = expected[n].topk(4)
        assert row == pytest.approx(
            dict(zip(top.indices.tolist(), top.values.tolist(), strict=True)), abs=1e-5
        )
