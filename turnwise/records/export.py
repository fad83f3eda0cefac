"""A run as a table for other trainers: Parquet, which Hugging Face datasets load, or JSON lines.

One row is one trainable path of an episode (`Trajectory.samples`), so every sampled id has weight 1 in exactly one row. All
layouts carry ids and masks as they were sampled; `trl` and `verl` name them as those trainers do, and carry the conversation as
messages. Logprobs of ids that were not sampled are null, never 0. A table has only those fields of messages, and only those
columns of images, that its run uses: trainers take a column `images` for a run that sees, and templates a null for a value.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from turnwise.errors import TraceError, UsageError
from turnwise.records.run_dir import to_json
from turnwise.types import ImageRef, Message, Sample, SamplingDistribution, Trajectory, VideoRef

IMAGE = "<image>"
BATCH = 500
"""Rows that are held at a time."""
UNTRAINED = -100
"""The label of an id that carries no loss."""
_IMAGES = ("images", "messages_images")
_FIELDS = ("name", "tool_call_id", "reasoning_content", "tool_calls")


@dataclass(frozen=True, slots=True)
class ColumnLayout:
    """What the messages of a table have."""

    fields: frozenset[str]
    """Of `name`, `tool_call_id`, `reasoning_content` and `tool_calls`, those that some message has."""
    images: bool
    """Whether some message shows an image."""

    @classmethod
    def of(cls, trajectories: Iterable[Trajectory]) -> ColumnLayout:
        """The shape that these trajectories need."""
        fields: set[str] = set()
        images = False
        for trajectory in trajectories:
            for turn in trajectory.turns:
                for message in (*turn.messages, turn.message):
                    had = (message.name, message.tool_call_id, message.reasoning, message.tool_calls or None)
                    fields.update(name for name, value in zip(_FIELDS, had, strict=True) if value is not None)
                    images = images or bool(message.media)
        return cls(frozenset(fields), images)


def rows_of(
    trajectory: Trajectory, layout: str, media: Path | None = None, shape: ColumnLayout | None = None
) -> Iterator[dict[str, Any]]:
    """The rows of a trajectory.

    Args:
        layout: `samples`, `sft`, `trl` or `verl`.
        media: the folder of images, whose bytes come along; None leaves them out.
        shape: of the table; by default what this trajectory alone needs.
    """
    make, shape = LAYOUTS[layout], shape or ColumnLayout.of([trajectory])
    for number, (sample, turn) in enumerate(_paths(trajectory)):
        key = trajectory.key
        row: dict[str, Any] = {"phase": key.phase, "step": key.step, "task": key.task, "sample": key.sample, "path": number}
        row |= {"reward": sample.reward, "stop": str(trajectory.stop or ""), "weights": sample.weights}
        yield row | make(trajectory, sample, turn, media, shape)


def _paths(trajectory: Trajectory) -> Iterator[tuple[Sample, int]]:
    """Each sample with the last turn whose reply lies on its path."""
    samples = trajectory.samples()
    for leaf in trajectory.leaves():
        chain = {index for index, _ in trajectory.chain(leaf)}
        if not any(trajectory.spans[index].sampled for index in chain):
            continue
        turns = [number for number, turn in enumerate(trajectory.turns) if turn.spans and set(turn.spans) <= chain]
        yield next(samples), turns[-1] if turns else -1


def _samples(trajectory: Trajectory, sample: Sample, turn: int, media: Path | None, shape: ColumnLayout) -> dict[str, Any]:
    found = {"ids": sample.ids, "mask": sample.mask, "logprobs": sample.logprobs, "versions": sample.versions}
    return found | {"sampling": _sampling(sample)}


def _sft(trajectory: Trajectory, sample: Sample, turn: int, media: Path | None, shape: ColumnLayout) -> dict[str, Any]:
    labels = [one if weight else UNTRAINED for one, weight in zip(sample.ids, sample.weights, strict=True)]
    return {"input_ids": sample.ids, "labels": labels}


def _trl(trajectory: Trajectory, sample: Sample, turn: int, media: Path | None, shape: ColumnLayout) -> dict[str, Any]:
    prompt, completion = _talk(trajectory, turn)
    first = _prompt_length(sample)
    write = partial(_message, shape=shape, parts=shape.images)
    found: dict[str, Any] = {"prompt": [write(one) for one in prompt], "completion": [write(one) for one in completion]}
    found |= {"prompt_ids": sample.ids[:first], "completion_ids": sample.ids[first:], "completion_mask": sample.mask[first:]}
    found |= {"logprobs": sample.logprobs[first:], "sampling": _sampling(sample)}
    if shape.images:
        found |= {"messages": found["prompt"] + found["completion"]} | _both(prompt, completion, media)
    return found


def _verl(trajectory: Trajectory, sample: Sample, turn: int, media: Path | None, shape: ColumnLayout) -> dict[str, Any]:
    prompt, completion = _talk(trajectory, turn)
    first = _prompt_length(sample)
    write, task = partial(_message, shape=shape), trajectory.task
    answer = task.answer if isinstance(task.answer, str) or task.answer is None else to_json(task.answer).decode()
    found: dict[str, Any] = {"data_source": task.env or "turnwise", "prompt": [write(one) for one in prompt]}
    found |= {"ability": "agent", "reward_model": {"style": "rule", "ground_truth": answer}}
    found["extra_info"] = {"split": trajectory.key.phase, "index": trajectory.key.sample, "info": to_json(task.info).decode()}
    found |= {"messages": [write(one) for one in (*prompt, *completion)], "prompt_ids": sample.ids[:first]}
    found |= {
        "responses": sample.ids[first:],
        "response_mask": sample.mask[first:],
        "rollout_log_probs": sample.logprobs[first:],
        "sampling": _sampling(sample),
    }
    return found | (_both(prompt, completion, media) if shape.images else {})


LAYOUTS: dict[str, Callable[[Trajectory, Sample, int, Path | None, ColumnLayout], dict[str, Any]]] = {
    "samples": _samples,
    "sft": _sft,
    "trl": _trl,
    "verl": _verl,
}


def _sampling(sample: Sample) -> list[dict[str, Any]]:
    """The distributions of a row's logprobs, each with the positions `first` to `last` that it holds for."""
    held: list[tuple[SamplingDistribution, int, int]] = []
    for at, (one, sampled) in enumerate(zip(sample.samplings, sample.mask, strict=True)):
        if sampled and one is not None:
            if held and held[-1][0] == one:
                held[-1] = (one, held[-1][1], at)
            else:
                held.append((one, at, at))
    return [
        {"first": first, "last": last, "temperature": one.temperature, "top_p": one.top_p, "top_k": one.top_k}
        | {"banned_ids": sorted(one.banned_ids)}
        for one, first, last in held
    ]


