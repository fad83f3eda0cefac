"""What a run is built of, one piece at a time: initial model, renderer, engine, trainer.

`model_directory` finds or makes the model that a run starts from, `load_initial` loads it with its
renderer, `make_trainer` and `make_engine` build what trains it and what samples from it. Putting
them together, for one policy or several, is `components.build_components`; servers are connected or
started by `servers.make_fleet`.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from turnwright import plugins
from turnwright.config import ModelConfig, RunConfig, TrainConfig
from turnwright.config.launch import world_size
from turnwright.config.names import ENGINES
from turnwright.engines import Engine, SupportsSleep, SupportsWeightUpdate
from turnwright.engines.local import LocalEngine, torch_settings
from turnwright.engines.local.adapters import AdapterShape
from turnwright.engines.local.engine import MAX_SLOTS
from turnwright.engines.local.mixed_precision import is_mixed
from turnwright.engines.protocols import SharesMemory
from turnwright.envs.datasets import read_messages, read_rows
from turnwright.envs.spec import EnvSpec
from turnwright.errors import ConfigError, TaskError
from turnwright.media import MediaStore
from turnwright.renderers.chat_renderer import ChatRenderer
from turnwright.renderers.control_text import ControlText
from turnwright.renderers.template import ChatTemplate, find_source
from turnwright.renderers.vision import PixelCache
from turnwright.rollouts.rollout_settings import sampling_of
from turnwright.training.algorithms import BUILT_IN
from turnwright.training.distributed import ProcessRanks
from turnwright.training.forward.ranks import Ranks
from turnwright.training.model.directory import ADAPTER_FILE, base_model_of, read_json, renderer_of
from turnwright.training.model.lora import WEIGHTS_FILE, add_lora, load_adapter
from turnwright.training.model.models import (
    choose_products,
    copy_extras,
    create_tiny_model,
    device_and_dtype,
    load,
    read_tensors,
    tiny_template,
)
from turnwright.training.model.packed import packing
from turnwright.training.model.quantize import (
    OnGrid,
    grid_of,
    quantize_for_sampling,
    quantize_for_training,
    quantized_names,
)
from turnwright.training.model.weight_export import Transform, unique_weights
from turnwright.training.teachers.build import make_teachers
from turnwright.training.trainer.heap import return_freed_memory
from turnwright.training.trainer.leader import RankZeroTrainer, follow_rank_zero
from turnwright.training.trainer.trainer import Trainer
from turnwright.types import Message, Tools

if TYPE_CHECKING:
    from turnwright.engines.remote.placed import ServerPlacer
    from turnwright.engines.remote.replica import LogprobFunction


_log = logging.getLogger(__name__)


def make_engine(
    config: RunConfig,
    source: Path,
    model: nn.Module,
    renderer: ChatRenderer,
    run: Path,
    expected_logprobs: LogprobFunction | None = None,
    placer: ServerPlacer | None = None,
) -> SupportsWeightUpdate:
    """Build the engine of `[engine]`; servers managed by the run start with the first update.

    Servers read config and tokenizer of `source`. The logprobs of `model`, or
    `expected_logprobs`, of known ids prove that weights arrived.
    """
    if config.engine.kind == "local":
        return make_local_engine(config, model, renderer)
    if config.engine.kind not in ENGINES:
        engine = _installed_engine(config, model, renderer)
        if not isinstance(engine, SupportsWeightUpdate):
            kind = type(engine).__name__
            raise ConfigError(
                f"engine.kind = {config.engine.kind!r}: {kind} takes no weights; use it for "
                "`turnwright eval`"
            )
        return engine

    from turnwright.training.servers import ServedModel, adapter_config, make_checked_fleet

    return make_checked_fleet(
        ServedModel(
            config=config,
            source=source,
            model=model,
            renderer=renderer,
            directory=run,
            adapter=adapter_config(model) if config.engine.update == "lora" else None,
            expected_logprobs=expected_logprobs,
            placer=placer,
        )
    )


def _installed_engine(config: RunConfig, model: nn.Module, renderer: ChatRenderer) -> Engine:
    engine: Engine = plugins.load("engines", config.engine.kind)(config, model, renderer)
    return engine


async def release_engine_memory(engine: Engine, config: RunConfig) -> None:
    """Free the memory of an engine that shares the trainer's device; the next weight update wakes
    it.

    In the process of a synchronous trainer an engine gives its keys and values back: the update
    drops them in any case.
    """
    if (config.engine.colocate or config.schedule.hold) and isinstance(engine, SupportsSleep):
        await engine.sleep()
    elif config.schedule.mode == "sync" and isinstance(engine, SharesMemory):
        await engine.drop_cache()


def make_eval_engine(
    config: RunConfig,
    source: Path,
    model: nn.Module,
    renderer: ChatRenderer,
    placer: ServerPlacer | None = None,
) -> Engine:
    """Build the engine for evaluation only; servers that take weights get the model's before the
    first call."""
    engine = config.engine
    if engine.kind == "local":
        return make_local_engine(config, model, renderer)
    if engine.kind not in ENGINES:
        return _installed_engine(config, model, renderer)

    from turnwright.training.servers import ServedModel, connect_fixed_servers, make_fleet

    if engine.kind == "chat" or (engine.kind == "llamacpp" and engine.attached):
        return connect_fixed_servers(config, renderer)

    quant = config.quant
    if quant.kind == "fp8" and quant.activations and not quant.packed:
        raise ConfigError(
            f"{source} was trained with fp8 activations, which servers do not round; play it with "
            'engine.kind = "local", or in full precision with --quant.kind none'
        )

    # Servers get what is played: the weights of `source`, rounded as in training, or an adapter.
    model = quantize_for_sampling(model, quant)
    base = base_model_of(source)
    as_adapter = engine.update == "lora" and base is not None
    pack = packing(model, quant) if quant.packed else None

    def first_weights() -> Iterable[tuple[str, Any]]:
        if as_adapter:
            return read_tensors(source / WEIGHTS_FILE).items()
        weights = unique_weights(model)
        return weights if pack is None else pack(weights)

    adapter = None
    if as_adapter:
        adapter = partial(read_json, source / ADAPTER_FILE, "it is no adapter")

    directory = Path(tempfile.mkdtemp(prefix="turnwright-"))
    fleet = make_fleet(
        ServedModel(
            config=config,
            source=base or source,
            model=model,
            renderer=renderer,
            directory=directory,
            first=first_weights,
            adapter=adapter,
            placer=placer,
        )
    )
    weakref.finalize(fleet, shutil.rmtree, directory, True)
    return fleet


def make_local_engine(
    config: RunConfig,
    model: nn.Module,
    renderer: ChatRenderer,
    adapters: Sequence[AdapterShape] = (),
) -> LocalEngine:
    """Build the engine of this process with copies of a model's weights, and with `adapters` of
    several policies."""
    model = quantize_for_sampling(model, config.quant)
    engine = LocalEngine(
        model,
        renderer=renderer,
        context=config.limits.context,
        speculate=config.engine.speculate,
        adapters=adapters,
    )
    # The engine has packed the weights of the copy, which is not needed any more.
    return_freed_memory()

    episodes = config.rollout.groups * config.rollout.group_size
    if engine.slots < min(episodes, MAX_SLOTS):
        _log.warning(
            "local engine: its memory has room for %d sequences of %d ids, and %d episodes "
            "are played at a time; set limits.context to the length of an episode",
            engine.slots,
            engine.context,
            episodes,
        )
    return engine


TEXTS = 500
"""Number of demonstrations whose texts train a tiny model's tokenizer."""


