"""What a run samples and trains with, put together: `build_components`.

Each policy has a model, a trainer and an engine, and is as it would be alone; one policy is a list
of one. What several share is made here: frozen weights of equal origin, servers, and an engine of
adapters (`_adapters_in_this_process`). The pieces are built in `setup.py`, clients and servers in
`servers.py`.

`make_eval_policies` builds the engines alone, for evaluation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from turnwright.config import PolicyConfig, RunConfig
from turnwright.config.recipe import config_of
from turnwright.engines import Engine, SupportsWeightUpdate
from turnwright.engines.local import AdapterEngine, LocalEngine
from turnwright.engines.policy_engine import AgentPolicies, PolicyEngine
from turnwright.errors import ConfigError, EngineError
from turnwright.media import MediaStore
from turnwright.renderers.chat_renderer import ChatRenderer
from turnwright.renderers.vision import PixelCache
from turnwright.training.checkpoint import policies_of
from turnwright.training.forward.ranks import Ranks
from turnwright.training.model.directory import renderer_of
from turnwright.training.model.lora import shape_of
from turnwright.training.model.quantize import quantize_for_training
from turnwright.training.past import PastPolicy
from turnwright.training.policies import Policies, Policy
from turnwright.training.setup import (
    initial_model,
    load_initial,
    load_model,
    make_engine,
    make_eval_engine,
    make_local_engine,
    make_trainer,
    model_config,
)
from turnwright.training.trainer.leader import RankZeroTrainer

if TYPE_CHECKING:
    from turnwright.engines.remote.placed import ServerPlacer

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class RunComponents:
    """What a run samples and trains with."""

    source: Path
    """Model directory of the tokenizer and the template."""
    renderer: ChatRenderer
    engine: Engine
    """Samples for all policies."""
    policies: Policies
    """Those that are trained."""
    media: MediaStore
    """Images of the run."""
    pixels: PixelCache | None
    """Cache of the images' pixel values; None for a text-only model."""
    past: Sequence[PastPolicy]
    """Policies that are earlier versions of trained ones."""


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """A policy with weights, before it has an engine and a trainer."""

    config: RunConfig
    """The run's, with the policy's own keys."""
    origin: Path
    """Model directory that it started from."""
    saved: Path | None
    """Its directory in the checkpoint that the run is resumed from."""
    model: nn.Module


def build_components(
    config: RunConfig,
    source: Path,
    run: Path,
    weights: Path | None = None,
    ranks: Ranks | None = None,
    on_note: Callable[[str], None] | None = None,
    placer: ServerPlacer | None = None,
) -> RunComponents:
    """Load the policies of a run, from checkpoint `weights` if it is resumed, and start the other
    `ranks`.

    Each policy is as it would be alone: with a model, a trainer and an engine of its own. Frozen
    weights of equal origin are one copy in memory, and servers are shared.
    """
    ranks = ranks or Ranks()
    if ranks.size > 1 and config.policy:
        raise ConfigError(
            "[[policy]]: several policies are trained by one process; start the run without "
            "torchrun"
        )
    ranks.broadcast((config, source, weights))
    renderer = renderer_of(source, config.model, config.rollout.control_text)
    loaded = _load_policies(config, source, weights, renderer, on_note)

    def expected_logprobs(ids: Sequence[int]) -> list[float]:
        # The model's own forward pass needs all ranks.
        leader = trained[0].trainer
        assert isinstance(leader, RankZeroTrainer)
        return leader.expected(ids)

    # The engines come first: a local one copies weights that the trainer then wraps or shards.
    if config.policy:
        engines = _policy_engines(config, source, loaded, renderer, run, placer)
    else:
        expected = expected_logprobs if ranks.size > 1 else None
        engines = {}
        for name, policy in loaded.items():
            engines[name] = make_engine(
                config, source, policy.model, renderer, run, expected, placer
            )
    media = MediaStore(run / "media")
    pixels = None if renderer.vision is None else PixelCache(renderer.vision, media)

    trained = _trained_policies(config, loaded, engines, renderer, ranks, pixels, on_note)

    # Policies that play with earlier weights of one of those.
    past: list[PastPolicy] = []
    for settings in config.policies:
        if settings.past:
            past_policy = _past(config, settings, trained, run)
            past.append(past_policy)
            engines[settings.name] = past_policy.engine

    agents = AgentPolicies({settings.name: settings.plays for settings in config.policies})
    return RunComponents(
        source=source,
        renderer=renderer,
        engine=_router(config, engines),
        policies=Policies(trained, agents),
        media=media,
        pixels=pixels,
        past=past,
    )


