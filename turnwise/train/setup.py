"""What a run is made of: worlds, model, renderer, engine, trainer."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from turnwise.config import ModelConfig, RunConfig, TrainConfig
from turnwise.engine.local import LocalEngine
from turnwise.env.world import World
from turnwise.render import load_renderer
from turnwise.render.chat import ChatRenderer
from turnwise.render.guard import ControlText
from turnwise.rollout import Rollout
from turnwise.train.algorithms import BUILT_IN
from turnwise.train.models import load, place, tiny
from turnwise.train.plan import Choice
from turnwise.train.trainer import Trainer

TEXTS = 500
"""Demonstrations whose texts a tiny model's tokenizer is trained on."""


def model_directory(config: RunConfig, worlds: Sequence[World], run: Path) -> Path:
    """The model to start from: the recipe's, or a tiny one made once into the run directory."""
    if config.model.path is not None:
        return Path(config.model.path)
    directory = run / "model"
    if not directory.is_dir():
        draft = run / ".model.writing"
        shutil.rmtree(draft, ignore_errors=True)
        texts = [text for world in worlds for text in world.texts(TEXTS, config.seed)]
        tiny(config.model, texts, draft, seed=config.seed)
        os.replace(draft, directory)
    return directory


@dataclass(slots=True)
class Parts:
    """A model ready to sample and to be trained."""

    source: Path
    """The model directory whose tokenizer and template are used."""
    renderer: ChatRenderer
    engine: LocalEngine
    trainer: Trainer


def make_parts(config: RunConfig, source: Path, weights: Path | None = None) -> Parts:
    """Load a model for both sides.

    Args:
        source: the model directory to start from.
        weights: a checkpoint of it, when the run goes on.

    Raises:
        ModelError, TemplateError, ConfigError: when it cannot be used; one line each.
    """
    model, renderer = load_both(source, weights or source, config.model, config.rollout.control_text)
    engine = LocalEngine(model, renderer=renderer, context=config.limits.context)
    trainer = Trainer(
        model,
        within_limits(config),
        temperature=config.rollout.temperature,
        banned_ids=renderer.banned_ids,
        seed=config.seed,
        template=renderer.fingerprint,
    )
    return Parts(source, renderer, engine, trainer)


def within_limits(config: RunConfig) -> TrainConfig:
    """The recipe's `[train]`, with the length at which dapo's trajectories are too long: by default the most that an episode's
    limits let it sample."""
    train, limits = config.train, config.limits
    chosen = BUILT_IN.get(train.algorithm)
    if train.overlong_tokens is not None or chosen is None or not chosen.overlong:
        return train
    most = limits.turns * limits.turn_tokens
    return replace(train, overlong_tokens=most if limits.episode_tokens is None else min(most, limits.episode_tokens))


def load_both(
    source: Path, weights: Path, config: ModelConfig, control_text: ControlText = "neutralise"
) -> tuple[nn.Module, ChatRenderer]:
    """A model and the renderer of its tokenizer.

    Many models have more rows than their tokenizer has ids (Qwen's are padded to a multiple of 128). Such an id has no text, so
    it is banned: it is neither sampled nor in the trainer's softmax.

    Raises:
        ModelError, TemplateError, ConfigError: when one of them cannot be used.
    """
    renderer = load_renderer(source, template=config.template, template_args=config.template_args, control_text=control_text)
    device, dtype = place(config)
    model, meta = load(weights, device, dtype)
    renderer.banned_ids |= frozenset(range(meta.tokens, meta.vocabulary))
    return model, renderer


async def within_prompt_limit(rollout: Rollout, choices: Sequence[Choice], most: int) -> tuple[set[str], list[str]]:
    """The ids of tasks whose opening prompt, tools included, has at most so many tokens; and those of the others."""
    sizes = await rollout.prompt_sizes([choice.episodes("prompt", 0, 1)[0] for choice in choices])
    fits = {c.task.id for c, size in zip(choices, sizes, strict=True) if size is None or size <= most}
    return fits, [choice.task.id for choice in choices if choice.task.id not in fits]
