"""Build a run's engine, model, renderer and trainer."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from turnwright import plugins
from turnwright.config import EngineConfig, EvalConfig, ModelConfig, RolloutConfig, RunConfig, TrainConfig
from turnwright.config.launch import world_size
from turnwright.config.schema import ENGINES, truncation_key
from turnwright.engines import Engine, Sampling, SupportsSleep, SupportsWeightUpdate
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
from turnwright.rollouts.standalone import run_sync
from turnwright.training.algorithms import BUILT_IN
from turnwright.training.distributed import ProcessRanks
from turnwright.training.forward.ranks import Ranks
from turnwright.training.model.directory import ADAPTER_FILE, base_model_of, read_json, renderer_of
from turnwright.training.model.lora import WEIGHTS_FILE, Adapter, add_lora, load_adapter
from turnwright.training.model.models import (
    choose_products,
    copy_extras,
    create_tiny_model,
    device_and_dtype,
    load,
    read_tensors,
    tiny_template,
)
from turnwright.training.model.packed import packing, quantization_config
from turnwright.training.model.quantize import (
    OnGrid,
    grid_of,
    quantize_for_sampling,
    quantize_for_training,
    quantized_names,
)
from turnwright.training.model.weight_export import Transform, tied_names
from turnwright.training.teachers.build import make_teachers
from turnwright.training.trainer.heap import return_freed_memory
from turnwright.training.trainer.leader import RankZeroTrainer, follow_rank_zero
from turnwright.training.trainer.trainer import Trainer
from turnwright.training.weight_transfer import GroupWeightPacker, RequestWeightPacker
from turnwright.types import Message, Tools

if TYPE_CHECKING:
    from turnwright.engines.remote import Fleet, RemoteEngine
    from turnwright.engines.remote.placed import ServerPlacer
    from turnwright.engines.remote.replica import LogprobFunction


_log = logging.getLogger(__name__)
TOLERANCE = {torch.float32: 1e-3}
"""Bound on |logprob of server - of trainer| by dtype, nats; correct servers in float32 are within 1e-5."""
ROUGH = 0.5
"""The same bound for bfloat16 and float16, where rounding alone reaches 0.2."""
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes supported by vLLM 0.32.0's CPU attention (`CPUAttentionBackend.get_supported_head_sizes`)."""
FirstUpdate = Callable[[], Iterable[tuple[str, Any]]]


def make_engine(
    config: RunConfig,
    source: Path,
    model: nn.Module,
    renderer: ChatRenderer,
    run: Path,
    expected_logprobs: LogprobFunction | None = None,
    placer: ServerPlacer | None = None,
) -> SupportsWeightUpdate:
    """Build the engine of `[engine]`; servers managed by the run start with the first update. They read config and tokenizer of
    `source`; the logprobs of `model`, or `expected_logprobs`, of known ids prove that weights arrived."""
    if config.engine.kind == "local":
        return make_local_engine(config, model, renderer)
    if config.engine.kind not in ENGINES:
        engine = _installed_engine(config, model, renderer)
        if not isinstance(engine, SupportsWeightUpdate):
            kind = type(engine).__name__
            raise ConfigError(f"engine.kind = {config.engine.kind!r}: {kind} takes no weights; use it for `turnwright eval`")
        return engine
    adapter = _adapter_config(model) if config.engine.update == "lora" else None
    fleet = _fleet(config, source, model, renderer, run, adapter=adapter, expected_logprobs=expected_logprobs, placer=placer)
    _check_kinds(config, {member.engine.kind for member in fleet.members})
    return fleet


def _installed_engine(config: RunConfig, model: nn.Module, renderer: ChatRenderer) -> Engine:
    engine: Engine = plugins.load("engines", config.engine.kind)(config, model, renderer)
    return engine