def _load_policies(
    config: RunConfig,
    source: Path,
    weights: Path | None,
    renderer: ChatRenderer,
    on_note: Callable[[str], None] | None,
) -> dict[str, LoadedPolicy]:
    """Load the models of the policies that have weights in this process."""
    loaded: dict[str, LoadedPolicy] = {}
    for number, policy in enumerate(config.policies):
        if policy.urls or policy.past:
            continue
        policy_config = config_of(replace(config, seed=config.seed + number), policy)

        origin = source
        if policy.path is not None:
            origin = Path(policy.path)
            control_text = policy_config.rollout.control_text
            own_renderer = renderer_of(origin, policy_config.model, control_text)
            _check_same_renderer(policy, renderer, own_renderer)

        saved = weights / policy.name if weights is not None and policy.learns else None
        initial = initial_model(policy_config, origin, saved)
        model = load_model(initial, model_config(policy_config), renderer, on_note)
        if policy_config.quant.train and policy_config.engine.kind != "local":
            # A server's logprobs are compared with the trainer's.
            quantize_for_training(model, policy_config.quant)
        loaded[policy.name] = LoadedPolicy(policy_config, origin, saved, model)
    return loaded


def _trained_policies(
    config: RunConfig,
    loaded: Mapping[str, LoadedPolicy],
    engines: Mapping[str, Engine],
    renderer: ChatRenderer,
    ranks: Ranks,
    pixels: PixelCache | None,
    on_note: Callable[[str], None] | None,
) -> list[Policy]:
    """Build the trainer of each policy that learns, with the weights of its checkpoint."""
    trained: list[Policy] = []
    first_of: dict[Path, nn.Module] = {}
    for settings in config.policies:
        if not settings.learns:
            continue

        policy = loaded[settings.name]
        trainer = make_trainer(
            policy.config, policy.model, renderer, policy.saved, ranks, pixels, on_note
        )
        _share_frozen(policy.model, first_of.setdefault(policy.origin, policy.model))
        if policy.saved is not None:
            trainer.load(policy.saved)

        engine = engines[settings.name]
        assert isinstance(engine, SupportsWeightUpdate)
        adapter_alone = config.engine.update == "lora" or isinstance(engine, AdapterEngine)
        trained.append(Policy(settings.name, trainer, engine, adapter_alone, policy.origin))
    return trained


def _router(config: RunConfig, engines: Mapping[str, Engine]) -> Engine:
    """Return an engine for all agents: with `[[policy]]` each plays with the engine of its
    policy."""
    if not config.policy:
        return engines[""]
    return PolicyEngine(
        {policy.name: engines[policy.name] for policy in config.policy},
        agents={policy.name: policy.plays for policy in config.policy},
        fixed=[policy.name for policy in config.policy if not policy.learns],
    )


def _policy_engines(
    config: RunConfig,
    source: Path,
    loaded: Mapping[str, LoadedPolicy],
    renderer: ChatRenderer,
    run: Path,
    placer: ServerPlacer | None,
) -> dict[str, Engine]:
    """Build the engine of each of several policies that has weights; those that are not trained
    play in this process."""
    engines = _adapters_in_this_process(config, loaded, renderer)
    served: dict[str, nn.Module] = {}
    for settings in config.policy:
        name = settings.name
        if settings.urls:
            engines[name] = _served_policy(config, settings, renderer)
        elif name in loaded and name not in engines:
            policy = loaded[name]
            if not settings.learns or config.engine.kind == "local":
                engines[name] = make_local_engine(policy.config, policy.model, renderer)
            elif policy.origin != source:
                raise ConfigError(
                    f"policy {name}: servers share adapters of the run's model; leave its path out"
                )
            else:
                served[name] = policy.model

    if served:
        from turnwright.training.servers import make_adapter_engines

        engines |= make_adapter_engines(config, source, served, renderer, run, placer=placer)
    return engines


