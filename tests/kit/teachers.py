"""What a teacher on a server answers against the same model in this process, text
and images, with branches.

The tests and `benchmarks/teachers.py` measure with it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kit.serving import served
from kit.sight import Gallery, episode
from turnwright.config import ModelConfig, TeacherConfig, TrainConfig
from turnwright.engines import Sampling
from turnwright.training import Trainer, create_tiny_model, load_model_and_renderer
from turnwright.training.credit import Credit
from turnwright.training.forward.batch import LossDenominator, TeacherScores
from turnwright.training.forward.forward import ForwardPass
from turnwright.training.loss_weights import trainable_tokens
from turnwright.training.teachers.local import LocalTeacher
from turnwright.training.teachers.remote import RemoteTeacher
from turnwright.training.teachers.teacher import Hint, TaughtPolicy, Teacher, Teachers
from turnwright.types import EpisodeKey, Origin, Span, StopReason, Task, Trajectory

TEXTS = [
    f"code of amber {n}\nlookup birch\nsee cedar {n * 7 % 10}\nanswer {n % 10}" for n in range(60)
]
SEEN = [
    f"<|im_start|>user\nlook {n}<|im_end|>\n<|im_start|>assistant\nleft {n}<|im_end|>"
    for n in range(40)
]
KINDS = ("vllm", "sglang")
CONFIGS = {
    "advantage": TeacherConfig(path="x"),
    "loss": TeacherConfig(path="x", signal="loss", top=4),
}
LAWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "banned": {"banned_ids": frozenset(range(200, 230))},
}
MakeHint = Callable[[Any], Hint]


class Gap(NamedTuple):
    """How far a served teacher is from one in this process."""

    nats: float
    """Largest difference over all ids and all most likely ids."""
    ids: int
    """Number of ids that were scored."""
    first: float
    """Share of the ids of which both have the same most likely id; 1 where none was asked for."""


def of_trainer(law: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a trainer for a distribution, given by name."""
    rest = dict(law)
    banned = {"banned_ids": rest.pop("banned_ids")} if "banned_ids" in rest else {}
    return {"sampling": Sampling(**rest), **banned}


def text_model(folder: Path) -> Path:
    """Return a model of random weights."""
    return create_tiny_model(ModelConfig(hidden=32, layers=1), TEXTS, folder / "text", seed=3)


def seeing_model(folder: Path) -> Gallery:
    """Return a vision-language model of random weights with images."""
    sizes = ModelConfig(hidden=64, heads=4, vision=True, image_side=64)
    return Gallery(create_tiny_model(sizes, SEEN, folder / "seeing"))


def pictured(gallery: Gallery) -> list[Trajectory]:
    """Return two conversations about images."""
    pictures = [[gallery.image(1), None, gallery.image(2)], [gallery.image(3), gallery.image(1)]]
    return [
        episode(gallery, shown, sample=number, seed=number) for number, shown in enumerate(pictures)
    ]


def conversation(seed: int, vocabulary: int = 200) -> Trajectory:
    """Return a chain of three turns, and a branch that cuts an observation."""
    rng = random.Random(seed)

    def some(low: int, high: int) -> list[int]:
        return [rng.randrange(20, vocabulary) for _ in range(rng.randint(low, high))]

    spans = [Span(Origin.PROMPT, some(3, 8))]
    for _ in range(3):
        for origin in (Origin.MODEL, Origin.ENV):
            ids = some(2, 6)
            more: dict[str, Any] = (
                {"logprobs": [-1.0] * len(ids), "version": 0} if origin is Origin.MODEL else {}
            )
            spans.append(Span(origin, ids, len(spans) - 1, spans[-1].end, **more))
    spans.append(Span(Origin.ENV, some(2, 3), 2, spans[2].start + 1))
    spans.append(
        Span(Origin.MODEL, ids := some(2, 5), len(spans) - 1, spans[-1].end, [-1.0] * len(ids), 0)
    )
    key = EpisodeKey("train", 0, "t", seed)
    return Trajectory(Task("t", id="t"), key, spans, reward=1.0, stop=StopReason.DONE)


