"""Read tasks from JSONL, Parquet, Arrow and Python; rows with images."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from turnwise.envs.user_code import suggest_or_list
from turnwise.errors import TaskError
from turnwise.types import Image, ImageRef, Task, Video, VideoRef, is_image_object, read_part

_MARKER = re.compile("<(image|video)>")
_ROW_IMAGES_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
_DATA = ("image", "image_url", "url", "path", "video", "video_url", "frames")


@dataclass(frozen=True, slots=True)
class ImageSource:
    """Where the images of a dataset are."""

    folder: Path | None = None
    """Paths in rows are files in here; None for rows that no file holds, which name none."""
    read: bool = True
    """Whether files are read with their row; else when an episode shows them."""


def with_images(rest: dict[str, Any], prompt: Any, place: ImageSource, where: str) -> tuple[Any, tuple[Any, ...]]:
    """The prompt of a row with its images and videos as parts, and the images of its column; takes the columns from `rest`.

    Columns are `images` (or `image`) and `videos` (or `video`); `<image>` and `<video>` in texts, or parts of that type with
    nothing in them, say where each stands.

    Raises:
        TaskError: when there are not as many markers as images, or an image cannot be had.
    """
    marked = {kind for text in _texts(prompt) for kind in _MARKER.findall(text)} | set(_empty(prompt))
    columns = {kind: _column(rest, kind, kind in marked) for kind in ("image", "video")}
    queues = {kind: iter([_of_column(one, kind, place, where) for one in found]) for kind, found in columns.items()}
    images = list(queues["image"])
    queues["image"] = iter(images)
    counts = dict.fromkeys(queues, 0)

    def next_of(kind: str) -> Any:
        counts[kind] += 1
        return next(queues[kind], None)

    prompt = _filled(prompt, {kind for kind, found in columns.items() if found}, next_of, place, where)
    for kind, found in columns.items():
        if counts[kind] != len(found):
            raise TaskError(
                f"{where}: {len(found)} {kind}s in its column and {counts[kind]} places for them in its prompt; write <{kind}> "
                f"where each {kind} stands"
            )
    return prompt, tuple(images)


def _column(rest: dict[str, Any], kind: str, marked: bool) -> list[Any]:
    """What a column of images holds, taken from the row; names of something else (`image` of a container, say) stay there."""
    for name in (f"{kind}s", kind):
        value = rest.get(name)
        items = [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
        if items and (marked or not all(isinstance(item, (str, int, float, bool)) or item is None for item in items)):
            del rest[name]
            return items
        if any(isinstance(item, str) and item.lower().endswith(_ROW_IMAGES_SUFFIXES) for item in items):
            del rest[name]  # files of images that the prompt has no place for, which is told
            return items
    return []


def _texts(prompt: Any) -> Iterator[str]:
    if isinstance(prompt, str):
        yield prompt
        return
    for message in prompt if isinstance(prompt, (list, tuple)) else ():
        content = message.get("content") if isinstance(message, Mapping) else message if isinstance(message, str) else None
        for part in [content] if isinstance(content, str) else content if isinstance(content, (list, tuple)) else ():
            text = part.get("text") if isinstance(part, Mapping) else part
            if isinstance(text, str):
                yield text


def _empty(prompt: Any) -> Iterator[str]:
    """The kinds of parts that only say where something stands."""
    for message in prompt if isinstance(prompt, (list, tuple)) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, (list, tuple)) else ():
            if isinstance(part, Mapping) and part.get("type") in ("image", "video") and _bare(part):
                yield str(part["type"])


def _bare(part: Mapping[str, Any]) -> bool:
    return all(part.get(key) is None for key in _DATA)


def _filled(prompt: Any, kinds: set[str], next_of: Any, place: ImageSource, where: str) -> Any:
    """The prompt with parts in place of markers of these kinds, and with the images that stand in it resolved."""
    if isinstance(prompt, str):
        parts = _parted(prompt, kinds, next_of)
        return prompt if parts == [prompt] else [{"role": "user", "content": parts}]
    if not isinstance(prompt, (list, tuple)):
        return prompt
    filled: list[Any] = []
    for message in prompt:
        if isinstance(message, str):
            parts = _parted(message, kinds, next_of)
            filled.append(message if parts == [message] else {"role": "user", "content": parts})
        elif isinstance(message, Mapping) and isinstance(message.get("content"), (str, list, tuple)):
            filled.append({**message, "content": _content(message["content"], kinds, next_of, place, where)})
        else:
            filled.append(message)
    return filled


def _content(content: Any, kinds: set[str], next_of: Any, place: ImageSource, where: str) -> Any:
    if isinstance(content, str):
        parts = _parted(content, kinds, next_of)
        return content if parts == [content] else parts
    made: list[Any] = []
    for part in content:
        if isinstance(part, str):
            made += _parted(part, kinds, next_of)
        elif not isinstance(part, Mapping):
            made.append(part)
        elif part.get("type") == "text" and isinstance(part.get("text"), str):
            made += _parted(part["text"], kinds, next_of)
        elif part.get("type") in ("image", "video") and _bare(part):
            made.append(next_of(part["type"]))
        elif part.get("type") in ("image", "image_url", "input_image"):
            made.append(_of_part(part, place, where))
        else:  # columns of Arrow files have all keys in all rows
            made.append({key: value for key, value in part.items() if value is not None})
    return made


def _parted(text: str, kinds: set[str], next_of: Any) -> list[Any]:
    """A text, parted at its markers of these kinds."""
    parts: list[Any] = []
    end = 0
    for found in _MARKER.finditer(text):
        if found[1] in kinds:
            parts += [text[end : found.start()], next_of(found[1])]
            end = found.end()
    parts.append(text[end:])
    return [part for part in parts if part != ""] or [text]


def _of_column(value: Any, kind: str, place: ImageSource, where: str) -> Any:
    if isinstance(value, (Video, VideoRef, Image, ImageRef)):
        return value
    if kind == "image":
        return _image(value, place, where)
    told = dict(value) if isinstance(value, Mapping) else {"frames": value}
    frames = told.pop("frames", told.pop("video", None))
    if not isinstance(frames, (list, tuple)):
        raise TaskError(
            f"{where}: a video is a list of frames with fps or times, not {type(frames).__name__}; decode files first"
        )
    return Video([_image(frame, place, where) for frame in frames], told.get("fps"), told.get("times"), told.get("alt"))


def _of_part(part: Mapping[str, Any], place: ImageSource, where: str) -> Any:
    value = next((part[name] for name in ("image", "image_url", "url", "path") if part.get(name) is not None), None)
    if isinstance(value, Mapping) and value.get("url") is not None:
        value = value["url"]
    if isinstance(value, ImageRef):
        return value
    if value is None or (isinstance(value, str) and not value):
        raise TaskError(f"{where}: an image part without an image; give 'image', or an images column")
    image = _image(value, place, where)
    return read_part({"type": "image", "image": Image(image.value, part.get("alt"), part.get("max_pixels") or 0, image.name)})


def _image(value: Any, place: ImageSource, where: str) -> Image:
    """An image of a row: a file in the dataset's folder, a data URI, bytes as Hugging Face's datasets hold them."""
    if isinstance(value, Image):
        return value
    if isinstance(value, Mapping):
        content = value.get("bytes")
        if content is not None:
            return Image(bytes(content))
        value = value.get("path")
    if isinstance(value, str) and not value.startswith("data:"):
        return _file(value, place, where)
    if isinstance(value, (str, bytes, Path)) or is_image_object(value):
        return Image(value)
    raise TaskError(f"{where}: an image is a path, a data URI or bytes, not {type(value).__name__}")


def _file(name: str, place: ImageSource, where: str) -> Image:
    """A file in the dataset's folder, and nowhere else.

    Raises:
        TaskError: for any other, and for one that there is not.
    """
    if "://" in name:
        raise TaskError(f"{where}: {name!r:.100} is an address, and nothing is fetched; save the image beside the dataset")
    if place.folder is None:
        raise TaskError(f"{where}: {name!r:.100} is text; rows that no file holds give a pathlib.Path, bytes or tw.Image")
    path = PurePosixPath(name)
    outside = path.is_absolute() or PureWindowsPath(name).anchor or ".." in path.parts or "\\" in name or "\0" in name
    folder = place.folder.resolve()
    found = None if outside else (folder / path).resolve()
    if found is None or not found.is_relative_to(folder):
        raise TaskError(f"{where}: {name!r:.100} leads out of the dataset's folder {folder}; give paths relative to it, inside")
    if not found.is_file():
        raise TaskError(f"{where}: no file {name!r:.100} in {folder}")
    if not place.read:
        return Image(found, name=name)
    try:
        return Image(found.read_bytes(), name=name)
    except OSError as error:
        raise TaskError(f"{where}: {found} cannot be read ({error.strerror})") from error


PROMPTS = ("messages", "prompt", "question", "problem", "query")
"""Columns that may hold what the model is asked; the first that a row has is taken."""
ANSWERS = ("answer", "reward_model.ground_truth", "reward_spec.ground_truth", "ground_truth", "label", "solution")
"""Columns that may hold the answer, likewise; all but `answer` stay in `task.info` too."""

_ROWS_SUFFIXES = (".jsonl", ".parquet", ".arrow")


def task_from_row(
    row: Mapping[str, Any], where: str, place: ImageSource | None = None, columns: Mapping[str, str] | None = None
) -> Task:
    """Read one row: the prompt from one of `PROMPTS`, the answer from one of `ANSWERS`, and `id`; the rest is info.

    Columns of images, and where they stand in the prompt: see `turnwise.envs.datasets.with_images`.

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
