"""Read tasks from JSONL, Parquet and Arrow files, with images and videos.

`read_rows` reads the rows of files, `task_from_row` makes a task of one, and `with_images` puts its
pictures at their positions in the prompt. Values of other libraries become plain data in `rows.py`;
formats of conversations are in `row_messages.py`.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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
"""Keys of a part that hold a picture or a video, or say where it is."""

_TakeMedia = Callable[[str], Any]
"""Returns the next image or video of a row's column, by kind; None where none is left."""


@dataclass(frozen=True, slots=True)
class ImageSource:
    """Location of the images of a dataset."""

    folder: Path | None = None
    """Directory of image paths in rows; None for rows that do not come from a file."""
    read: bool = True
    """Whether to read images with their row; otherwise when an episode renders them."""
    media_root: Path | None = None
    """Another directory of image paths, which may be absolute; relative ones are looked up in
    `folder` first."""

    @property
    def roots(self) -> list[tuple[Path, bool]]:
        """The directories without links, each with whether paths into it may be absolute."""
        roots = []
        if self.folder is not None:
            roots.append((files.resolved(self.folder), False))
        if self.media_root is not None:
            roots.append((files.resolved(self.media_root), True))
        return roots


def with_images(
    rest: dict[str, Any], prompt: Any, source: ImageSource, where: str
) -> tuple[Any, tuple[Any, ...]]:
    """Return the prompt of a row with images and videos as parts, and the images of its column,
    removed from `rest`.

    Columns are `images` (or `image`) and `videos` (or `video`). `<image>` and `<video>` in texts,
    or empty parts of that type, mark the positions.
    """
    marked = _marked_kinds(prompt)
    columns: dict[str, list[Any]] = {}
    for kind in ("image", "video"):
        columns[kind] = _take_column(rest, kind, kind in marked)
    media: dict[str, list[Any]] = {}
    for kind, values in columns.items():
        media[kind] = [_of_column(value, kind, source, where) for value in values]

    # Each position takes the next of its kind. Positions beyond the last count too.
    positions = dict.fromkeys(media, 0)

    def take(kind: str) -> Any:
        number = positions[kind]
        positions[kind] += 1
        return media[kind][number] if number < len(media[kind]) else None

    kinds = {kind for kind, items in media.items() if items}
    prompt = _filled(prompt, kinds, take, source, where)
    for kind, items in media.items():
        if positions[kind] != len(items):
            raise TaskError(
                f"{where}: {len(items)} {kind}s in its column and {positions[kind]} places for "
                f"them in its prompt; write <{kind}> at the position of each {kind}"
            )
    return prompt, tuple(media["image"])


def _take_column(rest: dict[str, Any], kind: str, marked: bool) -> list[Any]:
    """Remove the images of a column from the row and return them.

    A column with other content (such as a container `image`) stays in the row, unless the prompt
    has a position for images. Names of image files are removed without one, too: the caller reports
    them.
    """
    for name in (f"{kind}s", kind):
        value = rest.get(name)
        if value is None:
            items = []
        elif isinstance(value, (list, tuple)):
            items = list(value)
        else:
            items = [value]

        is_plain = all(isinstance(item, (str, int, float, bool)) or item is None for item in items)
        names_files = any(
            isinstance(item, str) and item.lower().endswith(_IMAGE_SUFFIXES) for item in items
        )
        if items and (marked or not is_plain or names_files):
            del rest[name]
            return items
    return []


def _marked_kinds(prompt: Any) -> set[str]:
    """Return the kinds of media that have positions in a prompt: markers in its texts, or empty
    parts."""
    if isinstance(prompt, str):
        messages: Sequence[Any] = [prompt]
    elif isinstance(prompt, (list, tuple)):
        messages = prompt
    else:
        return set()

    marked: set[str] = set()
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else message
        if isinstance(message, Mapping) and isinstance(content, (list, tuple)):
            parts: Sequence[Any] = content
        else:
            parts = [content]
        for part in parts:
            text = part.get("text") if isinstance(part, Mapping) else part
            if isinstance(text, str):
                marked.update(_MARKER.findall(text))
            if _is_position(part):
                marked.add(part["type"])
    return marked


