"""A run as a table for other trainers: Parquet, which Hugging Face datasets load, or JSON lines.

One row is one trainable path of an episode (`Trajectory.samples`), so every sampled id has weight 1 in exactly one row. All
layouts carry ids, masks and logprobs as they were sampled; `trl` and `verl` name them as those trainers do, and carry the
conversation as messages. Logprobs of ids that were not sampled are null, never 0.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from turnwise.errors import TraceError, UsageError
from turnwise.trace.run import to_json
from turnwise.types import ImageRef, Message, Sample, Trajectory, VideoRef

IMAGE = "<image>"
BATCH = 500
"""Rows that are held at a time."""


def rows_of(trajectory: Trajectory, layout: str, media: Path | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a trajectory.

    Args:
        layout: `samples`, `trl` or `verl`.
        media: the folder of images, whose bytes come along; None leaves them out.
    """
    make = LAYOUTS[layout]
    for number, (sample, turn) in enumerate(_paths(trajectory)):
        key = trajectory.key
        row: dict[str, Any] = {"phase": key.phase, "step": key.step, "task": key.task, "sample": key.sample, "path": number}
        row |= {"reward": sample.reward, "stop": str(trajectory.stop or ""), "weights": sample.weights}
        yield row | make(trajectory, sample, turn, media)


def _paths(trajectory: Trajectory) -> Iterator[tuple[Sample, int]]:
    """Each sample with the last turn whose reply lies on its path."""
    samples = trajectory.samples()
    for leaf in trajectory.leaves():
        chain = {index for index, _ in trajectory.chain(leaf)}
        if not any(trajectory.spans[index].sampled for index in chain):
            continue
        turns = [number for number, turn in enumerate(trajectory.turns) if turn.spans and set(turn.spans) <= chain]
        yield next(samples), turns[-1] if turns else -1


def _samples(trajectory: Trajectory, sample: Sample, turn: int, media: Path | None) -> dict[str, Any]:
    return {"ids": sample.ids, "mask": sample.mask, "logprobs": sample.logprobs, "versions": sample.versions}


def _trl(trajectory: Trajectory, sample: Sample, turn: int, media: Path | None) -> dict[str, Any]:
    prompt, completion = _talk(trajectory, turn)
    first = _prompt_length(sample)
    found: dict[str, Any] = {"prompt": [_message(one) for one in prompt], "completion": [_message(one) for one in completion]}
    found |= {"prompt_ids": sample.ids[:first], "completion_ids": sample.ids[first:], "completion_mask": sample.mask[first:]}
    found["logprobs"] = sample.logprobs[first:]
    return found | {"images": _images([*prompt, *completion], media)}


def _verl(trajectory: Trajectory, sample: Sample, turn: int, media: Path | None) -> dict[str, Any]:
    prompt, completion = _talk(trajectory, turn)
    first = _prompt_length(sample)
    task = trajectory.task
    answer = task.answer if isinstance(task.answer, str) or task.answer is None else to_json(task.answer).decode()
    found: dict[str, Any] = {"data_source": task.env or "turnwise", "prompt": [_message(one) for one in prompt]}
    found |= {"ability": "agent", "reward_model": {"style": "rule", "ground_truth": answer}}
    found["extra_info"] = {"split": trajectory.key.phase, "index": trajectory.key.sample, "info": to_json(task.info).decode()}
    found |= {"messages": [_message(one) for one in (*prompt, *completion)], "prompt_ids": sample.ids[:first]}
    found |= {
        "responses": sample.ids[first:],
        "response_mask": sample.mask[first:],
        "rollout_log_probs": sample.logprobs[first:],
    }
    return found | {"images": _images([*prompt, *completion], media)}


LAYOUTS: dict[str, Callable[[Trajectory, Sample, int, Path | None], dict[str, Any]]] = {
    "samples": _samples,
    "trl": _trl,
    "verl": _verl,
}


def _prompt_length(sample: Sample) -> int:
    return sample.mask.index(1) if 1 in sample.mask else len(sample.mask)


def _talk(trajectory: Trajectory, turn: int) -> tuple[list[Message], list[Message]]:
    """The messages before the first reply of a turn's conversation, and those from it on."""
    talk = trajectory.conversation(turn)
    lineage = trajectory.lineage(turn)
    first = len(trajectory.turns[lineage[0]].messages) if lineage else len(talk)
    return talk[:first], talk[first:]