def make_adapter_engines(
    config: RunConfig,
    source: Path,
    models: Mapping[str, nn.Module],
    renderer: ChatRenderer,
    run: Path,
    expected_logprobs: Mapping[str, LogprobFunction] | None = None,
    placer: ServerPlacer | None = None,
) -> dict[str, Fleet]:
    """Build one engine per policy over the same servers, each with an adapter of its own: a policy's update leaves the calls
    and caches of the others alone.

    Args:
        models: by policy; each has its own adapter of the model of `source`, now or before its first update.
        expected_logprobs: by policy, in place of those of its model.

    Servers of the run start with the first update of any policy, and end when the first policy's engine is closed.

    Raises:
        ConfigError: for `[engine]` settings that do not fit adapters of several policies.
    """
    if config.engine.update != "lora":
        raise ConfigError('several policies share servers as adapters only: set engine.update = "lora"')
    if config.engine.tree and len(models) > 1:
        raise ConfigError("engine.tree sends the weights of one policy; set engine.weights to a directory that all servers see")
    fleets: dict[str, Fleet] = {}
    for name, model in models.items():
        options: dict[str, Any] = {"adapter": _adapter_config(model), "placer": placer, "policy": name, "policies": len(models)}
        options |= {"expected_logprobs": (expected_logprobs or {}).get(name), "beside": next(iter(fleets.values()), None)}
        fleet = _fleet(config, source, model, renderer, run, **options)
        _check_kinds(config, {member.engine.kind for member in fleet.members})
        fleets[name] = fleet
    return fleets


def _adapter_config(model: nn.Module) -> Callable[[], dict[str, Any]]:
    """Return a function that returns the adapter_config.json of a model, which gets its adapter later."""
    return cache(lambda: Adapter(model).peft_config())


def _check_kinds(config: RunConfig, kinds: Collection[str]) -> None:
    """Check the kinds of custom servers, which may be known only once they were queried."""
    engine, rollout = config.engine, config.rollout
    required = {
        "lora": ("adapters go to vLLM and SGLang", {"vLLM", "SGLang"}),
        "tensors": ("weights in requests go to SGLang", {"SGLang"}),
    }
    what, fit = required.get(engine.update, ("", kinds))
    if others := sorted(set(kinds) - set(fit)):
        raise ConfigError(f'engine.update = "{engine.update}": {what} only, but {others[0]} answers at engine.urls')
    if config.train.steps and "SGLang" in kinds and (cut := truncation_key(rollout)):
        key, why = cut
        raise ConfigError(f"rollout.{key} = {getattr(rollout, key)}: {why} (SGLang answers at engine.urls)")


async def release_engine_memory(engine: Engine, config: RunConfig) -> None:
    """Free the memory of an engine that shares the trainer's device; the next weight update wakes it.

    In the process of a synchronous trainer an engine gives its keys and values back: the update drops them in any case.
    """
    if (config.engine.colocate or config.schedule.hold) and isinstance(engine, SupportsSleep):
        await engine.sleep()
    elif config.schedule.mode == "sync" and isinstance(engine, SharesMemory):
        await engine.drop_cache()


def make_eval_engine(
    config: RunConfig, source: Path, model: nn.Module, renderer: ChatRenderer, placer: ServerPlacer | None = None
) -> Engine:
    """Build the engine for evaluation only; servers that take weights get the model's before the first call."""
    if config.engine.kind == "chat" or (config.engine.kind == "llamacpp" and config.engine.attached):
        return connect_fixed_servers(config, renderer)
    if config.engine.kind == "local":
        return make_local_engine(config, model, renderer)
    if config.engine.kind not in ENGINES:
        return _installed_engine(config, model, renderer)
    quant = config.quant
    if quant.kind == "fp8" and quant.activations and not quant.packed:
        raise ConfigError(
            f"{source} was trained with fp8 activations, which servers do not round; play it with engine.kind = "
            '"local", or in full precision with --quant.kind none'
        )
    model = quantize_for_sampling(model, quant)
    directory = Path(tempfile.mkdtemp(prefix="turnwright-"))
    base = base_model_of(source)
    lora = config.engine.update == "lora" and base is not None
    adapter = partial(read_json, source / ADAPTER_FILE, "it is no adapter") if lora else None
    pack = packing(model, config.quant) if config.quant.packed else None

    def first() -> Iterable[tuple[str, Any]]:
        if lora:
            return read_tensors(source / WEIGHTS_FILE).items()
        return unique_weights(model) if pack is None else pack(unique_weights(model))

    fleet = _fleet(config, base or source, model, renderer, directory, first=first, adapter=adapter, placer=placer)
    weakref.finalize(fleet, shutil.rmtree, directory, True)
    return fleet