def answers(
    directory: Path,
    trajectories: Sequence[Trajectory],
    make: Callable[..., Teacher],
    pixels: Any = None,
    **law: Any,
) -> TeacherScores:
    """Return the answers of one teacher of the model for a batch of trajectories."""
    model, renderer = load_model_and_renderer(directory, directory, ModelConfig())
    kept: list[Teacher] = []

    def teachers(policy: TaughtPolicy) -> Teachers:
        kept.append(make(policy, renderer))
        return Teachers(kept, 0.0)

    law = {"banned_ids": renderer.banned_ids} | law
    trainer = Trainer(
        model, TrainConfig(reward_weight=0.0), teachers=teachers, pixels=pixels, **of_trainer(law)
    )
    kept[0].ask(trajectories)
    credits = [Credit(t, 0.0, None, trainable_tokens(t)) for t in trajectories]
    return kept[0].score(trainer._batch(credits, LossDenominator.of(credits, "token")))


def local(
    directory: Path,
    config: TeacherConfig,
    policy: TaughtPolicy,
    renderer: Any,
    hint: MakeHint | None = None,
) -> Teacher:
    """Return the model as a teacher in this process."""
    model, _ = load_model_and_renderer(directory, directory, ModelConfig())
    made = None if hint is None else hint(renderer)
    return LocalTeacher(config, "t", policy, made, ForwardPass(model.requires_grad_(False)), "auto")


def remote(
    url: str,
    config: TeacherConfig,
    policy: TaughtPolicy,
    renderer: Any,
    hint: MakeHint | None = None,
    on_note: Callable[[str], None] | None = None,
) -> Teacher:
    """Return a teacher on a server."""
    config = TeacherConfig(
        **{name: getattr(config, name) for name in ("signal", "top", "timeout_s")}, urls=(url,)
    )
    return RemoteTeacher(
        config, "t", policy, None if hint is None else hint(renderer), renderer, on_note
    )


def gap_to(
    url: str,
    directory: Path,
    trajectories: Sequence[Trajectory],
    config: TeacherConfig,
    pixels: Any = None,
    hint: MakeHint | None = None,
    **law: Any,
) -> Gap:
    """Compare a served teacher with the same model in this process; a `ValueError` if
    either left an id out."""
    here = answers(
        directory, trajectories, partial(local, directory, config, hint=hint), pixels, **law
    )
    there = answers(directory, trajectories, partial(remote, url, config, hint=hint), pixels, **law)
    if not (here.logp_n.isfinite().all() and there.logp_n.isfinite().all()):
        raise ValueError("a teacher did not answer for every id")
    found, first = float((here.logp_n - there.logp_n).abs().max()), 1.0
    if config.top is not None:
        assert here.targets is not None
        assert there.targets is not None
        ours, theirs = here.targets.top_logp_mk, there.targets.top_logp_mk
        assert ours is not None
        assert theirs is not None
        if not ours.shape == theirs.shape == (len(here.logp_n), config.top):
            raise ValueError(
                f"a teacher has {tuple(ours.shape)} or {tuple(theirs.shape)} most likely ids"
            )
        found = max(found, float((ours.double() - theirs.double()).abs().max()))
        first = float((here.targets.top_mk[:, 0] == there.targets.top_mk[:, 0]).double().mean())
    return Gap(found, len(here.logp_n), first)


def gap(
    kind: str,
    directory: Path,
    trajectories: Sequence[Trajectory],
    config: TeacherConfig,
    **more: Any,
) -> Gap:
    """Compare `turnwright serve`, in the format of a kind of server, with the same
    model in this process."""

    async def work() -> Gap:
        async with served(directory, kind, context=1024) as (_, url), asyncio.timeout(100):
            return await asyncio.to_thread(gap_to, url, directory, trajectories, config, **more)

    return asyncio.run(work())


def largest_gaps(folder: Path) -> dict[str, float]:
    """Return the largest gaps over both formats, both signals and, for text, all distributions: of
    text with branches, and of images."""
    text, seeing = text_model(folder), seeing_model(folder)
    found = {"text": 0.0, "images": 0.0}
    for kind in KINDS:
        for config in CONFIGS.values():
            episodes = [conversation(seed) for seed in range(4)]
            gaps = [gap(kind, text, episodes, config, **law) for law in LAWS.values()]
            found["text"] = max(found["text"], *(one.nats for one in gaps))
            one = gap(
                kind, seeing.path, pictured(seeing), config, pixels=seeing.pixels, temperature=1.3
            )
            found["images"] = max(found["images"], one.nats)
    return found