def _is_position(part: Any) -> bool:
    """Return whether a part is the position of an image or a video, without one of its own."""
    if not isinstance(part, Mapping) or part.get("type") not in ("image", "video"):
        return False
    return all(part.get(key) is None for key in _DATA)


def _filled(prompt: Any, kinds: set[str], take: _TakeMedia, source: ImageSource, where: str) -> Any:
    """Replace markers of these kinds by parts, and resolve images in the prompt."""
    if not isinstance(prompt, (str, list, tuple)):
        return prompt

    filled: list[Any] = []
    for message in [prompt] if isinstance(prompt, str) else prompt:
        if isinstance(message, str):
            parts = _split_markers(message, kinds, take)
            filled.append(message if parts == [message] else {"role": "user", "content": parts})
            continue
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, (str, list, tuple)):
            content = _filled_content(content, kinds, take, source, where)
            filled.append({**message, "content": content})
        else:
            filled.append(message)

    is_unchanged_text = isinstance(prompt, str) and filled == [prompt]
    return prompt if is_unchanged_text else filled


def _filled_content(
    content: Any, kinds: set[str], take: _TakeMedia, source: ImageSource, where: str
) -> Any:
    """Replace markers and positions in the content of a message, and resolve its images."""
    filled: list[Any] = []
    for part in [content] if isinstance(content, str) else content:
        text: Any = part
        if isinstance(part, Mapping) and part.get("type") == "text":
            text = part.get("text")
        if isinstance(text, str):
            filled += _split_markers(text, kinds, take)
        elif not isinstance(part, Mapping):
            filled.append(part)
        elif _is_position(part):
            filled.append(take(part["type"]))
        elif part.get("type") in ("image", "image_url", "input_image"):
            filled.append(_of_part(part, source, where))
        else:
            filled.append(part)

    is_unchanged_text = isinstance(content, str) and filled == [content]
    return content if is_unchanged_text else filled


def _split_markers(text: str, kinds: set[str], take: _TakeMedia) -> list[Any]:
    """Return a text as parts, its markers of these kinds replaced by the media they stand for."""
    parts: list[Any] = []
    end = 0
    for marker in _MARKER.finditer(text):
        kind = marker[1]
        if kind in kinds:
            parts += [text[end : marker.start()], take(kind)]
            end = marker.end()
    parts.append(text[end:])
    return [part for part in parts if part != ""] or [text]


def _of_column(value: Any, kind: str, source: ImageSource, where: str) -> Any:
    """Read an image or a video of a column."""
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
    images = [_image(frame, source, where) for frame in frames]
    return Video(images, video.get("fps"), video.get("times"), video.get("alt"))


def _of_part(part: Mapping[str, Any], source: ImageSource, where: str) -> Any:
    """Read an image part of a message."""
    value = None
    for key in ("image", "image_url", "url", "path"):
        if part.get(key) is not None:
            value = part[key]
            break
    if isinstance(value, Mapping) and value.get("url") is not None:
        value = value["url"]
    if isinstance(value, ImageRef):
        return value
    if value is None or (isinstance(value, str) and not value):
        raise TaskError(
            f"{where}: an image part without an image; give 'image', or an images column"
        )

    image = _image(value, source, where)
    image = Image(image.value, part.get("alt"), part.get("max_pixels") or 0, image.name)
    return read_part({"type": "image", "image": image})


def _image(value: Any, source: ImageSource, where: str) -> Image:
    """Read an image of a row: a file in the dataset's folder, a data URI, or bytes as in Hugging
    Face datasets."""
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
    inside = []
    for root, may_be_absolute in roots:
        candidate = _within(root, name, may_be_absolute)
        if candidate is not None:
            inside.append(candidate)
    if not inside:
        raise TaskError(f"{where}: {name!r:.100} leads out of {_named_roots(source)}")

    path = next((candidate for candidate in inside if candidate.is_file()), None)
    if path is None:
        places = " or ".join(str(root) for root, _ in roots)
        hint = ""
        if len(inside) < len(roots):
            hint = "; a path or a link that leads out of them is not followed"
        raise TaskError(f"{where}: no file {name!r:.100} in {places}{hint}")

    if not source.read:
        return Image(path, name=name)
    try:
        return Image(path.read_bytes(), name=name)
    except OSError as error:
        raise TaskError(f"{where}: {path} cannot be read ({error.strerror})") from error