def make_local_engine(
    config: RunConfig, model: nn.Module, renderer: ChatRenderer, adapters: Sequence[AdapterShape] = ()
) -> LocalEngine:
    """Build the engine of this process with copies of a model's weights, and with `adapters` of several policies."""
    model = quantize_for_sampling(model, config.quant)
    options: dict[str, Any] = {"context": config.limits.context, "speculate": config.engine.speculate, "adapters": adapters}
    engine = LocalEngine(model, renderer=renderer, **options)
    return_freed_memory()  # of the copy whose weights are packed now
    wanted = config.rollout.groups * config.rollout.group_size
    if engine.slots < min(wanted, MAX_SLOTS):
        text = "local engine: its memory has room for %d sequences of %d ids, and %d episodes are played at a time; set %s"
        _log.warning(text, engine.slots, engine.context, wanted, "limits.context to the length of an episode")
    return engine


def connect_fixed_servers(config: RunConfig, renderer: Any) -> Fleet:
    """Connect to the servers of `[engine]` and keep their weights."""
    from turnwright.engines.remote import Fleet

    engine, limit = config.engine, config.limits.context
    options: dict[str, Any] = {"most": engine.concurrency, "patience_s": engine.unavailable_timeout_s}
    return Fleet(make_clients(engine, engine.urls, renderer, limit), **options, **_list_of(engine, renderer, limit))


def _fleet(
    config: RunConfig,
    source: Path,
    model: nn.Module,
    renderer: Any,
    directory: Path,
    first: FirstUpdate | None = None,
    adapter: Callable[[], dict[str, Any]] | None = None,
    expected_logprobs: LogprobFunction | None = None,
    placer: ServerPlacer | None = None,
    policy: str = "",
    policies: int = 1,
    beside: Fleet | None = None,
) -> Fleet:
    """Connect to or start servers, by a `placer` elsewhere; `adapter` returns adapter_config.json for updates of a LoRA adapter
    of `source`. The servers of `beside` are shared by the adapters of several `policies`."""
    from turnwright.engines.remote import Fleet
    from turnwright.engines.remote.managed import HOME, ManagedFleet, ServerProcess, how_to_install
    from turnwright.engines.remote.placed import PlacedFleet, PlacedServers

    engine, limit = config.engine, config.limits.context
    weight, weights_directory = next(model.parameters()), Path(engine.weights or directory / "weights") / policy
    gpu = weight.is_cuda if placer is None else config.scale.ray_engine_gpus > 0
    untie = not engine.attached and not gpu
    directories = _weight_directories(config, weights_directory, source, model, adapter, untie=untie)
    options: dict[str, Any] = {
        "directories": directories,
        "most": engine.concurrency,
        "patience_s": engine.unavailable_timeout_s,
        "expected_logprobs": _expected_scores(config, model, expected_logprobs),
        "tolerance": engine.weight_check_tolerance or TOLERANCE.get(weight.dtype, ROUGH),
        "first": first,
    }
    if engine.update == "tensors":
        options["packer"] = RequestWeightPacker(seconds=engine.group_s, source=source if untie else None)
    if engine.update == "group":
        # NCCL refuses two ranks on one GPU.
        fits = "nccl" if weight.is_cuda and not engine.colocate else "gloo"
        backend = fits if engine.group_backend == "auto" else engine.group_backend
        options["packer"] = GroupWeightPacker(
            backend, host=engine.group_host, seconds=engine.group_s, device=str(weight.device), source=source if untie else None
        )
    if engine.attached:
        if engine.tree:
            options["tree"] = _tree(engine, relay_port=engine.relay_port or None)
        return Fleet(make_clients(engine, engine.urls, renderer, limit), **options, **_list_of(engine, renderer, limit))
    shape = model.config.get_text_config()
    if engine.kind == "vllm" and not gpu:
        _check_heads(shape)
    home = Path(engine.install_dir) if engine.install_dir is not None else HOME
    if placer is None and not (home / engine.kind).is_dir():
        raise ConfigError(
            f"{home / engine.kind}: no environment for {engine.kind}; create it with "
            f"`{how_to_install(engine.kind, gpu=gpu)}`, set engine.install_dir, or set engine.urls to running "
            "servers"
        )
    context, logs = limit or int(shape.max_position_embeddings), (directory / "engines").absolute()
    options_of: dict[str, Any] = {"context": context, "gpu": gpu, "group": engine.update == "group"}
    options_of |= {"speculate": engine.speculate, "sleep": engine.colocate}
    if adapter is not None:
        options |= {"base": source.absolute(), "owner": beside is None}
        options_of |= {"lora": config.lora.rank, "adapters": policies}
    if placer is not None:
        options_of["gpus"] = max(1, int(config.scale.ray_engine_gpus))
        _check_split(shape, options_of["gpus"])
        if engine.tree:
            options["tree"] = _tree(engine, placer.host, relays=placer.relays, token=placer.token)
        given = (engine.start_s, options_of, engine.key_env, engine.tree)
        servers = PlacedServers(engine.kind, engine.servers, home.absolute(), logs, *given)
        return PlacedFleet(placer, servers, **options, **_list_of(engine, renderer, context, str(logs / "ray.txt")))
    if isinstance(beside, ManagedFleet):
        started = beside.started
    else:
        names = (f"{engine.kind}-{number}.log" for number in range(engine.servers))
        started = [ServerProcess(engine.kind, home, logs / name, **options_of) for name in names]
    clients = make_clients(engine, [server.url for server in started], renderer, context)
    return ManagedFleet(clients, started, start_s=engine.start_s, **options)


