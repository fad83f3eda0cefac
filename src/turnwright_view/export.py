"""Export of a run as a table for other trainers: Parquet, which Hugging Face
datasets load, or JSON lines.

One row is one trainable path of an episode (`Trajectory.samples`), so every sampled id has weight 1
in exactly one row. All layouts have ids and masks as sampled; `trl` and `verl` use the names of
those trainers and add the conversation as messages. `dpo` has pairs of episodes of a task in place
of paths. Logprobs of ids that were not sampled are null, never 0. A table has only the message
fields and image columns that its run uses: trainers treat a column `images` as a vision run, and
templates a null as a value.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from turnwright.errors import TraceError, UsageError
from turnwright.records.run_dir import to_json
from turnwright.types import Group, ImageRef, Message, Sample, Trajectory, VideoRef

IMAGE = "<image>"
BATCH_ROWS = 500  # rows held in memory at a time
UNTRAINED = -100  # label of an id without loss
_IMAGES = ("images", "messages_images")
_FIELDS = ("name", "tool_call_id", "reasoning_content", "tool_calls")


@dataclass(frozen=True, slots=True)
class ColumnLayout:
    """Message fields and image columns of a table."""

    # Those of `name`, `tool_call_id`, `reasoning_content` and `tool_calls` that some message has.
    fields: frozenset[str]
    images: bool  # whether some message has an image
    min_p: bool = False  # whether some reply was sampled with min-p

    @classmethod
    def empty(cls) -> ColumnLayout:
        """Return the layout of no trajectories."""
        return cls(frozenset(), images=False)

    def __or__(self, other: ColumnLayout) -> ColumnLayout:
        """Return the layout that has what either has."""
        return ColumnLayout(
            self.fields | other.fields, self.images or other.images, self.min_p or other.min_p
        )

    @classmethod
    def of(cls, trajectories: Iterable[Trajectory]) -> ColumnLayout:
        """Return the layout that these trajectories need."""
        fields: set[str] = set()
        images = min_p = False
        for trajectory in trajectories:
            min_p = min_p or any(
                span.sampling is not None and span.sampling.min_p for span in trajectory.spans
            )
            for turn in trajectory.turns:
                for message in (*turn.messages, turn.message):
                    values = (
                        message.name,
                        message.tool_call_id,
                        message.reasoning,
                        message.tool_calls or None,
                    )
                    fields.update(
                        name
                        for name, value in zip(_FIELDS, values, strict=True)
                        if value is not None
                    )
                    images = images or bool(message.media)
        return cls(frozenset(fields), images, min_p)


def rows_of(
    trajectory: Trajectory,
    layout: str,
    media: Path | None = None,
    shape: ColumnLayout | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a trajectory in the layout `samples`, `sft`, `trl` or `verl`.

    `media` is the directory of images to include; None omits their bytes. `shape` is by default
    what this trajectory needs.
    """
    shape = shape or ColumnLayout.of([trajectory])
    for number, (sample, turn) in enumerate(_paths(trajectory)):
        key = trajectory.key
        row: dict[str, Any] = {
            "phase": key.phase,
            "step": key.step,
            "task": key.task,
            "sample": key.sample,
            "path": number,
        }
        row |= {
            "reward": sample.reward,
            "stop": str(trajectory.stop or ""),
            "weights": sample.weights,
        }
        yield row | _columns(layout, trajectory, sample, turn, media, shape)


