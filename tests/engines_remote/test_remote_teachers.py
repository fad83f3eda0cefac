"""Teachers on servers: what `turnwise serve` answers is what the same model answers here, text and images, with branches."""

from __future__ import annotations

import asyncio
import random
import re
from functools import partial

import pytest

pytest.importorskip("torch")
import torch
from sight_kit import Gallery, episode
from test_remote_serve import CLIENTS, TEXTS, run

from turnwise.config import ModelConfig, TeacherConfig, TrainConfig
from turnwise.engines.scoring import ScoreRequest
from turnwise.errors import ConfigError, EngineError
from turnwise.training import Trainer, create_tiny_model, load_model_and_renderer
from turnwise.training.advantages import Credit, trainable_tokens
from turnwise.training.forward.batch import LossDenominator
from turnwise.training.forward.forward import ForwardPass
from turnwise.training.teachers.base import Hint, Teachers
from turnwise.training.teachers.local import LocalTeacher
from turnwise.training.teachers.remote import RemoteTeacher
from turnwise.types import EpisodeKey, Group, Origin, Span, StopReason, Task, Trajectory

pytestmark = pytest.mark.filterwarnings("ignore:local engine. on this machine the last bits:UserWarning")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return create_tiny_model(ModelConfig(hidden=32, layers=1), TEXTS, tmp_path_factory.mktemp("taught") / "model", seed=3)


@pytest.fixture(scope="module")
def vlm(tmp_path_factory):
    sizes = ModelConfig(hidden=64, heads=4, vision=True, image_side=64)
    texts = [f"<|im_start|>user\nlook {n}<|im_end|>\n<|im_start|>assistant\nleft {n}<|im_end|>" for n in range(40)]
    return Gallery(create_tiny_model(sizes, texts, tmp_path_factory.mktemp("vlm") / "model"))


def conversation(seed, vocabulary=200):
    """A chain of three turns, and a branch that cuts an observation."""
    rng = random.Random(seed)

    def some(low, high):
        return [rng.randrange(20, vocabulary) for _ in range(rng.randint(low, high))]

    spans = [Span(Origin.PROMPT, some(3, 8))]
    for _ in range(3):
        for origin in (Origin.MODEL, Origin.ENV):
            ids = some(2, 6)
            more = {"logprobs": [-1.0] * len(ids), "version": 0} if origin is Origin.MODEL else {}
            spans.append(Span(origin, ids, len(spans) - 1, spans[-1].end, **more))
    spans.append(Span(Origin.ENV, some(2, 3), 2, spans[2].start + 1))
    spans.append(Span(Origin.MODEL, ids := some(2, 5), len(spans) - 1, spans[-1].end, [-1.0] * len(ids), 0))
    key = EpisodeKey("train", 0, "t", seed)
    return Trajectory(Task("t", id="t"), key, spans, reward=1.0, stop=StopReason.DONE)


def answers(directory, trajectories, make, pixels=None, **law):
    """The answers of one teacher for a batch of trajectories."""
    model, renderer = load_model_and_renderer(directory, directory, ModelConfig())
    kept = {}

    def teachers(policy):
        kept["teacher"] = make(policy, renderer)
        return Teachers([kept["teacher"]], 0.0)

    law = {"banned_ids": renderer.banned_ids} | law
    trainer = Trainer(model, TrainConfig(reward_weight=0.0), teachers=teachers, pixels=pixels, **law)
    kept["teacher"].ask(trajectories)
    credits = [Credit(t, 0.0, None, trainable_tokens(t)) for t in trajectories]
    return kept["teacher"].score(trainer._batch(credits, LossDenominator.of(credits, "token"))), kept["teacher"]


def local(directory, config, policy, renderer, hint=None):
    model, _ = load_model_and_renderer(directory, directory, ModelConfig())
    return LocalTeacher(config, "t", policy, hint and hint(renderer), ForwardPass(model.requires_grad_(False)), "auto")


def remote(url, config, policy, renderer, hint=None, on_note=None):
    config = TeacherConfig(**{name: getattr(config, name) for name in ("signal", "top", "timeout_s")}, urls=(url,))
    return RemoteTeacher(config, "t", policy, hint and hint(renderer), renderer, on_note)