def _expected_scores(config: RunConfig, model: nn.Module, of_ranks: LogprobFunction | None) -> LogprobFunction:
    """Return what computes the scores that servers must have; `of_ranks` does where each of several ranks has a part of the
    model."""
    if config.engine.kind != "llamacpp":
        return of_ranks or score_with_model(model)
    if of_ranks is not None:
        raise ConfigError('engine.kind = "llamacpp" is for a trainer of one process; use "vllm" or "sglang" with several')
    return likeliest_with_model(model)


def _weight_directories(
    config: RunConfig,
    place: Path,
    source: Path,
    model: nn.Module,
    adapter: Callable[[], dict[str, Any]] | None,
    *,
    untie: bool,
) -> Any:
    """Return what writes each policy's weights for the servers."""
    from turnwright.engines.remote.weight_files import AdapterDirectories, ModelDirectories
    from turnwright.training.model.gguf_files import GgufDirectories

    packed = config.quant.packed
    if packed and next(model.parameters()).dtype == torch.float32:
        raise ConfigError('quant.packed: servers compute packed weights in bfloat16; set model.dtype = "bfloat16"')
    if adapter is not None:
        return AdapterDirectories(place, adapter)
    if config.engine.kind == "llamacpp":
        return GgufDirectories(place, source)
    quantization = quantization_config(model, config.quant) if packed else None
    return ModelDirectories(place, source, untie=untie, quantization=quantization)


def _check_heads(shape: Any) -> None:
    """Check the head size; vLLM 0.32 on a CPU starts with any and fails at the first call with an unsupported one."""
    width = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    if width not in CPU_HEADS:
        raise ConfigError(
            f"vLLM's CPU attention supports head sizes {', '.join(map(str, CPU_HEADS))}, and this model has {width}: for a "
            "tiny model set model.heads so that hidden / heads is one of these (--model.heads 2 --model.kv-heads 2), or set "
            'engine.kind = "sglang"'
        )


def _check_split(shape: Any, gpus: int) -> None:
    """Check that attention heads can be shared by GPUs, which servers find out minutes later."""
    heads = int(shape.num_attention_heads)
    if heads % gpus:
        raise ConfigError(
            f"scale.ray_engine_gpus = {gpus}: the model has {heads} attention heads, which cannot be split over {gpus} GPUs; "
            "choose a divisor"
        )


def make_clients(engine: EngineConfig, urls: Sequence[str], renderer: Any, context: int | None = None) -> list[RemoteEngine]:
    """Create a client for each URL, of the kind that `[engine]` names or that the server reports; raise `ConfigError` without
    the extra `servers` or the API key."""
    return [run_sync(_make_client(engine, url, renderer, context)) for url in urls]


async def _make_client(engine: EngineConfig, url: str, renderer: Any, context: int | None) -> RemoteEngine:
    from turnwright.engines.remote import ChatEngine
    from turnwright.engines.remote.capabilities import KINDS, kind_of

    options: dict[str, Any] = {"renderer": renderer, "key_env": engine.key_env, "most": engine.concurrency}
    options |= {"in_flight": engine.in_flight}
    if engine.kind == "chat":
        if engine.model is None:
            raise ConfigError("a chat endpoint needs the name of its model; set engine.model")
        return ChatEngine(url, engine.model, context=context, **options)
    kind = await kind_of(url, key_env=engine.key_env) if engine.kind == "auto" else engine.kind
    return KINDS[kind](url, model=engine.model, context=context, missing_logprobs=engine.missing_logprobs, **options)


