"""Request bodies of vLLM's and SGLang's clients, as far as they are read. Unknown keys are ignored,
unless they request another sampling distribution or response form (`NEUTRAL`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

BAN = -50.0
"""Biases down from here ban an id; others are refused, since logprobs would not be of the
sampling distribution."""
Id = Annotated[int, Field(ge=0, lt=2**31)]
Ids = Annotated[list[Id], Field(fail_fast=True)]
"""Ids; the first that is none ends their validation, since a fault costs a thousand times an id."""
Name = Annotated[str, Field(max_length=200)]
Version = Name | int
StopText = Annotated[str, Field(max_length=1000)]
Size = Annotated[int, Field(ge=0, lt=2**48)]
Words = Annotated[list[Annotated[str, Field(max_length=300)]], Field(fail_fast=True)]
Shapes = Annotated[list[Annotated[list[Size], Field(fail_fast=True)]], Field(fail_fast=True)]
MAX_TOP = 1000
"""Maximum number of most likely ids reported at one position."""
PICTURES = Field(max_length=1000, fail_fast=True)
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("presence_penalty", "frequency_penalty", "min_tokens", "min_new_tokens"), (0,)
    ),
    **dict.fromkeys(("repetition_penalty", "n", "best_of"), (1,)),
    **dict.fromkeys(("use_beam_search", "stream", "echo"), (False,)),
    **dict.fromkeys(
        ("bad_words", "image_data", "video_data", "audio_data", "content_parts"), ([],)
    ),
    "features": ({}, []),
    "allowed_token_ids": (),
    "lora_path": (),
}
"""Values with no effect, in addition to null; others are refused."""


class Body(BaseModel):
    """JSON object."""

    model_config = ConfigDict(
        strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=()
    )

    def unsupported(self) -> Iterator[str]:
        """Yield unsupported settings, including those of nested objects."""
        for key, value in (self.model_extra or {}).items():
            if key in NEUTRAL and value is not None and value not in NEUTRAL[key]:
                yield f"{key} = {value!r:.80}: not supported by this server"
        for name in type(self).model_fields:
            inner = getattr(self, name)
            if isinstance(inner, Body):
                yield from inner.unsupported()

    def drop_unknown(self) -> None:
        """Drop keys that are ignored, those of nested objects too, so that they are not kept
        until the reply is there."""
        if self.model_extra:
            self.model_extra.clear()
        for name in type(self).model_fields:
            inner = getattr(self, name)
            if isinstance(inner, Body):
                inner.drop_unknown()


class Settings(Body):
    """Sampling settings."""

    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """Maximum number of sampled ids; 0 only scores the prompt."""
    max_new_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    seed: Annotated[int, Field(gt=-(2**64), lt=2**64)] | None = None
    sampling_seed: Annotated[int, Field(gt=-(2**64), lt=2**64)] | None = None
    reply_position: Annotated[int, Field(ge=0)] = 0
    """Number of ids at the end of the prompt that earlier requests sampled for this reply;
    draws continue there."""
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Id], Field(max_length=10_000, fail_fast=True)] | None = None
    logit_bias: dict[Id, Annotated[float, Field(le=BAN)]] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=1000, fail_fast=True)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None
    """Number of most likely ids to report with each sampled id."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None
    """Number of most likely ids to report at each id of the prompt, besides that id."""
    score_temperature: Annotated[float, Field(gt=0)] | None = None
    """Temperature of the prompt's logprobs; 1 is the model's distribution."""
    score_banned_ids: Annotated[list[Id], Field(max_length=100_000, fail_fast=True)] | None = None
    """Ids that the prompt's logprobs exclude."""


class Completion(Settings):
    """Body of `/v1/completions`."""

    prompt: Ids
    n: Annotated[int, Field(ge=1, le=64)] | None = None
    model: Name | None = None


class PicturePart(Body):
    """Image among the ids of `/inference/v1/generate`."""

    type: Annotated[str, Field(pattern="^image_url$")]
    url: str


