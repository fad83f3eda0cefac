"""Read tasks from JSONL, Parquet and Arrow files, with images and videos."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from turnwright import files
from turnwright.envs.row_messages import (
    read_conversation_column,
    read_tool_schemas,
    without_reference,
)
from turnwright.envs.rows import plain_row, row_mapping, rows_of_table
from turnwright.errors import TaskError, did_you_mean, suggest_or_list
from turnwright.types import (
    Image,
    ImageRef,
    Message,
    Task,
    Video,
    VideoRef,
    is_image_object,
    read_part,
)
from turnwright.types.messages import as_messages

_MARKER = re.compile("<(image|video)>")
_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
_DATA = ("image", "image_url", "url", "path", "video", "video_url", "frames")


@dataclass(frozen=True, slots=True)
class ImageSource:
    """Location of the images of a dataset."""

    folder: Path | None = None
    """Directory of image paths in rows; None for rows that do not come from a file."""
    read: bool = (
        True  # whether to read images with their row; otherwise when an episode renders them
    )
    media_root: Path | None = None
    """Another directory of image paths, which may be absolute; relative ones are looked
    up in `folder` first."""

    @property
    def roots(self) -> list[tuple[Path, bool]]:
        """The directories without links, each with whether paths into it may be absolute."""
        given = ((self.folder, False), (self.media_root, True))
        return [(files.resolved(root), absolute) for root, absolute in given if root is not None]


def with_images(
    rest: dict[str, Any], prompt: Any, source: ImageSource, where: str
) -> tuple[Any, tuple[Any, ...]]:
    """Return the prompt of a row with images and videos as parts, and the images of its
    column, removed from `rest`.

    Columns are `images` (or `image`) and `videos` (or `video`). `<image>` and `<video>` in texts,
    or empty parts of that type, mark the positions.
    """
    marked = _marked_kinds(prompt)
    columns = {kind: _column(rest, kind, kind in marked) for kind in ("image", "video")}
    queues = {
        kind: iter([_of_column(one, kind, source, where) for one in found])
        for kind, found in columns.items()
    }
    images = list(queues["image"])
    queues["image"] = iter(images)
    counts = dict.fromkeys(queues, 0)

    def next_of(kind: str) -> Any:
        counts[kind] += 1
        return next(queues[kind], None)

    prompt = _filled(
        prompt, {kind for kind, found in columns.items() if found}, next_of, source, where
    )
    for kind, found in columns.items():
        if counts[kind] != len(found):
            raise TaskError(
                f"{where}: {len(found)} {kind}s in its column and {counts[kind]} places for them "
                f"in its prompt; write <{kind}> at the position of each {kind}"
            )
    return prompt, tuple(images)


def _column(rest: dict[str, Any], kind: str, marked: bool) -> list[Any]:
    """Remove and return the images of a column; a column with other content (such as a container
    `image`) stays in the row."""
    for name in (f"{kind}s", kind):
        value = rest.get(name)
        items = (
            [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
        )
        if items and (
            marked
            or not all(isinstance(item, (str, int, float, bool)) or item is None for item in items)
        ):
            del rest[name]
            return items
        if any(isinstance(item, str) and item.lower().endswith(_IMAGE_SUFFIXES) for item in items):
            del rest[name]  # image files without a marker in the prompt, reported by the caller
            return items
    return []


def _marked_kinds(prompt: Any) -> set[str]:
    """Return the kinds of media that have positions in a prompt: markers in its
    texts, or empty parts."""
    marked: set[str] = set()
    for message in (
        [prompt] if isinstance(prompt, str) else prompt if isinstance(prompt, (list, tuple)) else ()
    ):
        content = (
            message.get("content")
            if isinstance(message, Mapping)
            else message
            if isinstance(message, str)
            else None
        )
        for part in content if isinstance(content, (list, tuple)) else [content]:
            text = part.get("text") if isinstance(part, Mapping) else part
            marked.update(_MARKER.findall(text) if isinstance(text, str) else ())
            if isinstance(part, Mapping) and part.get("type") in ("image", "video") and _bare(part):
                marked.add(part["type"])
    return marked


def _bare(part: Mapping[str, Any]) -> bool:
    return all(part.get(key) is None for key in _DATA)


def _filled(prompt: Any, kinds: set[str], next_of: Any, source: ImageSource, where: str) -> Any:
    """Replace markers of these kinds by parts, and resolve images in the prompt."""
    if not isinstance(prompt, (str, list, tuple)):
        return prompt
    filled: list[Any] = []
    for message in [prompt] if isinstance(prompt, str) else prompt:
        if isinstance(message, str):
            parts = _split_markers(message, kinds, next_of)
            filled.append(message if parts == [message] else {"role": "user", "content": parts})
        elif isinstance(message, Mapping) and isinstance(
            message.get("content"), (str, list, tuple)
        ):
            filled.append(
                {**message, "content": _content(message["content"], kinds, next_of, source, where)}
            )
        else:
            filled.append(message)
    return prompt if isinstance(prompt, str) and filled == [prompt] else filled


def _content(content: Any, kinds: set[str], next_of: Any, source: ImageSource, where: str) -> Any:
    made: list[Any] = []
    for part in [content] if isinstance(content, str) else content:
        text = (
            part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
        )
        if isinstance(text, str):
            made += _split_markers(text, kinds, next_of)
        elif not isinstance(part, Mapping):
            made.append(part)
        elif part.get("type") in ("image", "video") and _bare(part):
            made.append(next_of(part["type"]))
        elif part.get("type") in ("image", "image_url", "input_image"):
            made.append(_of_part(part, source, where))
        else:
            made.append(part)
    return content if isinstance(content, str) and made == [content] else made


def _split_markers(text: str, kinds: set[str], next_of: Any) -> list[Any]:
    parts: list[Any] = []
    end = 0
    for found in _MARKER.finditer(text):
        if found[1] in kinds:
            parts += [text[end : found.start()], next_of(found[1])]
            end = found.end()
    parts.append(text[end:])
    return [part for part in parts if part != ""] or [text]


def _of_column(value: Any, kind: str, source: ImageSource, where: str) -> Any:
    if isinstance(value, (Video, VideoRef, Image, ImageRef)):
        return value
    if kind == "image":
        return _image(value, source, where)
    video = dict(value) if isinstance(value, Mapping) else {"frames": value}
    frames = video.pop("frames", video.pop("video", None))
    if not isinstance(frames, (list, tuple)):
        raise TaskError(
            f"{where}: a video is a list of frames with fps or times, not {type(frames).__name__}; "
            "decode files first"
        )
    return Video(
        [_image(frame, source, where) for frame in frames],
        video.get("fps"),
        video.get("times"),
        video.get("alt"),
    )


def _of_part(part: Mapping[str, Any], source: ImageSource, where: str) -> Any:
    value = next(
        (
            part[name]
            for name in ("image", "image_url", "url", "path")
            if part.get(name) is not None
        ),
        None,
    )
    if isinstance(value, Mapping) and value.get("url") is not None:
        value = value["url"]
    if isinstance(value, ImageRef):
        return value
    if value is None or (isinstance(value, str) and not value):
        raise TaskError(
            f"{where}: an image part without an image; give 'image', or an images column"
        )
    image = _image(value, source, where)
    return read_part(
        {
            "type": "image",
            "image": Image(image.value, part.get("alt"), part.get("max_pixels") or 0, image.name),
        }
    )


def _image(value: Any, source: ImageSource, where: str) -> Image:
    """Read an image of a row: a file in the dataset's folder, a data URI, or bytes as in
    Hugging Face datasets."""
    if isinstance(value, Image):
        return value
    if isinstance(value, Mapping):
        content = value.get("bytes")
        if content is not None:
            return Image(bytes(content))
        value = value.get("path")
    if isinstance(value, str) and not value.startswith("data:"):
        return _file(value, source, where)
    if isinstance(value, (str, bytes, Path)) or is_image_object(value):
        return Image(value)
    raise TaskError(f"{where}: an image is a path, a data URI or bytes, not {type(value).__name__}")


def _file(name: str, source: ImageSource, where: str) -> Image:
    """Read a file in the dataset's folder, or in the directory of media."""
    if "://" in name:
        raise TaskError(
            f"{where}: {name!r:.100} is a URL, which is not fetched; save the image in the "
            "dataset's folder"
        )
    roots = source.roots
    if not roots:
        raise TaskError(
            f"{where}: {name!r:.100} is text; rows not read from a file must give a pathlib.Path, "
            "bytes or tw.Image, or [env] media_root the directory of its pictures"
        )
    candidates = [_within(root, name, absolute) for root, absolute in roots]
    inside = [candidate for candidate in candidates if candidate is not None]
    if not inside:
        raise TaskError(f"{where}: {name!r:.100} leads out of {_named_roots(source)}")
    path = next((candidate for candidate in inside if candidate.is_file()), None)
    if path is None:
        places = " or ".join(str(root) for root, _ in roots)
        outside = (
            ""
            if len(inside) == len(roots)
            else "; a path or a link that leads out of them is not followed"
        )
        raise TaskError(f"{where}: no file {name!r:.100} in {places}{outside}")
    if not source.read:
        return Image(path, name=name)
    try:
        return Image(path.read_bytes(), name=name)
    except OSError as error:
        raise TaskError(f"{where}: {path} cannot be read ({error.strerror})") from error


