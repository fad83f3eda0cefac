"""Groups, engine calls and images as JSON: the one form in which they travel, over HTTP and through
Ray.

Each `..._row` writes what its `read_...` reads. An engine call sends the ids that it adds to the
last context of its session (`Contexts`), and no images, whose hashes are listed by `image_hashes`.

Values that JSON lacks are tagged: a tuple is `{"tuple": [...]}`. Nothing is unpickled.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

import orjson

from turnwright.engines import Generation, Request, Sampling, StopText
from turnwright.errors import UsageError
from turnwright.media import MediaStore
from turnwright.records.serialization import key_row, message_row, read_media, read_message
from turnwright.types import (
    ROUTES,
    EpisodeKey,
    ExpertRoutes,
    Image,
    ImageRef,
    MediaPlacement,
    Message,
    Task,
    VideoRef,
)
from turnwright.types.trajectory import is_json
from turnwright_cluster.base import GroupSpec, PlayedGroup

_TAG = "tuple"


def pack(value: Any, where: str) -> Any:
    """Return a value of a dataset as JSON that `unpack` reads back as it was; raise `UsageError`
    for other values."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if type(value) is float and isfinite(value):
        return value
    if type(value) is int and -(2**63) <= value < 2**63:
        return value
    if type(value) is tuple:
        return {_TAG: [pack(item, where) for item in value]}
    if type(value) is list:
        return [pack(item, where) for item in value]
    # A table with the tag alone would be read as a tuple.
    is_table = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    if is_table and set(value) != {_TAG}:
        return {key: pack(item, where) for key, item in value.items()}
    raise UsageError(
        f"{where} has a {type(value).__name__}, which workers cannot be sent; use text, numbers, "
        "lists and tables"
    )


def unpack(value: Any) -> Any:
    """Return the value that `pack` wrote."""
    if isinstance(value, dict):
        if set(value) == {_TAG}:
            return tuple(unpack(item) for item in value[_TAG])
        return {key: unpack(item) for key, item in value.items()}
    if isinstance(value, list):
        return [unpack(item) for item in value]
    return value


def _task_row(task: Task, store: MediaStore) -> dict[str, Any]:
    """Return a task as JSON; its images go to the store."""
    where = f"task {task.id!r}"
    messages = []
    for message in task.messages:
        content = message.content
        if not isinstance(content, str):
            content = tuple(part if isinstance(part, str) else store.put(part) for part in content)
        messages.append(message_row(replace(message, content=content)))

    other_columns = {key: value for key, value in task.other_columns.items() if is_json(value)}
    row = {
        "id": task.id,
        "messages": messages,
        "answer": pack(task.answer, where),
        "info": pack(dict(task.info), where),
        "other_columns": pack(other_columns, where),
        "env": task.env,
    }
    images = []
    for image in task.images:
        images.append(store.put(image).to_dict() | {"raw": isinstance(image, Image)})
    return row | {"images": images, "is_text": task.is_text}


def _read_task(row: Mapping[str, Any], image: Callable[[ImageRef], Image]) -> Task:
    messages: list[Message] = [read_message(message) for message in row["messages"]]

    images: list[Any] = []
    for part in row["images"]:
        ref = read_media(part)
        if part["raw"] and isinstance(ref, ImageRef):
            images.append(image(ref))
        else:
            images.append(ref)
    info = unpack(row["info"])
    answer = unpack(row["answer"])
    other_columns = unpack(row.get("other_columns") or {})
    if images:
        values = [media.value if isinstance(media, Image) else media for media in images]
        other_columns.setdefault("images", values)
    return Task(
        tuple(messages),
        answer,
        id=row["id"],
        images=images,
        info=info,
        env=row["env"],
        other_columns=other_columns,
        is_text=bool(row.get("is_text")),
    )


def spec_row(spec: GroupSpec, store: MediaStore) -> dict[str, Any]:
    """Return a group as JSON."""
    return {
        "env": spec.env,
        "task": _task_row(spec.task, store),
        "keys": [key_row(key) for key in spec.keys],
        "sampling": spec.sampling.settings(),
        "extras": sorted(spec.extras),
        "min_version": spec.min_version,
        "blank": spec.blank,
        "training": spec.training,
        "plays": [[key_row(key), plays] for key, plays in spec.plays.items()],
        "definitions": spec.definitions,
    }


def read_spec(row: Mapping[str, Any], image: Callable[[ImageRef], Image]) -> GroupSpec:
    """Return the group that `spec_row` wrote; `image` returns the raw image of a reference."""
    return GroupSpec(
        row["env"],
        _read_task(row["task"], image),
        tuple(EpisodeKey(*key) for key in row["keys"]),
        Sampling(**row["sampling"]),
        frozenset(row["extras"]),
        row["min_version"],
        row["blank"],
        row["training"],
        {EpisodeKey(*key): tuple(map(tuple, plays)) for key, plays in row["plays"]},
        row["definitions"],
    )


def group_row(group: PlayedGroup) -> dict[str, Any]:
    """Return the end of a group as JSON."""
    return {"group": list(group.key), "events": group.events}


def read_group(row: Mapping[str, Any]) -> PlayedGroup:
    """Return the end of a group that `group_row` wrote; ValueError or KeyError for anything
    else."""
    phase, step, task = row["group"]
    return PlayedGroup((str(phase), int(step), str(task)), int(row["events"]))