def _prompt_length(sample: Sample) -> int:
    return sample.mask.index(1) if 1 in sample.mask else len(sample.mask)


def _talk(trajectory: Trajectory, turn: int) -> tuple[list[Message], list[Message]]:
    """The messages before the first reply of a turn's conversation, and those from it on."""
    talk = trajectory.conversation(turn)
    lineage = trajectory.turn_chain(turn)
    first = len(trajectory.turns[lineage[0]].messages) if lineage else len(talk)
    return talk[:first], talk[first:]


def _message(message: Message, *, shape: ColumnLayout, parts: bool = False) -> dict[str, Any]:
    """A message as a row; its content a list of `parts`, or a text in which each image is `<image>`."""
    given = (message.content,) if isinstance(message.content, str) else message.content
    if parts:
        content: Any = [_part(one) for part in given for one in _frames(part)]
    else:
        content = "".join(part if isinstance(part, str) else IMAGE * len(list(_frames(part))) for part in given)
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _arguments(call.arguments)}}
        for call in message.tool_calls
    ]
    has = (message.name, message.tool_call_id, message.reasoning, calls or None)
    more = {name: value for name, value in zip(_FIELDS, has, strict=True) if name in shape.fields}
    return {"role": message.role, "content": content} | more


def _frames(part: Any) -> Iterator[Any]:
    """A part of a content, of a video its frames."""
    yield from part.frames if isinstance(part, VideoRef) else (part,)


def _part(part: Any) -> dict[str, Any]:
    return {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "text": None}


def _arguments(value: Any) -> str:
    return value if isinstance(value, str) else to_json(value).decode()


def _both(prompt: Sequence[Message], completion: Sequence[Message], media: Path | None) -> dict[str, Any]:
    """The images of a prompt, as many as trainers expect to be marked in it, and those of the whole conversation."""
    return {"images": _images(prompt, media), "messages_images": _images([*prompt, *completion], media)}


def _images(messages: Iterable[Message], media: Path | None) -> list[dict[str, Any]]:
    found = []
    for message in messages:
        for part in () if isinstance(message.content, str) else message.content:
            for frame in (one for one in _frames(part) if isinstance(one, ImageRef)):
                name = f"{frame.sha256}.png"
                file = media / name if media is not None else None
                found.append({"bytes": file.read_bytes() if file is not None and file.is_file() else None, "path": name})
    return found