def _within(root: Path, name: str, may_be_absolute: bool) -> Path | None:
    """Return the file that a path names within a resolved directory; None for one that leads out of
    it, also by a link."""
    path = PurePosixPath(name)
    if ".." in path.parts or "\\" in name or "\0" in name or PureWindowsPath(name).drive:
        return None
    if path.is_absolute() and not may_be_absolute:
        return None
    file = files.resolved(root / path)
    return file if file.is_relative_to(root) else None


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
    """Read one row: the prompt from one of `PROMPTS`, the answer from one of `ANSWERS`, `id` and
    `env`.

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

    Example::

        >>> row = {"instruction": "2 + 2?", "meta": {"gold": "4"}}
        >>> columns = {"prompt": "instruction", "answer": "meta.gold"}
        >>> task = task_from_row(row, "row 0", columns=columns)
        >>> task.messages[0].content, task.answer
        ('2 + 2?', '4')
    """
    row = row_mapping(row)
    if not isinstance(row, Mapping):
        raise TaskError(
            f"{where}: a row is an object with a prompt, not {type(row).__name__}; write "
            '{"prompt": ...}'
        )
    plain = plain_row(row)
    columns = columns or {}
    mapped = _mapped_values(row, columns, where)

    # What is read below leaves the rest; what is left is the task's info.
    rest = dict(plain)
    for column in columns.values():
        rest.pop(column, None)
    for content, value in mapped.items():
        if content not in ("prompt", "answer") and value is not None:
            rest[content] = value

    prompt_column = next((column for column in PROMPTS if rest.get(column) is not None), "")
    if "prompt" in mapped:
        prompt = mapped["prompt"]
        is_conversation = True
    else:
        prompt = rest.pop(prompt_column, None)
        is_conversation = prompt_column == "messages"
    prompt, reference = _read_prompt(prompt, is_conversation, rest, where)

    id_and_env = {key: rest.pop(key) for key in ("id", "env") if key in rest}
    if "answer" in mapped:
        answer = mapped["answer"]
    else:
        answer = _first_answer(rest)
        rest.pop("answer", None)
        if answer is None:
            answer = reference

    task_id = id_and_env.get("id")
    if isinstance(task_id, bool) or not isinstance(task_id, (str, int, type(None))):
        raise TaskError(
            f"{where}: 'id' is a string or an integer, not {type(task_id).__name__}; change or "
            "leave out the column"
        )
    env = id_and_env.get("env")
    prompt, images = with_images(rest, prompt, source or ImageSource(), where)
    try:
        task = Task(
            prompt,
            answer,
            id="" if task_id is None else str(task_id),
            images=images,
            info=rest,
            env=env if isinstance(env, str) else "",
        )
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise TaskError(
            f"{where}: the prompt is not a string or a list of chat messages: {error}"
        ) from error

    # Columns that `info` lacks are added to the finished task, whose id does not depend on them.
    info = rest | {key: value for key, value in id_and_env.items() if key not in mapped}
    read_columns = [columns["prompt"] if "prompt" in mapped else prompt_column]
    if answer is not None:
        read_columns.append("answer")
    other_columns = {
        key: plain.get(key) for key in row if key not in info and key not in read_columns
    }
    if not other_columns and info == rest:
        return task
    return replace(task, info=info, other_columns=other_columns)


def _mapped_values(
    row: Mapping[str, Any], columns: Mapping[str, str], where: str
) -> dict[str, Any]:
    """Return the values of mapped columns by content, as plain data; None for an empty one."""
    missing = object()
    values = {}
    for content, column in columns.items():
        value = _at(row, column, missing)
        if value is missing:
            near = suggest_or_list(column, [str(name) for name in row])
            raise TaskError(
                f"{where}: no column {column!r}, which columns.{content} names; "
                f"{near or 'the row is empty'}"
            )
        values[content] = plain_row({"": value}).get("")
    return values