def _within(root: Path, name: str, absolute: bool) -> Path | None:
    """Return the file that a path names within a resolved directory; None for one that leads
    out of it, also by a link."""
    path = PurePosixPath(name)
    if ".." in path.parts or "\\" in name or "\0" in name or PureWindowsPath(name).drive:
        return None
    if path.is_absolute() and not absolute:
        return None
    found = files.resolved(root / path)
    return found if found.is_relative_to(root) else None


def _named_roots(source: ImageSource) -> str:
    if source.folder is None:
        return f"media_root {source.media_root}; give paths inside of it"
    folder = f"the dataset's folder {files.resolved(source.folder)}"
    if source.media_root is None:
        return f"{folder}; give paths relative to it, inside, or set [env] media_root"
    return f"{folder} and media_root {source.media_root}; give paths inside of one"


MEDIA_COLUMNS = ("image", "images", "video", "videos")
"""Columns of media, see `with_images`."""
PROMPTS = ("messages", "prompt", "question", "problem", "query")
"""Columns of the prompt; the first one present is used."""
ANSWERS = (
    "answer",
    "reward_model.ground_truth",
    "reward_spec.ground_truth",
    "ground_truth",
    "label",
    "solution",
    "response",
)
"""Columns of the answer; the first one present is used.

All but `answer` also stay in `task.info`.
"""