def write(rows: Iterable[Mapping[str, Any]], layout: str, out: Path, shape: ColumnLayout) -> int:
    """Write rows to a `.parquet` or `.jsonl` file; gives their number.

    Args:
        shape: as the rows were made with.

    Raises:
        UsageError: for another ending, or without pyarrow.
        TraceError: when the file cannot be written; what there was of it is removed.
    """
    if out.suffix not in (".parquet", ".jsonl"):
        raise UsageError(f"{out}: must end in .parquet or .jsonl")
    temporary = out.with_name(f".{out.name}.writing")
    try:
        count = (_parquet if out.suffix == ".parquet" else _json_lines)(rows, layout, temporary, shape)
        temporary.replace(out)
    except OSError as error:
        raise TraceError(f"{out}: cannot be written ({error.strerror or error}); make room, or name another place") from error
    finally:
        temporary.unlink(missing_ok=True)
    return count


def _json_lines(rows: Iterable[Mapping[str, Any]], layout: str, out: Path, shape: ColumnLayout) -> int:
    count = 0
    with out.open("wb") as file:
        for row in rows:
            paths = {name: [{"path": one["path"]} for one in row[name]] for name in _IMAGES if name in row}
            file.write(to_json({**row, **paths}) + b"\n")
            count += 1
    return count


def _parquet(rows: Iterable[Mapping[str, Any]], layout: str, out: Path, shape: ColumnLayout) -> int:
    try:
        arrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        raise UsageError("Parquet needs pyarrow: pip install 'turnwise[export]', or name a file that ends in .jsonl") from error
    schema = _schema(arrow, layout, shape)
    count = 0
    waiting = iter(rows)
    with parquet.ParquetWriter(out, schema, compression="zstd") as writer:
        while part := list(islice(waiting, BATCH)):
            writer.write_table(arrow.Table.from_pylist(part, schema=schema))
            count += len(part)
    return count


def _schema(arrow: Any, layout: str, shape: ColumnLayout) -> Any:
    text, ids, floats = arrow.string(), arrow.list_(arrow.int64()), arrow.list_(arrow.float64())
    mask = arrow.list_(arrow.int8())
    function = arrow.struct([("name", text), ("arguments", text)])
    calls = arrow.list_(arrow.struct([("id", text), ("type", text), ("function", function)]))
    more = [(name, calls if name == "tool_calls" else text) for name in _FIELDS if name in shape.fields]
    parts = arrow.list_(arrow.struct([("type", text), ("text", text)]))
    content = parts if layout == "trl" and shape.images else text
    talk = arrow.list_(arrow.struct([("role", text), ("content", content), *more]))
    pictures = arrow.list_(arrow.struct([("bytes", arrow.binary()), ("path", text)]))
    images = [(name, pictures) for name in _IMAGES] if shape.images else []
    images += [("messages", talk)] if images and layout == "trl" else []
    head = [("phase", text), ("step", arrow.int64()), ("task", text), ("sample", arrow.int64()), ("path", arrow.int64())]
    head += [("reward", arrow.float64()), ("stop", text), ("weights", floats)]
    number, whole = arrow.float64(), arrow.int64()
    drawn = [("first", whole), ("last", whole), ("temperature", number), ("top_p", number), ("top_k", whole)]
    sampling = ("sampling", arrow.list_(arrow.struct([*drawn, ("banned_ids", ids)])))
    columns: dict[str, Sequence[tuple[str, Any]]] = {
        "samples": [("ids", ids), ("mask", mask), ("logprobs", floats), ("versions", ids), sampling],
        "sft": [("input_ids", ids), ("labels", ids)],
        "trl": [
            *[("prompt", talk), ("completion", talk), ("prompt_ids", ids), ("completion_ids", ids)],
            *[("completion_mask", mask), ("logprobs", floats), sampling, *images],
        ],
        "verl": [
            *[("data_source", text), ("prompt", talk), ("ability", text)],
            ("reward_model", arrow.struct([("style", text), ("ground_truth", text)])),
            ("extra_info", arrow.struct([("split", text), ("index", arrow.int64()), ("info", text)])),
            *[("messages", talk), ("prompt_ids", ids), ("responses", ids), ("response_mask", mask)],
            *[("rollout_log_probs", floats), sampling, *images],
        ],
    }
    return arrow.schema([*head, *columns[layout]])