def pair_rows(group: Group, shape: ColumnLayout) -> Iterator[dict[str, Any]]:
    """Yield pairs of a group's episodes for preference training, the layout `dpo`: the best with
    the worst, the second best with the second worst, while their rewards differ. A pair has one
    opening prompt; of each episode it has the last path.

    Raises `UsageError` for episodes with images, for which the layout has no column.
    """
    if shape.images:
        raise UsageError("the columns dpo have no images; choose trl or verl")
    usable = [
        t
        for t in group.trajectories
        if t.reward is not None and t.turns and not (t.stop and t.stop.failed)
    ]
    ranked = sorted(usable, key=lambda t: (-(t.reward or 0.0), t.key.sample))
    for chosen, rejected in zip(ranked, reversed(ranked), strict=True):
        if (chosen.reward or 0.0) <= (rejected.reward or 0.0):
            return
        (prompt, prompt_ids, good), (other, _, bad) = (
            _last_path(chosen, shape),
            _last_path(rejected, shape),
        )
        if prompt == other:
            row = {"phase": chosen.key.phase, "step": chosen.key.step, "task": chosen.key.task}
            row |= {"chosen_reward": chosen.reward, "rejected_reward": rejected.reward}
            row |= {
                "prompt": prompt,
                "chosen": good[0],
                "rejected": bad[0],
                "prompt_ids": prompt_ids,
            }
            yield row | {
                "chosen_ids": good[1],
                "chosen_mask": good[2],
                "rejected_ids": bad[1],
                "rejected_mask": bad[2],
            }


def _last_path(
    trajectory: Trajectory, shape: ColumnLayout
) -> tuple[Any, list[int], tuple[Any, list[int], list[int]]]:
    """Return the opening messages and ids of an episode's last path, and the rest of it:
    messages, ids and mask."""
    sample, turn = list(_paths(trajectory))[-1]
    row = _columns("trl", trajectory, sample, turn, None, shape)
    return (
        row["prompt"],
        row["prompt_ids"],
        (row["completion"], row["completion_ids"], row["completion_mask"]),
    )


def _paths(trajectory: Trajectory) -> Iterator[tuple[Sample, int]]:
    """Yield each sample with the last turn whose reply is on its path."""
    for sample in trajectory.samples():
        spans = {span for span, _ in sample.slots}
        turns = [
            number
            for number, turn in enumerate(trajectory.turns)
            if turn.spans and spans.issuperset(turn.spans)
        ]
        yield sample, turns[-1] if turns else -1


def _columns(
    layout: str,
    trajectory: Trajectory,
    sample: Sample,
    turn: int,
    media: Path | None,
    shape: ColumnLayout,
) -> dict[str, Any]:
    """Return the columns of a layout."""
    if layout == "sft":
        labels = [
            one if weight else UNTRAINED
            for one, weight in zip(sample.ids, sample.weights, strict=True)
        ]
        spoken = [_message(one, shape=shape, parts=False) for one in trajectory.conversation(turn)]
        return {"input_ids": sample.ids, "labels": labels, "messages": spoken}
    sampling = {"sampling": _sampling(sample, shape)}
    if layout == "samples":
        columns = {
            "ids": sample.ids,
            "mask": sample.mask,
            "logprobs": sample.logprobs,
            "versions": sample.versions,
        }
        return columns | sampling
    conversation, turns = trajectory.conversation(turn), trajectory.turn_chain(turn)
    # Messages before the first reply.
    opened = len(trajectory.turns[turns[0]].messages) if turns else len(conversation)
    prompt, completion = conversation[:opened], conversation[opened:]
    first = sample.mask.index(1) if 1 in sample.mask else len(sample.mask)
    prompt_ids, ids, mask, logprobs = (
        sample.ids[:first],
        sample.ids[first:],
        sample.mask[first:],
        sample.logprobs[first:],
    )
    write = partial(_message, shape=shape, parts=layout == "trl" and shape.images)
    opening, rest = [write(one) for one in prompt], [write(one) for one in completion]
    images: dict[str, Any] = {}
    # those of the prompt, as many as trainers expect markers in it, and of
    # the complete conversation
    if shape.images:
        images = {
            "images": _images(prompt, media),
            "messages_images": _images([*prompt, *completion], media),
        }
    if layout == "trl":
        columns = {
            "prompt": opening,
            "completion": rest,
            "prompt_ids": prompt_ids,
            "completion_ids": ids,
        }
        columns |= {"completion_mask": mask, "logprobs": logprobs} | sampling
        return columns | ({"messages": opening + rest} if images else {}) | images
    if layout != "verl":
        raise KeyError(layout)
    task = trajectory.task
    answer = (
        task.answer
        if isinstance(task.answer, str) or task.answer is None
        else to_json(task.answer).decode()
    )
    columns = {"data_source": task.env or "turnwright", "prompt": opening}
    columns |= {"ability": "agent", "reward_model": {"style": "rule", "ground_truth": answer}}
    columns["extra_info"] = {
        "split": trajectory.key.phase,
        "index": trajectory.key.sample,
        "info": to_json(task.info).decode(),
    }
    columns |= {"messages": opening + rest, "prompt_ids": prompt_ids}
    return (
        columns
        | {"responses": ids, "response_mask": mask, "rollout_log_probs": logprobs}
        | sampling
        | images
    )