def gap(directory, kind, trajectories, config, pixels=None, hint=None, **law):
    """The largest difference of both teachers in nats, over all ids and all most likely ids."""
    here, _ = answers(directory, trajectories, partial(local, directory, config, hint=hint), pixels, **law)

    async def work(client, app, url):
        make = partial(remote, url, config, hint=hint)
        return (await asyncio.to_thread(answers, directory, trajectories, make, pixels, **law))[0]

    served = run(directory, kind, work, context=1024)
    assert here.logp_n.isfinite().all()
    found = float((here.logp_n - served.logp_n).abs().max())
    if config.top is not None:
        best = here.targets.top_logp_mk.double() - served.targets.top_logp_mk.double()
        assert here.targets.top_logp_mk.shape == served.targets.top_logp_mk.shape == (len(here.logp_n), config.top)
        found = max(found, float(best.abs().max()))
        assert (here.targets.top_mk[:, 0] == served.targets.top_mk[:, 0]).double().mean() > 0.95
    return found


CONFIGS = [TeacherConfig(path="x"), TeacherConfig(path="x", signal="loss", top=4)]
LAWS = [{}, {"temperature": 0.7}, {"banned_ids": frozenset(range(200, 230))}]


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("config", CONFIGS, ids=["advantage", "loss"])
@pytest.mark.parametrize("law", LAWS, ids=["plain", "temperature", "banned"])
def test_a_served_teacher_answers_as_one_here(text, kind, config, law):
    assert gap(text, kind, [conversation(seed) for seed in range(4)], config, **law) < 1e-4


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("config", CONFIGS, ids=["advantage", "loss"])
def test_images_are_seen_by_a_served_teacher(vlm, kind, config):
    pictures = [[vlm.image(1), None, vlm.image(2)], [vlm.image(3), vlm.image(1)]]
    trajectories = [episode(vlm, shown, sample=number, seed=number) for number, shown in enumerate(pictures)]
    assert gap(vlm.path, kind, trajectories, config, pixels=vlm.pixels, temperature=1.3) < 1e-4


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_hint_precedes_text_and_images(vlm, kind, tmp_path):
    (tmp_path / "hints.py").write_text("def hint(trajectory):\n    return 'look left'\n")
    trajectories = [episode(vlm, [vlm.image(1), vlm.image(2)])]

    def hint(renderer):
        return Hint(f"{tmp_path / 'hints.py'}:hint", renderer)

    assert gap(vlm.path, kind, trajectories, CONFIGS[0], pixels=vlm.pixels, hint=hint) < 1e-4
    plain, _ = answers(vlm.path, trajectories, partial(local, vlm.path, CONFIGS[0]), vlm.pixels)
    hinted, _ = answers(vlm.path, trajectories, partial(local, vlm.path, CONFIGS[0], hint=hint), vlm.pixels)
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
            make = partial(remote, url, CONFIGS[0], renderer=renderer, on_note=notes.append)
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
        ("vllm", {"temperature": 0.7}, "at temperature 1 with nothing banned, and the policy samples at temperature 0.7"),
        ("vllm", {"banned_ids": frozenset((1, 2))}, "temperature 1, and 2 ids are banned|2 ids are banned"),
        ("sglang", {"temperature": 0.7}, "at temperature 1, and the policy samples at temperature 0.7"),
    ],
)
def test_a_server_that_computes_another_distribution_is_refused(text, kind, law, error, monkeypatch):
    monkeypatch.setattr(CLIENTS[kind], "seeded", False)  # as vLLM and SGLang answer

    async def work(client, app, url):
        await asyncio.to_thread(answers, text, [conversation(0)], partial(remote, url, CONFIGS[0]), **law)

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
            "input_token_logprobs": [[None, 20, None], *([float(logp[n - 1, ids[n]]), ids[n], None] for n in at)],
            "input_token_ids_logprobs": [None, *([[float(logp[n - 1, b]), b, None] for b in sorted(banned)] for n in at)],
            "input_top_logprobs": [
                None,
                *([[float(p), int(i), None] for p, i in zip(best.values[n - 1], best.indices[n - 1], strict=True)] for n in at),
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
    assert found.logprobs == pytest.approx([float(expected[n - 1, ids[n]]) for n in range(1, 4)], abs=1e-5)
    for n, row in enumerate(found.top):
        top = expected[n].topk(4)
        assert row == pytest.approx(dict(zip(top.indices.tolist(), top.values.tolist(), strict=True)), abs=1e-5)
