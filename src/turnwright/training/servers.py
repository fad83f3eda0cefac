"""Servers of a run: connected or started, and how weights reach them and are proven to be there.

`make_fleet` reads from top to bottom: running servers (`_attached_fleet`), servers on this machine
(`_managed_fleet`), or servers that a placer starts elsewhere (`_placed_fleet`). A `ServedModel`
says what they serve, and `_delivery` how its weights reach them.

What a server is told in its own wire format is in the clients of `engines/remote`; the ways to send
weights without directories are in `weight_transfer.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from turnwright import plugins
from turnwright.config import EngineConfig, RunConfig
from turnwright.config.schema import SGLANG_TRUNCATES
from turnwright.engines.remote import ChatEngine, Fleet
from turnwright.engines.remote.capabilities import KINDS, kind_of
from turnwright.engines.remote.engine_list import EngineList
from turnwright.engines.remote.fleet_settings import FleetSettings, ListedServers, WeightDelivery
from turnwright.engines.remote.llamacpp import LIKELIEST
from turnwright.engines.remote.managed import HOME, ManagedFleet, ServerProcess, how_to_install
from turnwright.engines.remote.placed import PlacedFleet, PlacedServers
from turnwright.engines.remote.remote_engine import RemoteEngine
from turnwright.engines.remote.weight_files import AdapterDirectories, ModelDirectories
from turnwright.engines.remote.weight_sync import WeightPacker, WeightSharing
from turnwright.errors import ConfigError
from turnwright.renderers.chat_renderer import ChatRenderer
from turnwright.rollouts.standalone import run_sync
from turnwright.training.model.gguf_files import GgufDirectories
from turnwright.training.model.lora import Adapter
from turnwright.training.model.packed import quantization_config
from turnwright.training.weight_transfer import GroupWeightPacker, RequestWeightPacker

if TYPE_CHECKING:
    from turnwright.engines.remote import RemoteEngine
    from turnwright.engines.remote.placed import ServerPlacer
    from turnwright.engines.remote.replica import LogprobFunction

TOLERANCE = {torch.float32: 1e-3}
"""Bound on |logprob of server - of trainer| by dtype, nats; correct servers in
float32 are within 1e-5."""
ROUGH = 0.5
"""The same bound for bfloat16 and float16, where rounding alone reaches 0.2."""
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes supported by vLLM 0.32.0's CPU attention
(`CPUAttentionBackend.get_supported_head_sizes`)."""
FirstUpdate = Callable[[], Iterable[tuple[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that servers sample from, and what it takes to send it to them."""

    config: RunConfig
    source: Path
    """Directory of the config and the tokenizer that servers read."""
    model: nn.Module
    renderer: Any
    directory: Path
    """Of the servers' logs, and of weights unless `engine.weights` names another."""
    first: FirstUpdate | None = None
    """Returns the weights that servers get before their first call, where no run updates them."""
    adapter: Callable[[], dict[str, Any]] | None = None
    """Returns adapter_config.json where updates are those of a LoRA adapter of `source`;
    None sends whole weights."""
    expected_logprobs: LogprobFunction | None = None
    """Computes the scores that servers must have, in place of `model`, of which each of several
    ranks may have a part."""
    placer: ServerPlacer | None = None
    """Starts the servers elsewhere; None starts them on this machine."""
    policy: str = ""
    policies: int = 1
    """Number of policies whose adapters share the servers."""
    beside: Fleet | None = None
    """Engine of another policy, whose servers are used."""

    @property
    def weight(self) -> torch.Tensor:
        """A weight, whose type and device are those of the model."""
        return next(self.model.parameters())

    @property
    def on_gpu(self) -> bool:
        """Whether the servers have GPUs."""
        return self.weight.is_cuda if self.placer is None else self.config.scale.ray_engine_gpus > 0

    @property
    def untie(self) -> bool:
        """Whether servers are started with an output matrix beside the embedding that it equals."""
        return not self.config.engine.attached and not self.on_gpu

    @property
    def shape(self) -> Any:
        """The model's text config."""
        return self.model.config.get_text_config()

    @property
    def context(self) -> int:
        """Length of the context with which servers are started."""
        return self.config.limits.context or int(self.shape.max_position_embeddings)

    @property
    def logs(self) -> Path:
        """Directory of the servers' logs."""
        return (self.directory / "engines").absolute()


def ray_placer(config: RunConfig, note: Callable[[str], None]) -> ServerPlacer | None:
    """Return what starts the engine's servers on the Ray cluster, or None
    when they are elsewhere."""
    if not config.engines_on_ray:
        return None

    try:
        engines = plugins.load("transports", "ray")
    except ImportError as error:
        raise ConfigError(
            f"scale.ray needs Ray ({error.name} is missing): pip install 'turnwright[ray]'"
        ) from None
    placer: ServerPlacer = engines(config.scale, note=note)
    return placer


def make_fleet(served: ServedModel) -> Fleet:
    """Connect to the servers of `[engine]`, or prepare their start, on this machine or
    elsewhere."""
    engine = served.config.engine
    if engine.attached:
        return _attached_fleet(served)

    if engine.kind == "vllm" and not served.on_gpu:
        _check_heads(served.shape)

    home = Path(engine.install_dir) if engine.install_dir is not None else HOME
    if served.placer is not None:
        return _placed_fleet(served, served.placer, home)
    return _managed_fleet(served, home)


def _attached_fleet(served: ServedModel) -> Fleet:
    """Connect to running servers."""
    engine = served.config.engine
    limit = served.config.limits.context
    tree = None
    if engine.tree:
        tree = _tree(engine, relay_port=engine.relay_port or None)
    return Fleet(
        make_clients(engine, engine.urls, served.renderer, limit),
        _fleet_settings(engine),
        delivery=_delivery(served, tree),
        listed=_listed_in_file(engine, served.renderer, limit),
    )


def _managed_fleet(served: ServedModel, home: Path) -> Fleet:
    """Prepare servers on this machine, which the first update starts, or use those of another
    policy."""
    engine = served.config.engine
    if not (home / engine.kind).is_dir():
        raise ConfigError(
            f"{home / engine.kind}: no environment for {engine.kind}; create it with "
            f"`{how_to_install(engine.kind, gpu=served.on_gpu)}`, set engine.install_dir, or set "
            "engine.urls to running servers"
        )

    if isinstance(served.beside, ManagedFleet):
        processes = served.beside.started
    else:
        processes = []
        for number in range(engine.servers):
            log = served.logs / f"{engine.kind}-{number}.log"
            processes.append(ServerProcess(engine.kind, home, log, **_start_settings(served)))

    urls = [process.url for process in processes]
    return ManagedFleet(
        make_clients(engine, urls, served.renderer, served.context),
        processes,
        _fleet_settings(engine),
        delivery=_delivery(served),
        start_s=engine.start_s,
        base=_base(served),
        owner=served.beside is None,
    )


def _placed_fleet(served: ServedModel, placer: ServerPlacer, home: Path) -> Fleet:
    """Prepare servers that a placer starts elsewhere."""
    engine = served.config.engine
    gpus = max(1, int(served.config.scale.ray_engine_gpus))
    _check_split(served.shape, gpus)

    tree = None
    if engine.tree:
        tree = _tree(engine, placer.host, relays=placer.relays, token=placer.token)
    servers = PlacedServers(
        kind=engine.kind,
        count=engine.servers,
        home=home.absolute(),
        logs=served.logs,
        start_s=engine.start_s,
        settings=_start_settings(served) | {"gpus": gpus},
        key_env=engine.key_env,
        relays=engine.tree,
    )
    listed = _listed(engine, served.renderer, served.context, str(served.logs / "ray.txt"))
    return PlacedFleet(
        placer,
        servers,
        _fleet_settings(engine),
        delivery=_delivery(served, tree),
        listed=listed,
        base=_base(served),
        owner=served.beside is None,
    )


def _start_settings(served: ServedModel) -> dict[str, Any]:
    """Return the arguments of `ServerProcess` that say how a server is started."""
    engine = served.config.engine
    settings: dict[str, Any] = {
        "context": served.context,
        "gpu": served.on_gpu,
        "group": engine.update == "group",
        "speculate": engine.speculate,
        "sleep": engine.colocate,
    }
    if served.adapter is not None:
        settings["lora"] = served.config.lora.rank
        settings["adapters"] = served.policies
    return settings


def _fleet_settings(engine: EngineConfig) -> FleetSettings:
    """Return how many calls the servers of `[engine]` take, and how long a call waits for one."""
    return FleetSettings(most=engine.concurrency, patience_s=engine.unavailable_timeout_s)


def _base(served: ServedModel) -> Path | None:
    """Return the model that servers start with if updates are adapters of it."""
    return served.source.absolute() if served.adapter is not None else None


def _delivery(served: ServedModel, tree: WeightSharing | None = None) -> WeightDelivery:
    """Return how weights reach the servers, and how their arrival is proven."""
    engine = served.config.engine
    weight = served.weight
    return WeightDelivery(
        directories=_weight_directories(served),
        tree=tree,
        packer=_packer(served),
        expected_logprobs=_expected_scores(served.config, served.model, served.expected_logprobs),
        tolerance=engine.weight_check_tolerance or TOLERANCE.get(weight.dtype, ROUGH),
        first=served.first,
    )


def _packer(served: ServedModel) -> WeightPacker | None:
    """Return what sends weights in place of directories; None if those are read."""
    engine = served.config.engine
    weight = served.weight
    untied = served.source if served.untie else None
    if engine.update == "tensors":
        return RequestWeightPacker(seconds=engine.group_s, source=untied)
    if engine.update != "group":
        return None

    # NCCL refuses two ranks on one GPU.
    fits = "nccl" if weight.is_cuda and not engine.colocate else "gloo"
    return GroupWeightPacker(
        fits if engine.group_backend == "auto" else engine.group_backend,
        host=engine.group_host,
        seconds=engine.group_s,
        device=str(weight.device),
        source=untied,
    )


def make_adapter_engines(
    config: RunConfig,
    source: Path,
    models: Mapping[str, nn.Module],
    renderer: ChatRenderer,
    run: Path,
    expected_logprobs: Mapping[str, LogprobFunction] | None = None,
    placer: ServerPlacer | None = None,
) -> dict[str, Fleet]:
    """Build one engine per policy over the same servers, each with an adapter of its own.

    A policy's update leaves the calls and caches of the others alone. Servers of the run start with
    the first update of any policy, and end when the first policy's engine is closed.

    Args:
        models: by policy; each has its own adapter of the model of `source`, now or before its
            first update.
        expected_logprobs: by policy, in place of those of its model.

    Raises:
        ConfigError: for `[engine]` settings that do not fit adapters of several policies.
    """
    if config.engine.update != "lora":
        raise ConfigError(
            'several policies share servers as adapters only: set engine.update = "lora"'
        )
    if config.engine.tree and len(models) > 1:
        raise ConfigError(
            "engine.tree sends the weights of one policy; set engine.weights to a directory that "
            "all servers see"
        )

    fleets: dict[str, Fleet] = {}
    for name, model in models.items():
        fleets[name] = make_checked_fleet(
            ServedModel(
                config=config,
                source=source,
                model=model,
                renderer=renderer,
                directory=run,
                adapter=adapter_config(model),
                expected_logprobs=(expected_logprobs or {}).get(name),
                placer=placer,
                policy=name,
                policies=len(models),
                beside=next(iter(fleets.values()), None),
            )
        )
    return fleets


def make_checked_fleet(served: ServedModel) -> Fleet:
    """Make a fleet for a run; raise `ConfigError` where its servers are of a kind that its settings
    exclude."""
    fleet = make_fleet(served)
    _check_kinds(served.config, {member.engine.kind for member in fleet.members})
    return fleet


def adapter_config(model: nn.Module) -> Callable[[], dict[str, Any]]:
    """Return a function that returns the adapter_config.json of a model, which gets its adapter
    later."""
    return cache(lambda: Adapter(model).peft_config())


def _check_kinds(config: RunConfig, kinds: Collection[str]) -> None:
    """Check the kinds of custom servers, which may be known only once they were queried."""
    engine = config.engine
    rollout = config.rollout

    takers = {
        "lora": ("adapters go to vLLM and SGLang", {"vLLM", "SGLang"}),
        "tensors": ("weights in requests go to SGLang", {"SGLang"}),
    }
    if engine.update in takers:
        what, fitting = takers[engine.update]
        others = sorted(set(kinds) - fitting)
        if others:
            raise ConfigError(
                f'engine.update = "{engine.update}": {what} only, but {others[0]} answers at '
                "engine.urls"
            )

    key = rollout.truncated_by
    if config.train.steps and "SGLang" in kinds and key:
        value = getattr(rollout, key)
        raise ConfigError(
            f"rollout.{key} = {value}: {SGLANG_TRUNCATES} (SGLang answers at engine.urls)"
        )


def connect_fixed_servers(config: RunConfig, renderer: Any) -> Fleet:
    """Connect to the servers of `[engine]` and keep their weights."""
    engine = config.engine
    limit = config.limits.context
    return Fleet(
        make_clients(engine, engine.urls, renderer, limit),
        _fleet_settings(engine),
        listed=_listed_in_file(engine, renderer, limit),
    )


def make_clients(
    engine: EngineConfig,
    urls: Sequence[str],
    renderer: Any,
    context: int | None = None,
) -> list[RemoteEngine]:
    """Create a client for each URL, of the kind that `[engine]` names or that the server reports.

    Raises:
        ConfigError: without the extra `servers` or the API key.
    """
    return [run_sync(_make_client(engine, url, renderer, context)) for url in urls]


async def _make_client(
    engine: EngineConfig,
    url: str,
    renderer: Any,
    context: int | None,
) -> RemoteEngine:
    options: dict[str, Any] = {
        "renderer": renderer,
        "key_env": engine.key_env,
        "most": engine.concurrency,
        "in_flight": engine.in_flight,
    }
    if engine.kind == "chat":
        if engine.model is None:
            raise ConfigError("a chat endpoint needs the name of its model; set engine.model")
        return ChatEngine(url, engine.model, context=context, **options)

    kind = engine.kind
    if kind == "auto":
        kind = await kind_of(url, key_env=engine.key_env)
    return KINDS[kind](
        url,
        model=engine.model,
        context=context,
        missing_logprobs=engine.missing_logprobs,
        **options,
    )


def _listed_in_file(
    engine: EngineConfig, renderer: Any, context: int | None
) -> ListedServers | None:
    """Return the servers of `engine.urls_file`; None without one."""
    if engine.urls_file is None:
        return None
    return _listed(engine, renderer, context, engine.urls_file)


def _listed(engine: EngineConfig, renderer: Any, context: int | None, file: str) -> ListedServers:
    """Return the servers that join and leave by a file."""

    async def connect(url: str) -> RemoteEngine:
        return await _make_client(engine, url, renderer, context)

    return ListedServers(EngineList(file), connect)


def _tree(engine: EngineConfig, host: str = "127.0.0.1", **options: Any) -> Any:
    try:
        tree = plugins.load("transports", "tree")
    except ImportError as error:
        raise ConfigError(
            f"engine.tree needs {error.name}: pip install 'turnwright[serve]'"
        ) from None
    return tree(engine.group_host or host, **options)


def _weight_directories(served: ServedModel) -> Any:
    """Return what writes each policy's weights for the servers."""
    engine = served.config.engine
    quant = served.config.quant
    directory = Path(engine.weights or served.directory / "weights") / served.policy
    if quant.packed and served.weight.dtype == torch.float32:
        raise ConfigError(
            'quant.packed: servers compute packed weights in bfloat16; set model.dtype = "bfloat16"'
        )

    if served.adapter is not None:
        return AdapterDirectories(directory, served.adapter)
    if engine.kind == "llamacpp":
        return GgufDirectories(directory, served.source)
    quantization = quantization_config(served.model, quant) if quant.packed else None
    return ModelDirectories(directory, served.source, untie=served.untie, quantization=quantization)


def _check_heads(shape: Any) -> None:
    """Check the head size; vLLM 0.32 on a CPU starts with any and fails at the first call
    with an unsupported one."""
    width = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    if width not in CPU_HEADS:
        raise ConfigError(
            f"vLLM's CPU attention supports head sizes {', '.join(map(str, CPU_HEADS))}, and this "
            f"model has {width}: for a tiny model set model.heads so that hidden / heads is one of "
            'these (--model.heads 2 --model.kv-heads 2), or set engine.kind = "sglang"'
        )


def _check_split(shape: Any, gpus: int) -> None:
    """Check that attention heads can be shared by GPUs, which servers find out minutes later."""
    heads = int(shape.num_attention_heads)
    if heads % gpus:
        raise ConfigError(
            f"scale.ray_engine_gpus = {gpus}: the model has {heads} attention heads, which cannot "
            f"be split over {gpus} GPUs; choose a divisor"
        )


def _expected_scores(
    config: RunConfig, model: nn.Module, of_ranks: LogprobFunction | None
) -> LogprobFunction:
    """Return what computes the scores that servers must have.

    `of_ranks` does where each of several ranks has a part of the model.
    """
    if config.engine.kind != "llamacpp":
        return of_ranks or score_with_model(model)
    if of_ranks is not None:
        raise ConfigError(
            'engine.kind = "llamacpp" is for a trainer of one process; use "vllm" or "sglang" '
            "with several"
        )
    return likeliest_with_model(model)


def score_with_model(model: nn.Module) -> LogprobFunction:
    """Return a function that computes log p(ids[i] | ids[:i]) for i >= 1."""

    def score(ids: Sequence[int]) -> list[float]:
        logp_tv = _next_logprobs(model, ids)
        following_t = torch.tensor(list(ids)[1:], device=logp_tv.device)
        logp_t = logp_tv[:-1].gather(1, following_t[:, None])[:, 0]
        return [float(value) for value in logp_t]

    return score


def likeliest_with_model(model: nn.Module) -> LogprobFunction:
    """Return a function that computes the likeliest next ids and their logprobs as
    `LlamaCppEngine.score` returns them."""

    def score(ids: Sequence[int]) -> list[float]:
        top = _next_logprobs(model, ids)[-1].topk(LIKELIEST)
        rows = sorted(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        return [float(value) for row in rows for value in row]

    return score


def _next_logprobs(model: nn.Module, ids: Sequence[int]) -> torch.Tensor:
    """Return the model's log-probabilities (T, vocabulary) after each of T ids, at temperature
    1 with nothing banned."""
    ids_bt = torch.tensor([list(ids)], device=next(model.parameters()).device)
    with torch.no_grad():
        logits_tv: torch.Tensor = model(input_ids=ids_bt, use_cache=False).logits[0]
        return logits_tv.float().log_softmax(-1)