def _sampling(sample: Sample, shape: ColumnLayout) -> list[dict[str, Any]]:
    """Return the distributions of a row's logprobs, each with its first and last position."""
    pairs = enumerate(zip(sample.samplings, sample.mask, strict=True))
    sampled = [(one, at) for at, (one, mask) in pairs if mask and one is not None]
    rows = []
    for one, places in groupby(sampled, key=itemgetter(0)):
        positions = [at for _, at in places]
        row = {
            "first": positions[0],
            "last": positions[-1],
            "temperature": one.temperature,
            "top_p": one.top_p,
        }
        row |= {"top_k": one.top_k, "banned_ids": sorted(one.banned_ids)}
        rows.append(row | {"min_p": one.min_p} if shape.min_p else row)
    return rows


def _message(message: Message, *, shape: ColumnLayout, parts: bool = False) -> dict[str, Any]:
    """Return a message as a row; its content is a list of `parts`, or a text with
    `<image>` for each image."""
    content_parts = (message.content,) if isinstance(message.content, str) else message.content
    if parts:
        frames = (one for part in content_parts for one in _frames(part))
        kinds = (("text", one) if isinstance(one, str) else ("image", None) for one in frames)
        content: Any = [{"type": kind, "text": text} for kind, text in kinds]
    else:
        content = "".join(
            part if isinstance(part, str) else IMAGE * len(list(_frames(part)))
            for part in content_parts
        )
    texts = [
        a if isinstance(a := call.arguments, str) else to_json(a).decode()
        for call in message.tool_calls
    ]
    functions = [
        {"name": call.name, "arguments": text}
        for call, text in zip(message.tool_calls, texts, strict=True)
    ]
    calls = [
        {"id": c.id, "type": "function", "function": f}
        for c, f in zip(message.tool_calls, functions, strict=True)
    ]
    values = (message.name, message.tool_call_id, message.reasoning, calls or None)
    fields = {
        name: value for name, value in zip(_FIELDS, values, strict=True) if name in shape.fields
    }
    return {"role": message.role, "content": content} | fields


def _frames(part: Any) -> Iterator[Any]:
    """Yield a content part, or the frames of a video."""
    yield from part.frames if isinstance(part, VideoRef) else (part,)


def _images(messages: Iterable[Message], media: Path | None) -> list[dict[str, Any]]:
    images = []
    for message in messages:
        for part in () if isinstance(message.content, str) else message.content:
            for frame in (one for one in _frames(part) if isinstance(one, ImageRef)):
                name = f"{frame.sha256}.png"
                file = media / name if media is not None else None
                images.append(
                    {
                        "bytes": file.read_bytes() if file is not None and file.is_file() else None,
                        "path": name,
                    }
                )
    return images