def _message(message: Message) -> dict[str, Any]:
    content = message.content
    text = content if isinstance(content, str) else "".join(part if isinstance(part, str) else IMAGE for part in content)
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _arguments(call.arguments)}}
        for call in message.tool_calls
    ]
    return {
        "role": message.role,
        "content": text,
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning,
        "tool_calls": calls or None,
    }


def _arguments(value: Any) -> str:
    return value if isinstance(value, str) else to_json(value).decode()


def _images(messages: Iterable[Message], media: Path | None) -> list[dict[str, Any]]:
    found = []
    for message in messages:
        for part in () if isinstance(message.content, str) else message.content:
            frames = part.frames if isinstance(part, VideoRef) else (part,)
            for frame in (one for one in frames if isinstance(one, ImageRef)):
                name = f"{frame.sha256}.png"
                file = media / name if media is not None else None
                found.append({"bytes": file.read_bytes() if file is not None and file.is_file() else None, "path": name})
    return found


def write(rows: Iterable[Mapping[str, Any]], layout: str, out: Path) -> int:
    """Write rows to a `.parquet` or `.jsonl` file; gives their number.

    Raises:
        UsageError: for another ending, or without pyarrow.
        TraceError: when the file cannot be written; what there was of it is removed.
    """
    if out.suffix not in (".parquet", ".jsonl"):
        raise UsageError(f"{out}: must end in .parquet or .jsonl")
    temporary = out.with_name(f".{out.name}.writing")
    try:
        count = (_parquet if out.suffix == ".parquet" else _json_lines)(rows, layout, temporary)
        temporary.replace(out)
    except OSError as error:
        raise TraceError(f"{out}: cannot be written ({error.strerror or error}); make room, or name another place") from error
    finally:
        temporary.unlink(missing_ok=True)
    return count


def _json_lines(rows: Iterable[Mapping[str, Any]], layout: str, out: Path) -> int:
    count = 0
    with out.open("wb") as file:
        for row in rows:
            images = [{"path": image["path"]} for image in row["images"]] if "images" in row else None
            file.write(to_json({**row, "images": images} if images is not None else row) + b"\n")
            count += 1
    return count


def _parquet(rows: Iterable[Mapping[str, Any]], layout: str, out: Path) -> int:
    try:
        arrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        raise UsageError("Parquet needs pyarrow: pip install 'turnwise[export]', or name a file that ends in .jsonl") from error
    schema = _schema(arrow, layout)
    count = 0
    waiting = iter(rows)
    with parquet.ParquetWriter(out, schema, compression="zstd") as writer:
        while part := list(islice(waiting, BATCH)):
            writer.write_table(arrow.Table.from_pylist(part, schema=schema))
            count += len(part)
    return count


def _schema(arrow: Any, layout: str) -> Any:
    text, ids, floats = arrow.string(), arrow.list_(arrow.int64()), arrow.list_(arrow.float64())
    mask = arrow.list_(arrow.int8())
    function = arrow.struct([("name", text), ("arguments", text)])
    calls = arrow.list_(arrow.struct([("id", text), ("type", text), ("function", function)]))
    names = ("role", "content", "name", "tool_call_id", "reasoning_content")
    talk = arrow.list_(arrow.struct([*((name, text) for name in names), ("tool_calls", calls)]))
    images = arrow.list_(arrow.struct([("bytes", arrow.binary()), ("path", text)]))
    head = [("phase", text), ("step", arrow.int64()), ("task", text), ("sample", arrow.int64()), ("path", arrow.int64())]
    head += [("reward", arrow.float64()), ("stop", text), ("weights", floats)]
    columns: dict[str, Sequence[tuple[str, Any]]] = {
        "samples": [("ids", ids), ("mask", mask), ("logprobs", floats), ("versions", ids)],
        "trl": [
            *[("prompt", talk), ("completion", talk), ("prompt_ids", ids), ("completion_ids", ids)],
            *[("completion_mask", mask), ("logprobs", floats), ("images", images)],
        ],
        "verl": [
            *[("data_source", text), ("prompt", talk), ("ability", text)],
            ("reward_model", arrow.struct([("style", text), ("ground_truth", text)])),
            ("extra_info", arrow.struct([("split", text), ("index", arrow.int64()), ("info", text)])),
            *[("messages", talk), ("prompt_ids", ids), ("responses", ids), ("response_mask", mask)],
            *[("rollout_log_probs", floats), ("images", images)],
        ],
    }
    return arrow.schema([*head, *columns[layout]])