_ROWS_SUFFIXES = (".jsonl", ".parquet", ".arrow")


def task_from_row(
    row: Mapping[str, Any],
    where: str,
    source: ImageSource | None = None,
    columns: Mapping[str, str] | None = None,
) -> Task:
    """Read one row: the prompt from one of `PROMPTS`, the answer from one of
    `ANSWERS`, `id` and `env`.

    All columns but the prompt, `answer` and media are in `Task.info`, without empty values (see
    `turnwright.envs.rows`); `Task.columns` has the others too.

    A conversation in `messages` or in a mapped column that ends with the assistant's message ends
    with a reference reply: it is no part of the prompt, and the answer of a row without one. One in
    `prompt` does so if the message has calls. Messages are read as in
    `turnwright.envs.row_messages`.

    For columns of images and their positions in the prompt see
    `turnwright.envs.datasets.with_images`.

    Args:
        where: name of the row in errors, such as ``tasks.jsonl line 3``.
        source: location of its images; None for rows that do not come from a file.
        columns: column names by content, `{"prompt": "instruction", "answer": "meta.gold"}`; a dot
            selects a nested value. They take precedence over all other columns. See
            `turnwright.config.schema.COLUMNS`.
    """
    row = row_mapping(row)
    if not isinstance(row, Mapping):
        raise TaskError(
            f"{where}: a row is an object with a prompt, not {type(row).__name__}; write "
            '{"prompt": ...}'
        )
    named = columns or {}
    given = plain_row(row)
    rest = dict(given)
    mapped = {
        ours: plain_row({"": _mapped_column(row, column, ours, where)}).get("")
        for ours, column in named.items()
    }
    for column in named.values():
        rest.pop(column, None)
    rest |= {
        ours: mapped[ours]
        for ours in mapped
        if ours not in ("prompt", "answer") and mapped[ours] is not None
    }

    column = next((column for column in PROMPTS if rest.get(column) is not None), "")
    prompt = mapped["prompt"] if "prompt" in mapped else rest.pop(column, None)
    if isinstance(prompt, (int, float)) and not isinstance(prompt, bool):
        prompt = str(prompt)  # the number of a task, as some environments have it
    prompt = read_conversation_column(prompt, where)
    is_conversation = "prompt" in mapped or column == "messages"
    prompt, reference = without_reference(prompt, only_calls=not is_conversation)
    if prompt is None or prompt == "" or prompt == []:
        near = next(
            (
                f"; {column}: {hint}"
                for column in rest
                if (hint := did_you_mean(str(column), PROMPTS, 0.6))
            ),
            "",
        )
        have = ", ".join(map(str, rest)) or "none"
        raise TaskError(
            f"{where}: no prompt; give the row one of the columns {', '.join(PROMPTS)} (it has "
            f"{have}){near}"
        )

    read = {key: rest.pop(key) for key in ("id", "env") if key in rest}
    answer = next((found for column in ANSWERS if (found := _at(rest, column)) is not None), None)
    answer = reference if answer is None else answer
    if "answer" in mapped:
        answer = mapped["answer"]
    else:
        rest.pop("answer", None)
    name, env = read.get("id"), read.get("env")
    if isinstance(name, bool) or not isinstance(name, (str, int, type(None))):
        raise TaskError(
            f"{where}: 'id' is a string or an integer, not {type(name).__name__}; change or leave "
            "out the column"
        )
    prompt, images = with_images(rest, prompt, source or ImageSource(), where)

    label = "" if name is None else str(name)
    env_name = env if isinstance(env, str) else ""
    try:
        task = Task(prompt, answer, id=label, images=images, info=rest, env=env_name)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise TaskError(
            f"{where}: the prompt is not a string or a list of chat messages: {error}"
        ) from error

    info = rest | {key: value for key, value in read.items() if key not in mapped}
    prompts: tuple[str, ...] = (named["prompt"],) if "prompt" in mapped else (column,)
    prompts += ("answer",) if answer is not None else ()
    other = {key: given.get(key) for key in row if key not in info and key not in prompts}
    if not other and info == rest:
        return task
    # The task keeps the id that it has without them.
    return replace(task, info=info, other_columns=other)