def write(rows: Iterable[Mapping[str, Any]], layout: str, out: Path, shape: ColumnLayout) -> int:
    """Write rows, made by `rows_of` with the same `shape`, to a `.parquet` or `.jsonl`
    file; return their number.

    Raises `UsageError` for another suffix, or without pyarrow; `TraceError` when the file cannot be
    written; a partial file is removed.
    """
    if out.suffix not in (".parquet", ".jsonl"):
        raise UsageError(f"{out}: must end in .parquet or .jsonl")
    temporary = out.with_name(f".{out.name}.writing")
    try:
        count = (
            _parquet(rows, layout, temporary, shape)
            if out.suffix == ".parquet"
            else _json_lines(rows, temporary)
        )
        temporary.replace(out)
    except OSError as error:
        why = (
            f"cannot be written ({error.strerror or error}); free some space or choose another path"
        )
        raise TraceError(f"{out}: {why}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return count


def _json_lines(rows: Iterable[Mapping[str, Any]], out: Path) -> int:
    count = 0
    with out.open("wb") as file:
        for row in rows:
            paths = {
                name: [{"path": one["path"]} for one in row[name]]
                for name in _IMAGES
                if name in row
            }
            file.write(to_json({**row, **paths}) + b"\n")
            count += 1
    return count


def _parquet(rows: Iterable[Mapping[str, Any]], layout: str, out: Path, shape: ColumnLayout) -> int:
    try:
        arrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        why = (
            "Parquet needs pyarrow: pip install 'turnwright[export]', or choose a file that "
            "ends in .jsonl"
        )
        raise UsageError(why) from error
    schema = _schema(arrow, layout, shape)
    count = 0
    remaining = iter(rows)
    with parquet.ParquetWriter(out, schema, compression="zstd") as writer:
        while part := list(islice(remaining, BATCH_ROWS)):
            writer.write_table(arrow.Table.from_pylist(part, schema=schema))
            count += len(part)
    return count


def _schema(arrow: Any, layout: str, shape: ColumnLayout) -> Any:
    text, ids, floats = arrow.string(), arrow.list_(arrow.int64()), arrow.list_(arrow.float64())
    mask = arrow.list_(arrow.int8())
    function = arrow.struct([("name", text), ("arguments", text)])
    calls = arrow.list_(arrow.struct([("id", text), ("type", text), ("function", function)]))
    fields = [
        (name, calls if name == "tool_calls" else text) for name in _FIELDS if name in shape.fields
    ]
    parts = arrow.list_(arrow.struct([("type", text), ("text", text)]))
    content = parts if layout == "trl" and shape.images else text
    conversation = arrow.list_(arrow.struct([("role", text), ("content", content), *fields]))
    pictures = arrow.list_(arrow.struct([("bytes", arrow.binary()), ("path", text)]))
    images = [(name, pictures) for name in _IMAGES] if shape.images else []
    images += [("messages", conversation)] if images and layout == "trl" else []
    decimal, integer = arrow.float64(), arrow.int64()
    head = [
        ("phase", text),
        ("step", integer),
        ("task", text),
        ("sample", integer),
        ("path", integer),
    ]
    if layout == "dpo":
        both = ("chosen", "rejected")
        pairs = [
            *[(f"{one}_reward", decimal) for one in both],
            *[(one, conversation) for one in ("prompt", *both)],
        ]
        pairs += [
            ("prompt_ids", ids),
            *[pair for one in both for pair in ((f"{one}_ids", ids), (f"{one}_mask", mask))],
        ]
        return arrow.schema([*head[:3], *pairs])
    head += [("reward", decimal), ("stop", text), ("weights", floats)]
    distribution = [
        ("first", integer),
        ("last", integer),
        ("temperature", decimal),
        ("top_p", decimal),
        ("top_k", integer),
    ]
    distribution += [("min_p", decimal)] if shape.min_p else []
    sampling = ("sampling", arrow.list_(arrow.struct([*distribution, ("banned_ids", ids)])))
    columns: dict[str, Sequence[tuple[str, Any]]] = {
        "samples": [
            ("ids", ids),
            ("mask", mask),
            ("logprobs", floats),
            ("versions", ids),
            sampling,
        ],
        "sft": [("input_ids", ids), ("labels", ids), ("messages", conversation)],
        "trl": [
            *[
                ("prompt", conversation),
                ("completion", conversation),
                ("prompt_ids", ids),
                ("completion_ids", ids),
            ],
            *[("completion_mask", mask), ("logprobs", floats), sampling, *images],
        ],
        "verl": [
            *[("data_source", text), ("prompt", conversation), ("ability", text)],
            ("reward_model", arrow.struct([("style", text), ("ground_truth", text)])),
            (
                "extra_info",
                arrow.struct([("split", text), ("index", arrow.int64()), ("info", text)]),
            ),
            *[
                ("messages", conversation),
                ("prompt_ids", ids),
                ("responses", ids),
                ("response_mask", mask),
            ],
            *[("rollout_log_probs", floats), sampling, *images],
        ],
    }
    return arrow.schema([*head, *columns[layout]])