def _tree(engine: EngineConfig, host: str = "127.0.0.1", **options: Any) -> Any:
    try:
        tree = plugins.load("transports", "tree")
    except ImportError as error:
        raise ConfigError(f"engine.tree needs {error.name}: pip install 'turnwright[serve]'") from None
    return tree(engine.group_host or host, **options)


def _list_of(engine: EngineConfig, renderer: Any, context: int | None, file: str | None = None) -> dict[str, Any]:
    """Return the options of a fleet whose servers join and leave by a file."""
    from turnwright.engines.remote.engine_list import EngineList

    file = file or engine.urls_file
    if file is None:
        return {}
    connect = partial(_make_client, engine, renderer=renderer, context=context)
    return {"listed": EngineList(file), "connect": lambda url: connect(url=url)}


def _next_logprobs(model: nn.Module, ids: Sequence[int]) -> torch.Tensor:
    """Return the model's log-probabilities (T, vocabulary) after each of T ids, at temperature 1 with nothing banned."""
    ids_bt = torch.tensor([list(ids)], device=next(model.parameters()).device)
    with torch.no_grad():
        logits_tv: torch.Tensor = model(input_ids=ids_bt, use_cache=False).logits[0]
        return logits_tv.float().log_softmax(-1)


def score_with_model(model: nn.Module) -> LogprobFunction:
    """Return a function that computes log p(ids[i] | ids[:i]) for i >= 1."""

    def score(ids: Sequence[int]) -> list[float]:
        logp_tv = _next_logprobs(model, ids)
        following_t = torch.tensor(list(ids)[1:], device=logp_tv.device)
        return [float(value) for value in logp_tv[:-1].gather(1, following_t[:, None])[:, 0]]

    return score