class Contexts:
    """Last context of each session, on both ends of a connection: a call sends only the ids that it
    adds."""

    def __init__(self) -> None:
        self._ids: dict[str, list[int]] = {}

    def added(self, session: str, ids: Sequence[int]) -> tuple[int, list[int]]:
        """Return how many ids of the last context a context begins with, all or none of them, and
        its other ids."""
        before = self._ids.get(session, [])
        now = list(ids)
        kept = len(before) if now[: len(before)] == before else 0
        self._ids[session] = now
        return kept, now[kept:]

    def complete(self, session: str, kept: int, ids: Sequence[int]) -> list[int]:
        """Return the context of which `added` returned the rest; ValueError when another one was
        sent before."""
        before = self._ids.get(session, [])
        if kept not in (0, len(before)):
            raise ValueError(f"{kept} ids of a context of {len(before)}")
        now = [*before[:kept], *map(int, ids)]
        self._ids[session] = now
        return list(now)


def request_row(
    request: Request, banned_ids: frozenset[int], contexts: Contexts, *, messages: bool
) -> dict[str, Any]:
    """Return an engine call as JSON, with `messages` for engines that read them, and with ids
    banned beside `banned_ids`."""
    kept, ids = contexts.added(request.session, request.ids)
    row: dict[str, Any] = {
        "kept": kept,
        "ids": ids,
        "max_tokens": request.max_tokens,
        "stop_ids": sorted(request.stop_ids),
        "seed": request.seed,
        "session": request.session,
        "group": request.group,
        "call": request.call,
        "sampling": request.sampling.settings(),
        "agent": request.agent,
        "media": [
            [block.media.to_dict(), block.start, block.length, block.grid, block.compact]
            for block in request.media
        ],
        "extras": sorted(request.extras),
        "routes_from": request.routes_from,
        "min_version": request.min_version,
        "reply_position": request.reply_position,
        "messages": [message_row(message) for message in request.messages] if messages else [],
    }
    if request.stop_text is not None:
        row["stop"] = list(request.stop_text.texts)
    if request.banned_ids != banned_ids:
        row["banned"] = sorted(request.banned_ids)
    if request.alternatives:
        row["alternatives"] = request.alternatives
    return row


def read_request(
    row: Mapping[str, Any],
    decode: Callable[[Sequence[int]], str],
    banned_ids: frozenset[int],
    contexts: Contexts,
) -> Request:
    """Return the engine call that `request_row` wrote; KeyError, TypeError or ValueError for
    anything else."""
    ids = contexts.complete(str(row["session"]), int(row["kept"]), row["ids"])
    position = int(row["reply_position"])
    stop = StopText(row["stop"], decode) if "stop" in row else None
    if stop is not None and position:
        stop = stop.continued_after(ids[len(ids) - position :])
    media = [
        MediaPlacement(read_media(ref), start, length, tuple(map(tuple, grid)), tuple(compact))
        for ref, start, length, grid, compact in row["media"]
    ]
    return Request(
        ids,
        int(row["max_tokens"]),
        frozenset(row["stop_ids"]),
        int(row["seed"]),
        str(row["session"]),
        str(row["group"]),
        int(row["call"]),
        Sampling(**row["sampling"]),
        str(row["agent"]),
        media,
        [read_message(message) for message in row["messages"]],
        frozenset(row["banned"]) if "banned" in row else banned_ids,
        frozenset(row["extras"]),
        int(row["routes_from"]),
        min_version=int(row["min_version"]),
        stop_text=stop,
        reply_position=position,
        alternatives=int(row.get("alternatives", 0)),
    )


def generation_row(generation: Generation) -> dict[str, Any]:
    """Return what an engine sampled as JSON."""
    row: dict[str, Any] = {
        "ids": list(generation.ids),
        "logprobs": list(generation.logprobs),
        "finish": generation.finish,
        "version": generation.version,
        "cached": generation.cached_tokens,
        "missing": generation.missing_logprobs,
        "drafts": [generation.drafted, generation.accepted],
        "later": [list(pair) for pair in generation.later_versions],
        "cache_version": generation.cache_version,
        "fixed": generation.fixed,
    }
    if generation.alternatives:
        row["alternatives"] = generation.alternatives
    if ROUTES in generation.extras:
        start, array = generation.extras[ROUTES]
        routes = ExpertRoutes.of(array)
        row["routes"] = [
            start,
            base64.b64encode(routes.data).decode(),
            routes.layers,
            routes.k,
            routes.width,
        ]
    return row


def read_generation(row: Mapping[str, Any]) -> Generation:
    """Return the generation that `generation_row` wrote."""
    extras = {}
    if "routes" in row:
        start, data, layers, k, width = row["routes"]
        extras[ROUTES] = (start, ExpertRoutes(base64.b64decode(data), layers, k, width))
    return Generation(
        row["ids"],
        row["logprobs"],
        row["finish"],
        row["version"],
        row["cached"],
        extras,
        row["missing"],
        row["drafts"][0],
        row["drafts"][1],
        [(first, version) for first, version in row["later"]],
        row["cache_version"],
        row["fixed"],
        [[(id_, logprob) for id_, logprob in of_id] for of_id in row.get("alternatives", ())],
    )


def dumps(value: Any) -> bytes:
    """Return JSON; the values are those of this module."""
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)


def image_hashes(value: Any) -> Iterator[str]:
    """Yield the hash of each image that JSON refers to."""
    if isinstance(value, dict):
        if value.get("type") == "image" and isinstance(value.get("image"), str):
            yield value["image"]
        for item in value.values():
            yield from image_hashes(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from image_hashes(item)


def placed_hashes(request: Request) -> Iterator[str]:
    """Yield the hash of each image of an engine call."""
    for placement in request.media:
        media = placement.media
        if isinstance(media, VideoRef):
            for frame in media.frames:
                yield frame.sha256
        else:
            yield media.sha256