def read_messages(
    row: Any, where: str, images: ImageSource | None = None
) -> tuple[tuple[Message, ...], tuple[Mapping[str, Any], ...]]:
    """Return the messages and the tools of a row, read like those of tasks; raise `TaskError` when
    it is no conversation."""
    columns = plain_row(row) if isinstance(row, Mapping) else {}
    messages = columns.get("messages", columns.get("conversations"))
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise TaskError(
            f'{where}: a conversation is a row with "messages", a list of objects with role and '
            "content"
        )

    messages = read_conversation_column(messages, where)
    tools = read_tool_schemas(columns.get("tools"), where)
    messages, _ = with_images(columns, messages, images or ImageSource(), where)
    try:
        return as_messages(messages), tools
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise TaskError(f"{where}: contains invalid chat messages: {error}") from error


def _mapped_column(row: Mapping[str, Any], column: str, ours: str, where: str) -> Any:
    missing = object()
    found = _at(row, column, missing)
    if found is missing:
        near = suggest_or_list(column, [str(one) for one in row])
        raise TaskError(
            f"{where}: no column {column!r}, which columns.{ours} names; "
            f"{near or 'the row is empty'}"
        )
    return found


def _at(row: Mapping[str, Any], column: str, missing: Any = None) -> Any:
    """Return the value of a column or of a nested one such as `reward_model.ground_truth`."""
    if column in row:
        return row[column]
    first, dot, inside = column.partition(".")
    held = row.get(first)
    return _at(held, inside, missing) if dot and isinstance(held, Mapping) else missing


