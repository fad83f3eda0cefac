"""Rows of a dataset read as tasks, and the files that hold them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from turnwise.env.near import suggest_or_list
from turnwise.env.row_images import ImageSource, with_images
from turnwise.errors import TaskError
from turnwise.types import Task

PROMPTS = ("messages", "prompt", "question", "problem", "query")
"""Columns that may hold what the model is asked; the first that a row has is taken."""
ANSWERS = ("answer", "reward_model.ground_truth", "reward_spec.ground_truth", "ground_truth", "label", "solution")
"""Columns that may hold the answer, likewise; all but `answer` stay in `task.info` too."""

_ROWS_SUFFIXES = (".jsonl", ".parquet", ".arrow")


def task_from_row(
    row: Mapping[str, Any], where: str, place: ImageSource | None = None, columns: Mapping[str, str] | None = None
) -> Task:
    """Read one row: the prompt from one of `PROMPTS`, the answer from one of `ANSWERS`, and `id`; the rest is info.

    Columns of images, and where they stand in the prompt: see `turnwise.env.row_images.with_images`.

    Args:
        where: names the row in errors, such as ``tasks.jsonl line 3``.
        place: where its images are; None for rows that no file holds.
        columns: names of this dataset's columns by content, `{"prompt": "instruction", "answer": "meta.gold"}`; a dot leads
            into a column. They take precedence over all other columns. See `turnwise.config.schema.COLUMNS`.

    Raises:
        TaskError: when a named column is missing, when the row is not an object, has no prompt, its prompt is not made of
            messages, or an image is missing.
    """
    if not isinstance(row, Mapping):
        raise TaskError(f'{where}: a row is an object with a prompt, not {type(row).__name__}; write {{"prompt": ...}}')
    rest = dict(row)
    mapped = {ours: _named(rest, column, ours, where) for ours, column in (columns or {}).items()}
    for column in (columns or {}).values():
        rest.pop(column, None)
    rest |= {ours: mapped[ours] for ours in mapped if ours not in ("prompt", "answer")}
    if "prompt" in mapped:
        prompt = mapped["prompt"]
    else:
        prompt = next((rest.pop(column) for column in PROMPTS if rest.get(column) is not None), None)
    if prompt is None or prompt == "" or prompt == []:
        hints = ((column, suggest_or_list(str(column), PROMPTS)) for column in rest)
        near = next((f"; {column}: {hint}" for column, hint in hints if hint.startswith("did")), "")
        have = ", ".join(map(str, rest)) or "none"
        raise TaskError(f"{where}: no prompt; give the row one of the columns {', '.join(PROMPTS)} (it has {have}){near}")
    name, env = rest.pop("id", None), rest.pop("env", None)
    answer = next((found for column in ANSWERS if (found := _at(rest, column)) is not None), None)
    if "answer" in mapped:
        answer = mapped["answer"]
    else:
        rest.pop("answer", None)
    if isinstance(name, bool) or not isinstance(name, (str, int, type(None))):
        raise TaskError(
            f"{where}: 'id' is a string or a whole number, not {type(name).__name__}; change or leave out the column"
        )
    prompt, images = with_images(rest, prompt, place or ImageSource(), where)
    label = "" if name is None else str(name)
    try:
        return Task(prompt, answer, id=label, images=images, info=rest, env=env if isinstance(env, str) else "")
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise TaskError(f"{where}: the prompt is not a string or a list of chat messages: {error}") from error


def _named(row: Mapping[str, Any], column: str, ours: str, where: str) -> Any:
    """Return what a row has in a column that somebody named.

    Raises:
        TaskError: when the row has no such column.
    """
    missing = object()
    found = _at(row, column, missing)
    if found is missing:
        near = suggest_or_list(column, [str(one) for one in row])
        raise TaskError(f"{where}: no column {column!r}, which columns.{ours} names; {near or 'the row is empty'}")
    return found


def _at(row: Mapping[str, Any], column: str, missing: Any = None) -> Any:
    """Return what a row has in a column, or inside one: `reward_model.ground_truth`."""
    if column in row:
        return row[column]
    first, dot, inside = column.partition(".")
    held = row.get(first)
    return _at(held, inside, missing) if dot and isinstance(held, Mapping) else missing


def read_rows(path: Path) -> Iterator[tuple[Any, str]]:
    """The rows of a JSONL, Parquet or Arrow file, or of a Hugging Face dataset directory, each with words for where it is.

    Raises:
        TaskError: for a path that does not exist or cannot be read, bad JSON, or a missing pyarrow.
    """
    if path.is_dir():
        for file in _files(path):
            yield from _read_file(file)
    elif path.is_file():
        yield from _read_file(path)
    else:
        beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        near = suggest_or_list(path.name, beside)
        raise TaskError(
            f"{path}: no such file or directory; " + (near if near.startswith("did") else "check the path of the tasks")
        )


def _files(folder: Path) -> list[Path]:
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        raise TaskError(f"{folder}: holds several splits; name one: " + ", ".join(str(folder / split) for split in splits))
    if (folder / "state.json").is_file():
        return _saved_files(folder)
    inner = folder / "data"
    found = _of_a_kind(folder) or (_of_a_kind(inner) if inner.is_dir() else [])
    if not found:
        raise TaskError(f"{folder}: no .jsonl, .parquet or .arrow file in it; name a file, or save the dataset there again")
    prefixes = {file.stem.split("-")[0] for file in found}
    if len(prefixes) > 1 and prefixes & {"train", "test", "validation", "dev", "eval"}:
        raise TaskError(f"{folder}: holds several splits ({', '.join(sorted(prefixes))}); name one file, such as {found[0]}")
    return found


def _of_a_kind(folder: Path) -> list[Path]:
    for suffix in _ROWS_SUFFIXES:
        if found := sorted(folder.glob(f"*{suffix}")):
            return found
    return []


def _saved_files(folder: Path) -> list[Path]:
    """The files of a directory that `Dataset.save_to_disk` wrote, in their order."""
    try:
        state = json.loads((folder / "state.json").read_text("utf-8"))
        return [folder / row["filename"] for row in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise TaskError(f"{folder / 'state.json'}: not what datasets.save_to_disk writes ({error}); save it again") from error


def _read_file(path: Path) -> Iterator[tuple[Any, str]]:
    if path.suffix == ".jsonl":
        yield from _read_jsonl(path)
    elif path.suffix in (".parquet", ".arrow"):
        yield from _read_columns(path)
    else:
        raise TaskError(f"{path}: tasks come from .jsonl, .parquet or .arrow files, or from file.py:function; convert it")


def _read_jsonl(path: Path) -> Iterator[tuple[Any, str]]:
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _read_line(line, f"{path} line {number}"), f"{path} line {number}"
    except OSError as error:
        raise TaskError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error


def _read_line(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise TaskError(f"{where}: not UTF-8 at byte {error.start}; save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{where}: not JSON ({error}); write one object per line") from error


def _read_columns(path: Path) -> Iterator[tuple[Any, str]]:
    try:
        pa: Any = importlib.import_module("pyarrow")
        pq: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise TaskError(f"{path}: reading {path.suffix} files needs pyarrow; pip install pyarrow (or use .jsonl)") from error
    try:
        if path.suffix == ".parquet":
            batches: Any = pq.ParquetFile(path).iter_batches()
        else:
            batches = _arrow_batches(pa, path)
        number = 0
        for batch in batches:
            for row in batch.to_pylist():
                yield row, f"{path} row {number}"
                number += 1
    except (OSError, pa.ArrowInvalid) as error:
        raise TaskError(f"{path}: cannot be read ({str(error).splitlines()[0]}); save the dataset again") from error


def _arrow_batches(pa: Any, path: Path) -> Any:
    """Arrow files come as a stream (what `datasets` writes) or with a footer."""
    with path.open("rb") as file:
        footed = file.read(6) == b"ARROW1"
    source = pa.memory_map(str(path))
    if footed:
        reader = pa.ipc.open_file(source)
        return (reader.get_batch(index) for index in range(reader.num_record_batches))
    return pa.ipc.open_stream(source)
