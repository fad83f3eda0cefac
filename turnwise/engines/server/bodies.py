"""The bodies of requests: what vLLM's and SGLang's clients send, as far as it is read. Keys that no field names are let be,
unless they ask for another distribution or another form of answer than there is (`NEUTRAL`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

BAN = -50.0
"""Biases from here down ban an id; others are refused, since logprobs would be of another distribution than they say."""
Id = Annotated[int, Field(ge=0, lt=2**31)]
Name = Annotated[str, Field(max_length=200)]
Version = Name | int
Size = Annotated[int, Field(ge=0, lt=2**48)]
Words = list[Annotated[str, Field(max_length=300)]]
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "n": (1,),
    "best_of": (1,),
    "min_tokens": (0,),
    "min_new_tokens": (0,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "use_beam_search": (False,),
    "stream": (False,),
    "echo": (False,),
    "lora_path": (),
    "image_data": ([],),
    "features": ({}, []),
    "content_parts": ([],),
}
"""Values that ask for nothing, beside null; others are refused."""


class Body(BaseModel):
    """A JSON object."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    def beyond(self) -> Iterator[str]:
        """What it asks for and cannot have, with the objects inside it."""
        for key, value in (self.model_extra or {}).items():
            if key in NEUTRAL and value is not None and value not in NEUTRAL[key]:
                yield f"{key} = {value!r:.80}: this server does without"
        for name in type(self).model_fields:
            inner = getattr(self, name)
            if isinstance(inner, Body):
                yield from inner.beyond()


class Settings(Body):
    """How to sample."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_new_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    seed: Annotated[int, Field(gt=-(2**64), lt=2**64)] | None = None
    sampling_seed: Annotated[int, Field(gt=-(2**64), lt=2**64)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Id], Field(max_length=10_000)] | None = None
    logit_bias: dict[Id, Annotated[float, Field(le=BAN)]] | None = None
    stop: Annotated[str, Field(max_length=1000)] | list[Annotated[str, Field(max_length=1000)]] | None = None


class Completion(Settings):
    """`/v1/completions`."""

    prompt: list[Id]
    model: Name | None = None
    prompt_logprobs: int | None = None


class TokensIn(Body):
    """`/inference/v1/generate`."""

    token_ids: list[Id]
    sampling_params: Settings
    model: Name | None = None
    request_id: Name | None = None


class Generate(Body):
    """SGLang's `/generate`."""

    input_ids: list[Id]
    sampling_params: Settings | None = None
    rid: Name | None = None
    logprob_start_len: int | None = None


class Aborts(Body):
    """vLLM's aborts."""

    request_ids: list[Name] = []


class Abort(Body):
    """SGLang's abort: of one, or of all."""

    rid: Name | None = None
    abort_all: bool = False

    @model_validator(mode="after")
    def _of_something(self) -> Abort:
        if self.rid is None and not self.abort_all:
            raise ValueError("rid or abort_all is missing")
        return self


class Pause(Body):
    """How to stop."""

    mode: Annotated[str, Field(pattern="^(abort|wait|keep|retract|in_place)$")] | None = None


class Kwargs(Body):
    """Of `reload_weights`."""

    weights_path: Annotated[str, Field(min_length=1, max_length=4096)]


class Reload(Body):
    """vLLM's `/collective_rpc`."""

    method: Annotated[str, Field(pattern="^reload_weights$")]
    kwargs: Kwargs


class FromDisk(Body):
    """SGLang's `/update_weights_from_disk`."""

    model_path: Annotated[str, Field(min_length=1, max_length=4096)]
    weight_version: Version | None = None


class Rename(Body):
    """Another name for the weights."""

    new_version: Version


class Tags(Body):
    """SGLang's parts of memory."""

    tags: Annotated[list[Name], Field(max_length=10)] | None = None


class Meeting(Body):
    """Where a trainer waits for the ranks of a process group."""

    master_address: Name
    master_port: Annotated[int, Field(ge=1, lt=2**16)]
    rank_offset: Annotated[int, Field(ge=1, lt=2**16)]
    world_size: Annotated[int, Field(ge=2, le=2**16)]
    group_name: Name | None = None
    backend: Name | None = None


class Init(Body):
    """vLLM's form of a meeting."""

    init_info: Meeting


class Bucket(Body):
    """SGLang's weights that are about to be sent."""

    names: Words
    dtypes: Words
    shapes: list[list[Size]]
    group_name: Name | None = None
    weight_version: Version | None = None

    @model_validator(mode="after")
    def _one_each(self) -> Bucket:
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise ValueError("names, dtypes and shapes are not as many")
        return self


class BucketInfo(Body):
    """vLLM's, with names of its own."""

    names: Words
    dtype_names: Words
    shapes: list[list[Size]]

    @model_validator(mode="after")
    def _one_each(self) -> BucketInfo:
        if not len(self.names) == len(self.dtype_names) == len(self.shapes):
            raise ValueError("names, dtype_names and shapes are not as many")
        return self


class Update(Body):
    """vLLM's `/update_weights`."""

    update_info: BucketInfo


class Finish(Body):
    """vLLM's end of an update."""

    weight_version: Version | None = None


class Group(Body):
    """A process group by its name."""

    group_name: Name | None = None


class Tensors(Body):
    """SGLang's weights in a request: one text for each rank, of which there is one."""

    serialized_named_tensors: Annotated[list[str], Field(min_length=1, max_length=1)]
    weight_version: Version | None = None