def _read_prompt(
    prompt: Any, is_conversation: bool, rest: Mapping[str, Any], where: str
) -> tuple[Any, Any]:
    """Return the prompt of a row and the reference reply that ends it, if there is one.

    Raises `TaskError` without a prompt; `rest` are the row's other columns.
    """
    if isinstance(prompt, (int, float)) and not isinstance(prompt, bool):
        prompt = str(prompt)  # the number of a task, as some environments have it
    prompt = read_conversation_column(prompt, where)
    prompt, reference = without_reference(prompt, only_calls=not is_conversation)
    if prompt is not None and prompt != "" and prompt != []:
        return prompt, reference

    likely = ""
    for column in rest:
        hint = did_you_mean(str(column), PROMPTS, 0.6)
        if hint:
            likely = f"; {column}: {hint}"
            break
    names = ", ".join(map(str, rest)) or "none"
    raise TaskError(
        f"{where}: no prompt; give the row one of the columns {', '.join(PROMPTS)} (it has "
        f"{names}){likely}"
    )


def _first_answer(row: Mapping[str, Any]) -> Any:
    """Return the value of the first column of an answer that a row has; None without one."""
    for column in ANSWERS:
        answer = _at(row, column)
        if answer is not None:
            return answer
    return None


def read_messages(
    row: Any, where: str, images: ImageSource | None = None
) -> tuple[tuple[Message, ...], tuple[Mapping[str, Any], ...]]:
    """Return the messages and the tools of a row, read like those of tasks.

    Raises:
        TaskError: when it is no conversation.
    """
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


def _at(row: Mapping[str, Any], column: str, missing: Any = None) -> Any:
    """Return the value of a column or of a nested one such as `reward_model.ground_truth`."""
    if column in row:
        return row[column]
    first, dot, inner_column = column.partition(".")
    inner_row = row.get(first)
    if not dot or not isinstance(inner_row, Mapping):
        return missing
    return _at(inner_row, inner_column, missing)


def read_rows(path: Path) -> Iterator[tuple[Any, str]]:
    """Yield the rows of a JSONL, Parquet or Arrow file or a Hugging Face dataset directory, each
    with its location.

    Raises:
        TaskError: for what cannot be read.
    """
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
    """Return the files of a dataset directory in order; raise `TaskError` where they are those of
    several splits."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        raise TaskError(
            f"{folder}: holds several splits; name one: "
            + ", ".join(str(folder / split) for split in splits)
        )

    # What `Dataset.save_to_disk` wrote says the order itself.
    state = folder / "state.json"
    if state.is_file():
        try:
            return [folder / row["filename"] for row in files.read_json(state)["_data_files"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TaskError(
                f"{state}: not what datasets.save_to_disk writes ({error}); save it again"
            ) from error

    rows_files = _files_of_one_kind(folder)
    if not rows_files:
        raise TaskError(
            f"{folder}: no .jsonl, .parquet or .arrow file in it; name a file, or save the dataset "
            "there again"
        )
    prefixes = {file.stem.split("-")[0] for file in rows_files}
    if len(prefixes) > 1 and prefixes & {"train", "test", "validation", "dev", "eval"}:
        raise TaskError(
            f"{folder}: holds several splits ({', '.join(sorted(prefixes))}); name one file, such "
            f"as {rows_files[0]}"
        )
    return rows_files


def _files_of_one_kind(folder: Path) -> list[Path]:
    """Return the files of rows in a directory, else in its `data`; of the first suffix there is."""
    for inner in (folder, folder / "data"):
        for suffix in _ROWS_SUFFIXES:
            rows_files = sorted(inner.glob(f"*{suffix}"))
            if rows_files:
                return rows_files
    return []


def _read_jsonl(path: Path) -> Iterator[tuple[Any, str]]:
    """Yield the rows of a JSONL file, each with its location."""
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
    """Yield the rows of a Parquet or Arrow file, each with its location."""
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
        if path.suffix == ".parquet":
            batches: Any = pq.ParquetFile(path).iter_batches()
        else:
            batches = _arrow_batches(pa, path)
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
    """Return the batches of an Arrow file, in stream format (as `datasets` writes) or file
    format."""
    with files.open_file(path) as file:
        is_file_format = file.read(6) == b"ARROW1"
    source = pa.memory_map(str(path))
    if is_file_format:
        reader = pa.ipc.open_file(source)
        return (reader.get_batch(index) for index in range(reader.num_record_batches))
    return pa.ipc.open_stream(source)
