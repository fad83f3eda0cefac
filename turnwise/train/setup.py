"""What a run is made of: worlds, model, renderer, engine, trainer."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from turnwise.config import EvalConfig, ModelConfig, RolloutConfig, RunConfig, TrainConfig
from turnwise.engine import Sampling, SupportsWeightUpdate
from turnwise.env.world import EnvSpec
from turnwise.media import MediaStore
from turnwise.render.chat import ChatRenderer
from turnwise.render.guard import ControlText
from turnwise.render.vision import PixelCache
from turnwise.train.algorithms import BUILT_IN
from turnwise.train.model.directory import base_model_of, renderer_of
from turnwise.train.model.lora import add_lora, load_adapter
from turnwise.train.model.models import copy_extras, create_tiny_model, device_and_dtype, load
from turnwise.train.model.seam import Weights
from turnwise.train.ranks.ranks import Ranks
from turnwise.train.served import make_engine
from turnwise.train.step.leader import RankZeroTrainer, follow_rank_zero
from turnwise.train.step.trainer import Trainer

TEXTS = 500
"""Demonstrations whose texts a tiny model's tokenizer is trained on."""


def model_directory(config: RunConfig, worlds: Sequence[EnvSpec], run: Path) -> Path:
    """The model to start from: the recipe's, or one made once into the run directory: a tiny one, or the base of the LoRA
    adapter that the recipe names, with the adapter merged in.

    Raises:
        ModelError: when the recipe's cannot be used.
    """
    named = None if config.model.path is None else Path(config.model.path)
    if named is not None and base_model_of(named) is None:
        return named
    directory = run / "model"
    if not directory.is_dir():
        draft = run / ".model.writing"
        shutil.rmtree(draft, ignore_errors=True)
        if named is None:
            texts = [text for world in worlds for text in world.texts(TEXTS, config.seed)]
            create_tiny_model(config.model, texts, draft, seed=config.seed)
        else:
            model, _ = load(named, *device_and_dtype(config.model))
            model.save_pretrained(draft)
            copy_extras(named, draft)
        os.replace(draft, directory)
    return directory


@dataclass(slots=True)
class RunComponents:
    """A model ready to sample and to be trained."""

    source: Path
    """The model directory whose tokenizer and template are used."""
    renderer: ChatRenderer
    engine: SupportsWeightUpdate
    trainer: Trainer
    media: MediaStore
    """Images of the run."""
    pixels: PixelCache | None
    """What the model's processor makes of them; None for a model of text alone."""
    adapter_alone: bool = False
    """Whether new weights go out as the LoRA adapter alone."""

    def weights(self) -> Weights:
        """What the engine is given of the trainer's policy."""
        return self.trainer.adapter_weights() if self.adapter_alone else self.trainer.weights()


def build_components(
    config: RunConfig,
    source: Path,
    run: Path,
    weights: Path | None = None,
    ranks: Ranks | None = None,
    on_note: Callable[[str], None] | None = None,
) -> RunComponents:
    """Load a model for both sides.

    Args:
        source: the model directory to start from.
        run: the run directory.
        weights: a checkpoint of it, when the run goes on.
        ranks: the processes that train together, which are told to do their part.
        on_note: as for `Trainer`.

    Raises:
        ModelError, TemplateError, ConfigError: when it cannot be used; one line each.
    """
    ranks = ranks or Ranks()
    ranks.broadcast((config, source, weights))
    model, renderer = _loaded(config, source, weights)
    leader: list[RankZeroTrainer] = []

    def together(ids: Sequence[int]) -> list[float]:
        return leader[0].expected(ids)  # the model's own forward pass takes all ranks

    # The engine comes first: a local one copies weights that the trainer is about to wrap or to cut into shards.
    engine = make_engine(config, source, model, renderer, run, together if ranks.size > 1 else None)
    media = MediaStore(run / "media")
    pixels = None if renderer.vision is None else PixelCache(renderer.vision, media)
    trainer = _trainer(config, model, renderer, weights, ranks, pixels, on_note)
    if isinstance(trainer, RankZeroTrainer):
        leader.append(trainer)
    if weights is not None:
        trainer.load(weights)
    return RunComponents(source, renderer, engine, trainer, media, pixels, config.engine.update == "lora")


def run_worker_rank(ranks: Ranks, run: Path) -> None:
    """Be one of the other ranks of a run, until rank 0 says that it is over.

    Args:
        run: its directory, whose images every rank must be able to read.
    """

    def begin(config: RunConfig, source: Path, weights: Path | None) -> Trainer:
        model, renderer = _loaded(config, source, weights)
        pixels = None if renderer.vision is None else PixelCache(renderer.vision, MediaStore(run / "media"))
        return _trainer(config, model, renderer, weights, ranks, pixels)

    follow_rank_zero(ranks, begin)


def _loaded(config: RunConfig, source: Path, weights: Path | None) -> tuple[nn.Module, ChatRenderer]:
    # Checkpoints of a LoRA are an adapter of the model that the run began with.
    begun = weights if weights is not None and not config.lora.rank else source
    return load_model_and_renderer(source, begun, config.model, config.rollout.control_text)


def _trainer(
    config: RunConfig,
    model: nn.Module,
    renderer: ChatRenderer,
    weights: Path | None,
    ranks: Ranks,
    pixels: PixelCache | None,
    on_note: Callable[[str], None] | None = None,
) -> Trainer:
    if config.lora.rank and weights is None:
        add_lora(model, config.lora, seed=config.seed)
    elif config.lora.rank and weights is not None:
        load_adapter(model, weights)
    return (Trainer if ranks.size == 1 else RankZeroTrainer)(
        model,
        resolved_train_config(config),
        temperature=config.rollout.temperature,
        banned_ids=renderer.banned_ids,
        seed=config.seed,
        template=renderer.fingerprint,
        ranks=ranks,
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
        pixels=pixels,
        on_note=on_note,
    )


def sampling_of(config: RolloutConfig | EvalConfig) -> Sampling:
    """The distribution that episodes are sampled from, while training or in an evaluation."""
    return Sampling(config.temperature, config.top_p, config.top_k)


def resolved_train_config(config: RunConfig) -> TrainConfig:
    """The recipe's `[train]`, with the length at which dapo's trajectories are too long: by default the most that an episode's
    limits let it sample."""
    train, limits = config.train, config.limits
    chosen = BUILT_IN.get(train.algorithm)
    if train.overlong_tokens is not None or chosen is None or not chosen.overlong:
        return train
    most = limits.turns * limits.turn_tokens
    return replace(train, overlong_tokens=most if limits.episode_tokens is None else min(most, limits.episode_tokens))


def load_model_and_renderer(
    source: Path, weights: Path, config: ModelConfig, control_text: ControlText = "neutralise"
) -> tuple[nn.Module, ChatRenderer]:
    """A model and the renderer of its tokenizer.

    Many models have more rows than their tokenizer has ids (Qwen's are padded to a multiple of 128). Such an id has no text, so
    it is banned: it is neither sampled nor in the trainer's softmax.

    Raises:
        ModelError, TemplateError, ConfigError: when one of them cannot be used.
    """
    renderer = renderer_of(source, config, control_text)
    device, dtype = device_and_dtype(config)
    model, meta = load(weights, device, dtype)
    renderer.ban(range(meta.tokens, meta.vocabulary))
    return model, renderer