def _adapters_in_this_process(
    config: RunConfig, loaded: Mapping[str, LoadedPolicy], renderer: ChatRenderer
) -> dict[str, Engine]:
    """Build one engine for the policies of this process that are a model or LoRA adapters of it, if
    there are several and `engine.adapters` allows it."""
    mode = config.engine.adapters
    learning = {policy.name for policy in config.policy if policy.learns}

    # Policies whose weights are those of one model, but for their adapters.
    by_origin: dict[Path, list[str]] = {}
    for name, policy in loaded.items():
        adapted_here = policy.config.lora.rank and config.engine.kind == "local"
        if name not in learning or adapted_here:
            by_origin.setdefault(policy.origin, []).append(name)

    engines: dict[str, Engine] = {}
    for names in by_origin.values():
        adapted = [name for name in names if name in learning]
        model = loaded[names[0]].model
        on_gpu = next(model.parameters()).is_cuda
        if not adapted or len(names) == 1 or mode == "merged" or (mode == "auto" and not on_gpu):
            continue

        shapes = [shape_of(model, loaded[name].config.lora) for name in adapted]
        try:
            shared = make_local_engine(config, model, renderer, shapes)
        except EngineError as error:
            if mode == "rows":
                raise ConfigError(f'engine.adapters = "rows": {error}') from None
            _log.warning(
                "policies %s: an engine each, in place of one for all: %s", ", ".join(names), error
            )
            continue

        # Adapter 0 is the model without any.
        numbers = {name: number for number, name in enumerate(adapted, 1)}
        for name in names:
            engines[name] = shared.adapter(numbers.get(name, 0))
    return engines


def _check_same_renderer(policy: PolicyConfig, run: ChatRenderer, own: ChatRenderer) -> None:
    differs = [
        name
        for name in ("tokenizer", "template")
        if run.fingerprints[name] != own.fingerprints[name]
    ]
    if differs:
        raise ConfigError(
            f"policy {policy.name}: the {' and '.join(differs)} of {policy.path} differ from those "
            "of the run's model, and all policies read and write the same ids; use a model of the "
            "same family, or serve it and set policy.urls"
        )


def _share_frozen(model: nn.Module, other: nn.Module) -> None:
    """Let the frozen parameters of a model be those of another of the same origin."""
    shared = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and name in shared and not shared[name].requires_grad:
            parameter.data = shared[name].data


def _past(
    config: RunConfig, policy: PolicyConfig, trained: Sequence[Policy], run: Path
) -> PastPolicy:
    played = next(candidate for candidate in trained if candidate.name == policy.past["of"])
    assert played.source is not None

    # Episodes of a step may be played so many steps before it, when its version is not there yet.
    if config.schedule.mode == "async":
        lag = config.schedule.staleness
    else:
        lag = 1 if config.schedule.mode == "one_step_off" else 0

    def load_version(directory: Path, version: int) -> LocalEngine:
        model, renderer = load_initial(config, directory, None)
        return LocalEngine(model, renderer=renderer, context=config.limits.context, version=version)

    return PastPolicy(
        played,
        run / "past" / policy.name,
        played.source,
        load_version,
        every=policy.past.get("every", 10),
        keep=policy.past.get("keep", 5),
        lag=lag,
        seed=config.seed,
    )


def make_eval_policies(
    config: RunConfig, source: Path, placer: ServerPlacer | None = None
) -> tuple[Engine, ChatRenderer]:
    """Build the engine of a run's policies for evaluation only, and their renderer.

    A trained policy plays from its directory in checkpoint `source`, or starts from
    `source` if that is one model; earlier versions of a policy are not kept with a
    checkpoint, so it plays itself.
    """
    # A checkpoint of a run has a directory for each of several policies.
    names = policies_of(source) if config.policy else []
    renderer_source = source / names[0] if names else source
    renderer = renderer_of(renderer_source, config.model, config.rollout.control_text)

    # Policies that do not learn play the run's initial model, which may be one it made.
    initial = config.model.directory or source
    made_by_run = source.parent.parent / "model"
    if names and made_by_run.is_dir():
        initial = made_by_run

    engines: dict[str, Engine] = {}
    for policy in config.policies:
        if policy.urls:
            engines[policy.name] = _served_policy(config, policy, renderer)
        elif not policy.past:
            directory = Path(policy.path or initial)
            if policy.learns:
                directory = source / policy.name if names else source
            model = load_model(directory, model_config(config), renderer)
            if policy.learns:
                engines[policy.name] = make_eval_engine(config, directory, model, renderer, placer)
            else:
                engines[policy.name] = make_local_engine(config, model, renderer)

    for policy in config.policy:
        if policy.past:
            engines[policy.name] = engines[policy.past["of"]]
    return _router(config, engines), renderer


def _served_policy(config: RunConfig, policy: PolicyConfig, renderer: ChatRenderer) -> Engine:
    from turnwright.engines.remote import Fleet
    from turnwright.training.servers import make_clients

    served = replace(config.engine, kind="auto", urls=policy.urls, urls_file=None, model=None)
    return Fleet(make_clients(served, policy.urls, renderer, config.limits.context))