def read_rows(path: Path) -> Iterator[tuple[Any, str]]:
    """Yield the rows of a JSONL, Parquet or Arrow file or a Hugging Face dataset directory,
    each with its location."""
    if not path.exists():
        near = did_you_mean(path.name, [entry.name for entry in path.parent.glob("*")], 0.6)
        raise TaskError(
            f"{path}: no such file or directory; {near or 'check the path of the tasks'}"
        )
    for file in _files(path) if path.is_dir() else [path]:
        if file.suffix == ".jsonl":
            yield from _read_jsonl(file)
        elif file.suffix in (".parquet", ".arrow"):
            yield from _read_columns(file)
        else:
            raise TaskError(
                f"{file}: tasks come from .jsonl, .parquet or .arrow files, or from "
                "file.py:function; convert it"
            )


def _files(folder: Path) -> list[Path]:
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        raise TaskError(
            f"{folder}: holds several splits; name one: "
            + ", ".join(str(folder / split) for split in splits)
        )
    if (state := folder / "state.json").is_file():
        try:  # the files of `Dataset.save_to_disk`, in order
            return [folder / row["filename"] for row in files.read_json(state)["_data_files"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TaskError(
                f"{state}: not what datasets.save_to_disk writes ({error}); save it again"
            ) from error
    listings = (
        sorted(inner.glob(f"*{suffix}"))
        for inner in (folder, folder / "data")
        for suffix in _ROWS_SUFFIXES
    )
    found = next(filter(None, listings), [])
    if not found:
        raise TaskError(
            f"{folder}: no .jsonl, .parquet or .arrow file in it; name a file, or save the dataset "
            "there again"
        )
    prefixes = {file.stem.split("-")[0] for file in found}
    if len(prefixes) > 1 and prefixes & {"train", "test", "validation", "dev", "eval"}:
        raise TaskError(
            f"{folder}: holds several splits ({', '.join(sorted(prefixes))}); name one file, such "
            f"as {found[0]}"
        )
    return found


def _read_jsonl(path: Path) -> Iterator[tuple[Any, str]]:
    try:
        with files.open_file(path) as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield json.loads(line.decode("utf-8-sig")), f"{path} line {number}"
    except OSError as error:
        raise TaskError(
            f"{path}: cannot be read ({error.strerror}); check its permissions"
        ) from error
    except UnicodeDecodeError as error:
        raise TaskError(
            f"{path} line {number}: not UTF-8 at byte {error.start}; save the file as UTF-8"
        ) from error
    except (ValueError, RecursionError) as error:
        raise TaskError(
            f"{path} line {number}: not JSON ({error}); write one object per line"
        ) from error


def _read_columns(path: Path) -> Iterator[tuple[Any, str]]:
    try:
        pa: Any = importlib.import_module("pyarrow")
        pq: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise TaskError(
            f"{path}: reading {path.suffix} files needs pyarrow; pip install pyarrow (or use "
            ".jsonl)"
        ) from error
    try:
        files.check_regular([path])
        batches: Any = (
            pq.ParquetFile(path).iter_batches()
            if path.suffix == ".parquet"
            else _arrow_batches(pa, path)
        )
        number = 0
        for batch in batches:
            for row in rows_of_table(batch):
                yield row, f"{path} row {number}"
                number += 1
    except (OSError, pa.ArrowInvalid) as error:
        raise TaskError(
            f"{path}: cannot be read ({str(error).splitlines()[0]}); save the dataset again"
        ) from error


def _arrow_batches(pa: Any, path: Path) -> Any:
    """Return the batches of an Arrow file, in stream format (as `datasets`
    writes) or file format."""
    with files.open_file(path) as file:
        is_file_format = file.read(6) == b"ARROW1"
    source = pa.memory_map(str(path))
    if is_file_format:
        reader = pa.ipc.open_file(source)
        return (reader.get_batch(index) for index in range(reader.num_record_batches))
    return pa.ipc.open_stream(source)