def dataset_texts(config: RunConfig, template: ChatTemplate) -> list[str]:
    """Return conversations with tools of the warm-up's dataset.

    No task has their schemas and calls, which would be read and written byte by byte.
    """
    if config.warmup.dataset is None:
        return []

    texts: list[str] = []
    for row, _ in islice(read_rows(Path(config.warmup.dataset)), TEXTS):
        # The warm-up names what is wrong with a row.
        with suppress(TaskError):
            messages, tools = read_messages(row, "")
            if tools:
                texts.append(template.try_render(messages, tools) or "")
    return texts


def model_directory(config: RunConfig, env_specs: Sequence[EnvSpec], run: Path) -> Path:
    """Return the initial model's directory: the recipe's, or one created once in the run directory.

    Created is a tiny model, or the base of the recipe's LoRA adapter with the adapter merged in.
    """
    named = config.model.directory
    if named is not None and base_model_of(named) is None:
        return named

    directory = run / "model"
    if not directory.is_dir():
        # A directory of this name is complete, whenever the process that writes it is killed.
        draft = run / ".model.writing"
        shutil.rmtree(draft, ignore_errors=True)
        if named is None:
            _write_tiny_model(config, env_specs, draft)
        else:
            model, _ = load(named, *device_and_dtype(config.model))
            model.save_pretrained(draft)
            copy_extras(named, draft)
        os.replace(draft, directory)
    return directory


def _write_tiny_model(config: RunConfig, env_specs: Sequence[EnvSpec], directory: Path) -> None:
    """Write a tiny model, whose tokenizer is trained on what the environments show and expect."""
    source, *_ = find_source(config.model.template or tiny_template(config.model))
    template = ChatTemplate(source)

    def render(tools: Tools) -> str:
        return template.try_render([Message("user", "")], tools) or ""

    texts: list[str] = []
    for env_spec in env_specs:
        texts += env_spec.texts(TEXTS, config.seed, render)
    texts += dataset_texts(config, template)

    torch_settings.keep()
    create_tiny_model(config.model, texts, directory, seed=config.seed)


def run_worker_rank(ranks: ProcessRanks, run: Path) -> None:
    """Run a rank other than 0 until rank 0 ends the run; the rank must be able to read the run's
    images."""

    def begin(config: RunConfig, source: Path, weights: Path | None) -> Trainer:
        model, renderer = load_initial(config, source, weights)
        pixels = None
        if renderer.vision is not None:
            pixels = PixelCache(renderer.vision, MediaStore(run / "media"))
        return make_trainer(config, model, renderer, weights, ranks, pixels)

    follow_rank_zero(ranks, begin)