class TokensIn(Body):
    """Body of `/inference/v1/generate`."""

    token_ids: Ids
    content_parts: Annotated[list[PicturePart], PICTURES] = []
    sampling_params: Settings
    model: Name | None = None
    request_id: Name | None = None

    def take_urls(self) -> list[str]:
        """Return the images and drop them, so that they are not kept until the reply is there."""
        urls = [part.url for part in self.content_parts]
        self.content_parts = []
        return urls


class Generate(Body):
    """Body of SGLang's `/generate`."""

    input_ids: Ids
    image_data: Annotated[list[str], PICTURES] | str | None = None
    """Data URLs, in the order of their placeholders."""
    return_routed_experts: bool = False
    routed_experts_start_len: Annotated[int, Field(ge=0)] = 0
    sampling_params: Settings | None = None
    rid: Name | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: Annotated[int, Field(ge=0, le=MAX_TOP)] = 0
    """Number of most likely ids to report with each id, sampled ones and those of a scored
    prompt."""

    def take_urls(self) -> list[str]:
        """Return the images and drop them, so that they are not kept until the reply is there."""
        images = self.image_data
        self.image_data = None
        return [images] if isinstance(images, str) else images or []


class Aborts(Body):
    """Body of vLLM's abort."""

    request_ids: list[Name] = []


class Abort(Body):
    """Body of SGLang's abort, of one request or all."""

    rid: Name | None = None
    abort_all: bool = False

    @model_validator(mode="after")
    def _check_target(self) -> Abort:
        if self.rid is None and not self.abort_all:
            raise ValueError("rid or abort_all is missing")
        return self


class Pause(Body):
    """Body of a pause."""

    mode: Name | None = None


class Kwargs(Body):
    """Arguments of `reload_weights`."""

    weights_path: Annotated[str, Field(min_length=1, max_length=4096)]


class Reload(Body):
    """Body of vLLM's `/collective_rpc`."""

    method: Annotated[str, Field(pattern="^reload_weights$")]
    kwargs: Kwargs


class FromDisk(Body):
    """Body of SGLang's `/update_weights_from_disk`."""

    model_path: Annotated[str, Field(min_length=1, max_length=4096)]
    weight_version: Version | None = None


class Rename(Body):
    """New name for the weights."""

    new_version: Version


class Tags(Body):
    """Parts of memory, as SGLang names them."""

    tags: Annotated[list[Name], Field(max_length=10)] | None = None


class Meeting(Body):
    """Rendezvous address of a process group."""

    master_address: Name
    master_port: Annotated[int, Field(ge=1, lt=2**16)]
    rank_offset: Annotated[int, Field(ge=1, lt=2**16)]
    world_size: Annotated[int, Field(ge=2, le=2**16)]
    group_name: Name | None = None
    backend: Name | None = None


class Init(Body):
    """Rendezvous in vLLM's form."""

    init_info: Meeting


class Bucket(Body):
    """Description of the next tensors in SGLang's form."""

    names: Words
    dtypes: Words
    shapes: Shapes
    group_name: Name | None = None
    weight_version: Version | None = None

    @model_validator(mode="after")
    def _check_lengths(self) -> Bucket:
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise ValueError("names, dtypes and shapes differ in length")
        return self


class BucketInfo(Body):
    """Description of the next tensors in vLLM's form."""

    names: Words
    dtype_names: Words
    shapes: Shapes

    @model_validator(mode="after")
    def _check_lengths(self) -> BucketInfo:
        if not len(self.names) == len(self.dtype_names) == len(self.shapes):
            raise ValueError("names, dtype_names and shapes differ in length")
        return self


class Update(Body):
    """Body of vLLM's `/update_weights`."""

    update_info: BucketInfo


class Finish(Body):
    """Body of the end of a vLLM update."""

    weight_version: Version | None = None


class LeaveGroup(Body):
    """Name of a process group."""

    group_name: Name | None = None


class Tensors(Body):
    """Weights in an SGLang request: one text per rank, of which there is one."""

    serialized_named_tensors: Annotated[list[str], Field(min_length=1, max_length=1)]
    weight_version: Version | None = None