def likeliest_with_model(model: nn.Module) -> LogprobFunction:
    """Return a function that computes the likeliest next ids and their logprobs as `LlamaCppEngine.score` returns them."""
    from turnwright.engines.remote.llamacpp import LIKELIEST

    def score(ids: Sequence[int]) -> list[float]:
        top = _next_logprobs(model, ids)[-1].topk(LIKELIEST)
        rows = sorted(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        return [float(value) for row in rows for value in row]

    return score


def unique_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a model's weights by Hugging Face name, tied ones once."""
    tied = tied_names(model)
    return ((name, tensor) for name, tensor in model.state_dict().items() if name not in tied)


TEXTS = 500
"""Number of demonstrations whose texts train a tiny model's tokenizer."""


def dataset_texts(config: RunConfig, template: ChatTemplate) -> list[str]:
    """Return conversations with tools of the warm-up's dataset: no task has their schemas and calls, which would be read and
    written byte by byte."""
    if config.warmup.dataset is None:
        return []
    found: list[str] = []
    for row, _ in islice(read_rows(Path(config.warmup.dataset)), TEXTS):
        with suppress(TaskError):  # the warm-up names what is wrong
            messages, tools = read_messages(row, "")
            if tools:
                found.append(template.try_render(messages, tools) or "")
    return found


def model_directory(config: RunConfig, env_specs: Sequence[EnvSpec], run: Path) -> Path:
    """Return the initial model's directory: the recipe's, or one created once in the run directory: a tiny model, or the base
    of the recipe's LoRA adapter with the adapter merged in."""
    named = config.model.directory
    if named is not None and base_model_of(named) is None:
        return named
    directory = run / "model"
    if not directory.is_dir():
        draft = run / ".model.writing"
        shutil.rmtree(draft, ignore_errors=True)
        if named is None:
            template = ChatTemplate(find_source(config.model.template or tiny_template(config.model))[0])

            def render(tools: Tools) -> str:
                return template.try_render([Message("user", "")], tools) or ""

            texts = [text for env_spec in env_specs for text in env_spec.texts(TEXTS, config.seed, render)]
            texts += dataset_texts(config, template)
            torch_settings.keep()
            create_tiny_model(config.model, texts, draft, seed=config.seed)
        else:
            model, _ = load(named, *device_and_dtype(config.model))
            model.save_pretrained(draft)
            copy_extras(named, draft)
        os.replace(draft, directory)
    return directory


def run_worker_rank(ranks: ProcessRanks, run: Path) -> None:
    """Run a rank other than 0, which must be able to read the run's images, until rank 0 ends the run."""

    def begin(config: RunConfig, source: Path, weights: Path | None) -> Trainer:
        model, renderer = load_initial(config, source, weights)
        pixels = None if renderer.vision is None else PixelCache(renderer.vision, MediaStore(run / "media"))
        return make_trainer(config, model, renderer, weights, ranks, pixels)

    follow_rank_zero(ranks, begin)


def load_initial(
    config: RunConfig, source: Path, weights: Path | None, on_note: Callable[[str], None] | None = None
) -> tuple[nn.Module, ChatRenderer]:
    """Load the model of a run, as it is in checkpoint `weights` unless that holds an adapter, and its renderer."""
    settings, initial = model_config(config), initial_model(config, source, weights)
    return load_model_and_renderer(source, initial, settings, config.rollout.control_text, on_note)


def initial_model(config: RunConfig, source: Path, weights: Path | None) -> Path:
    """Return the directory of the model that a run starts with, from checkpoint `weights` or from `source`."""
    # LoRA checkpoints are adapters of the run's initial model.
    return weights if weights is not None and not config.lora.rank else source


def model_config(config: RunConfig) -> ModelConfig:
    """Return `[model]` with the precision that the rest of the recipe needs.

    Servers compute in their own way, and a grid of weights and sharded weights are computed in float32.
    Raises `ConfigError` for `mixed` with `[quant]` or with several ranks.
    """
    model = config.model
    quantized, several = config.quant.kind != "none", world_size() > 1
    if model.dtype == "mixed" and (quantized or several):
        what = "[quant]" if quantized else "several ranks"
        raise ConfigError(f'model.dtype = "mixed" does not go with {what}, which multiply in float32; set it to "float32"')
    by_default = model.dtype == "auto" and (quantized or several or config.engine.kind != "local")
    if by_default and device_and_dtype(model)[1] == torch.float32:
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
    """Build the trainer of a model, with the adapter of `[lora]`: a new one, or that of checkpoint `weights`."""
    if config.lora.rank:
        if weights is None:
            add_lora(model, config.lora, seed=config.seed)
        else:
            load_adapter(model, weights)
    stages: list[Transform] = []
    if (grid := grid_of(config.quant)) is not None:
        stages.append(OnGrid(grid, quantized_names(model, config.quant)))
    if config.quant.packed:
        stages.append(packing(model, config.quant))
    if config.quant.train:
        quantize_for_training(model, config.quant)
    trainer = (Trainer if ranks.size == 1 else RankZeroTrainer)(
        model,
        resolved_train_config(config),
        temperature=config.rollout.temperature,
        banned_ids=renderer.banned_ids,
        seed=config.seed,
        template=renderer.fingerprint,
        ranks=ranks,
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
        min_p=config.rollout.min_p,
        pixels=pixels,
        teachers=make_teachers(config, renderer, on_note),
        on_note=on_note,
    )
    trainer.transforms.extend(stages)
    if is_mixed(model) and config.engine.kind != "local":
        trainer.expect_rounding()  # a server rounds elsewhere
    return trainer


def sampling_of(config: RolloutConfig | EvalConfig) -> Sampling:
    """Return the sampling settings of training episodes or of an evaluation."""
    return Sampling(config.temperature, config.top_p, config.top_k, min_p=config.min_p)


def resolved_train_config(config: RunConfig) -> TrainConfig:
    """Return the recipe's `[train]` with `overlong_tokens` set; by default the tokens that an episode's limits allow."""
    train, limits = config.train, config.limits
    chosen = BUILT_IN.get(train.algorithm)
    if train.overlong_tokens is not None or chosen is None or not chosen.overlong:
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
    weights: Path, config: ModelConfig, renderer: ChatRenderer, on_note: Callable[[str], None] | None = None
) -> nn.Module:
    """Load a model whose ids a renderer makes; `on_note` is told how a large model multiplies on a CPU, and why.

    Many models have more embedding rows than their tokenizer has ids (Qwen's are padded to a multiple of 128). Such ids have no
    text, so the renderer bans them: never sampled and excluded from the trainer's softmax.
    """
    device, dtype = device_and_dtype(config)
    model, meta = load(weights, device, dtype)
    if (chosen := choose_products(model, config)) and on_note is not None:
        on_note(f"model.dtype: {chosen}")
    renderer.ban(range(meta.tokens, meta.vocabulary))
    return model