def load_initial(
    config: RunConfig, source: Path, weights: Path | None
) -> tuple[nn.Module, ChatRenderer]:
    """Load the model of a run, as it is in checkpoint `weights` unless that holds an adapter, and
    its renderer."""
    initial = initial_model(config, source, weights)
    return load_model_and_renderer(
        source, initial, model_config(config), config.rollout.control_text
    )


def initial_model(config: RunConfig, source: Path, weights: Path | None) -> Path:
    """Return the directory of the model that a run starts with, from checkpoint `weights` or from
    `source`."""
    # LoRA checkpoints are adapters of the run's initial model.
    if weights is None or config.lora.rank:
        return source
    return weights


def model_config(config: RunConfig) -> ModelConfig:
    """Return `[model]` with the precision that the rest of the recipe needs.

    Servers compute in their own way, and a grid of weights and sharded weights are computed in
    float32. Raises `ConfigError` for `mixed` with `[quant]` or with several ranks.
    """
    model = config.model
    quantized = config.quant.kind != "none"
    several_ranks = world_size() > 1
    if model.dtype == "mixed" and (quantized or several_ranks):
        what = "[quant]" if quantized else "several ranks"
        raise ConfigError(
            f'model.dtype = "mixed" does not go with {what}, which multiply in float32; set it to '
            '"float32"'
        )

    needs_exact = quantized or several_ranks or config.engine.kind != "local"
    if model.dtype == "auto" and needs_exact:
        _, dtype = device_and_dtype(model)
        if dtype == torch.float32:
            return replace(model, dtype="float32")
    return model


def make_trainer(
    config: RunConfig,
    model: nn.Module,
    renderer: ChatRenderer,
    weights: Path | None,
    ranks: Ranks,
    pixels: PixelCache | None,
    on_note: Callable[[str], None] | None = None,
) -> Trainer:
    """Build the trainer of a model, with the adapter of `[lora]`: a new one, or that of
    checkpoint `weights`."""
    if config.lora.rank:
        if weights is None:
            add_lora(model, config.lora, seed=config.seed)
        else:
            load_adapter(model, weights)

    # What engines get in place of the trained weights, in this order.
    transforms: list[Transform] = []
    grid = grid_of(config.quant)
    if grid is not None:
        transforms.append(OnGrid(grid, quantized_names(model, config.quant)))
    if config.quant.packed:
        transforms.append(packing(model, config.quant))
    if config.quant.train:
        quantize_for_training(model, config.quant)

    make = Trainer if ranks.size == 1 else RankZeroTrainer
    trainer = make(
        model,
        resolved_train_config(config),
        sampling=sampling_of(config.rollout),
        banned_ids=renderer.banned_ids,
        seed=config.seed,
        template=renderer.fingerprint,
        ranks=ranks,
        pixels=pixels,
        teachers=make_teachers(config, renderer, on_note),
        on_note=on_note,
    )
    trainer.transforms.extend(transforms)
    if is_mixed(model) and config.engine.kind != "local":
        # A server rounds elsewhere than this process.
        trainer.expect_rounding()
    return trainer


def resolved_train_config(config: RunConfig) -> TrainConfig:
    """Return the recipe's `[train]` with `overlong_tokens` set, by default to the tokens that an
    episode's limits allow."""
    train = config.train
    limits = config.limits
    algorithm = BUILT_IN.get(train.algorithm)
    if train.overlong_tokens is not None or algorithm is None or not algorithm.overlong:
        return train

    max_tokens = limits.turns * limits.turn_tokens
    if limits.episode_tokens is not None:
        max_tokens = min(max_tokens, limits.episode_tokens)
    return replace(train, overlong_tokens=max_tokens)


def load_model_and_renderer(
    source: Path,
    weights: Path,
    config: ModelConfig,
    control_text: ControlText = "neutralise",
    on_note: Callable[[str], None] | None = None,
) -> tuple[nn.Module, ChatRenderer]:
    """Load a model and the renderer of its tokenizer; see `load_model`."""
    renderer = renderer_of(source, config, control_text)
    return load_model(weights, config, renderer, on_note), renderer


def load_model(
    weights: Path,
    config: ModelConfig,
    renderer: ChatRenderer,
    on_note: Callable[[str], None] | None = None,
) -> nn.Module:
    """Load a model whose ids a renderer makes; `on_note` is told how a large model multiplies on a
    CPU, and why.

    Many models have more embedding rows than their tokenizer has ids (Qwen's are padded to a
    multiple of 128). Such ids have no text, so the renderer bans them: never sampled and excluded
    from the trainer's softmax.
    """
    device, dtype = device_and_dtype(config)
    model, meta = load(weights, device, dtype)
    products = choose_products(model, config)
    if products and on_note is not None:
        on_note(f"model.dtype: {products}")
    renderer.ban(range(meta.tokens, meta.vocabulary))
    return model
