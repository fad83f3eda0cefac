"""The section `[engine]` of a run: what samples, this process or servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from turnwise.config.needs import Needs, NonNegativeInt, PathKind, PositiveFloat, PositiveInt, each

EngineKind = Literal["local", "auto", "vllm", "sglang", "llamacpp", "chat"]
MissingLogprobs = Literal["error", "mask", "recompute"]
UpdatePath = Literal["disk", "group", "tensors", "lora"]
GroupBackend = Literal["auto", "gloo", "nccl"]
OF_SERVERS = Needs("engine.kind = auto | vllm | sglang | llamacpp | chat")
STARTED_HERE = Needs("engine.kind = vllm | sglang and engine.urls none")


def _url_error(url: str) -> str:
    return "" if url.startswith(("http://", "https://")) else f"{url!r} is no URL; write http://host:port"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What samples: this process, or vLLM, SGLang or llama.cpp servers, ids in and ids out."""

    kind: EngineKind = "local"
    """`local` samples in this process; `vllm`, `sglang` and `llamacpp` are servers, `auto` is what answers at `urls`; `chat` is
    any chat endpoint. `llamacpp` and `chat` are for evaluation alone: they take no new weights."""
    speculate: NonNegativeInt = 0
    """Most ids that are drafted behind each from what stood before, and verified in one pass; 0 drafts none. For `local`, and
    for `vllm` and `sglang` servers that are started here (SGLang on a GPU)."""
    urls: Annotated[tuple[str, ...], each(_url_error)] = ()
    """Where servers of the model run; with none, `servers` of them are started here and ended with the run."""
    servers: Annotated[PositiveInt, STARTED_HERE] = 1
    """How many are started where `urls` is empty."""
    home: Annotated[str | None, PathKind.DIRECTORY, STARTED_HERE] = None
    """The directory of `turnwise engines install`; none is its default."""
    model: Annotated[str | None, OF_SERVERS] = None
    """The name that servers know the model by; none asks them (a chat endpoint has to be told)."""
    key_env: Annotated[str | None, OF_SERVERS] = None
    """The environment variable that holds the servers' API key."""
    missing_logprobs: Annotated[MissingLogprobs, OF_SERVERS] = "error"
    """What becomes of ids for which a server gives no logprob: an error; untrained; or trained against the trainer's own."""
    weights: Annotated[str | None, PathKind.DIRECTORY, OF_SERVERS, Needs("engine.update = disk | lora")] = None
    """Directory through which new weights go out, seen by servers under the same path; none is `weights` in the run's own."""
    colocate: bool = False
    """Engine and trainer share a device and take turns: the engine gives its memory back while the trainer trains."""
    update: UpdatePath = "disk"
    """How new weights reach servers: `disk`, a directory that they read; `group`, a process group in which they are sent;
    `tensors`, the bodies of requests, to SGLang; `lora`, the adapter that is trained (`[lora]`) alone, on the disk, beside the
    model that servers (vLLM, SGLang) have."""
    group_backend: Annotated[GroupBackend, Needs("engine.update = group")] = "auto"
    """What a process group sends by: `auto` is `nccl` where the model trains on a GPU of its own, and `gloo` elsewhere."""
    group_host: Annotated[str | None, Needs("engine.update = group")] = None
    """Address under which servers reach this process for a group; none finds the one on the way to each of them."""
    group_s: Annotated[PositiveFloat, Needs("engine.update = group | tensors")] = 600.0
    """How long a server may take to join a group, and for each bucket of weights, also one in a request."""
    concurrency: Annotated[PositiveInt, OF_SERVERS] = 256
    """Most calls at a time per server; others wait in line."""
    patience_s: Annotated[PositiveFloat, OF_SERVERS] = 300.0
    """How long a call waits for any server to come back before it is an error."""
    start_s: Annotated[PositiveFloat, STARTED_HERE] = 600.0
    """How long a server that is started here may take to answer."""
    tolerance: Annotated[PositiveFloat | None, OF_SERVERS] = None
    """Most |logprob of server - of trainer| of known ids after new weights, nats; none is 1e-3 in float32, 0.5 in bfloat16."""


def truncation_key(top_p: float, top_k: int) -> tuple[str, str] | None:
    """The key of `[rollout]` that cuts what is sampled, and why SGLang cannot be trained with then; None where none does."""
    key = "top_p" if top_p < 1.0 else "top_k" if top_k > 0 else None
    if key is None:
        return None
    return (
        key,
        "SGLang gives logprobs of the distribution before it is cut, so what was sampled would not be known; leave it out",
    )
