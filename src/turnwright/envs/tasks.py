"""Task sources, and the split into training and held-out tasks."""

from __future__ import annotations

import functools
import inspect
import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from turnwright.envs.datasets import ImageSource, read_rows, task_from_row
from turnwright.envs.rows import rows_of
from turnwright.errors import TaskError
from turnwright.types import Task

TaskSource = str | Path | Iterable[Any] | Callable[..., Iterable[Any]]

SLOW_S = 10.0
"""Seconds of a call of a task function after which it is reported."""
SLOW = (
    "%s has been running for %.0f s to make %d tasks; a loop that ends only with %d different "
    "ones never ends where there are fewer: bound its attempts, and return the tasks that it found"
)
_log = logging.getLogger(__name__)

HELD_OUT_SHARE = 5  # one row in this many is held out of a dataset without splits


def load_tasks(
    source: TaskSource,
    *,
    split: str = "train",
    n: int = 0,
    seed: int = 0,
    return_multi_modal_inputs: bool = True,
    columns: Mapping[str, str] | None = None,
    media_root: Path | str | None = None,
) -> list[Task]:
    """Read tasks from a file, a Hugging Face dataset directory, a Python
    function or an iterable of rows.

    A function is called with those of `split`, `n` and `seed` that its signature names. Rows are
    tasks, or mappings as in `turnwright.envs.datasets.task_from_row`; a pandas DataFrame, a pyarrow
    Table and a `datasets.Dataset` are rows too. Duplicate rows are dropped.

    Args:
        source: a `.jsonl`, `.parquet` or `.arrow` file, a directory of them or of
            `datasets.save_to_disk`; a function; or rows.
        split: `train` or `eval`, for functions.
        n: number of tasks requested from functions; other sources return all rows.
        seed: seed for functions.
        return_multi_modal_inputs: read images together with their rows; otherwise rows keep paths,
            and an image is read when an episode renders it. The tasks are the same, ids included.
        columns: column names by content, as in `turnwright.envs.datasets.task_from_row`.
        media_root: a directory that paths of images in rows may lead to, besides the dataset's own.

    Raises:
        TaskError: when the source or a row cannot be read, the source is empty, or two
            different tasks have the same id.
    """
    root = None if media_root is None else Path(media_root)
    folder: Path | None = None
    if isinstance(source, (str, Path)):
        folder = Path(source) if Path(source).is_dir() else Path(source).parent
        rows: Iterable[tuple[Any, str]] = read_rows(Path(source))
        name = str(source)
    else:
        name = "tasks"
        if callable(source):
            name = f"{getattr(source, '__name__', type(source).__name__)}()"
            source = _call(source, name, split, n, seed)
        rows = ((row, f"{name} row {number}") for number, row in enumerate(rows_of(source, name)))

    images = ImageSource(folder, return_multi_modal_inputs, root)
    tasks: dict[str, tuple[Task, str]] = {}
    known_columns: dict[str, None] = {}
    for row, where in rows:
        if isinstance(row, Task):
            if columns:
                raise TaskError(
                    f"{where}: is a tw.Task already; columns = {dict(columns)} maps rows, so leave "
                    "it out"
                )
            task = row
        else:
            task = task_from_row(row, where, images, columns)
            known_columns |= dict.fromkeys([*task.info, *task.other_columns])
        known = tasks.setdefault(task.id, (task, where))
        if known[0] is not task and content_key(known[0]) != content_key(task):
            raise TaskError(
                f"{where}: the id {task.id!r} belongs to another task at {known[1]}; give each "
                "task its own id"
            )
    if not tasks:
        raise TaskError(f"{name}: no tasks in it; give at least one row")
    return [_with_empty_columns(task, known_columns) for task, _ in tasks.values()]


def _with_empty_columns(task: Task, known: Iterable[str]) -> Task:
    """Return a task with the columns that other rows have and its own lacks, as
    Parquet and Arrow have them."""
    own = task.columns
    empty = {column: None for column in known if column not in own}
    return replace(task, other_columns={**task.other_columns, **empty}) if empty else task


def make_task_source(
    train: TaskSource | None,
    held_out: TaskSource | None,
    name: str,
    return_multi_modal_inputs: bool = True,
    columns: Mapping[str, str] | None = None,
    media_root: Path | None = None,
) -> Callable[[str, int, int], list[Task]]:
    """Combine the sources of an environment into one function `(split, n, seed) -> tasks`.

    A function that takes `split` decides which tasks are held out. Other sources are read once;
    without a source of held-out tasks about a fifth is held out, none of fewer than five rows. `n`
    of 0 means all tasks of a finite source. The function raises `TaskError` without a source, or as
    `load_tasks` and `split_tasks`.
    """
    if callable(train) and "split" not in _parameters(train) and _parameters(train):
        if inspect.ismethod(train) and "split" in _parameters(train.__func__):
            raise TaskError(
                f"{name}: tasks takes no self, so write @staticmethod above def {train.__name__}"
            )
        raise TaskError(
            f"{name}: a task function that takes {' and '.join(_parameters(train))} takes split "
            "too ('train' or 'eval')"
        )

    read = functools.partial(
        load_tasks,
        return_multi_modal_inputs=return_multi_modal_inputs,
        columns=columns,
        media_root=media_root,
    )

    @functools.cache
    def rows(split: str) -> tuple[Task, ...]:
        source = held_out if split == "eval" and held_out is not None else train
        if source is None:
            raise TaskError(
                f"{name} has no {split} tasks; give it a tasks hook, or [[env]] tasks = a .jsonl "
                "file or file.py:function"
            )
        return tuple(read(source, split=split))

    @functools.cache
    def sides() -> tuple[list[Task], list[Task]]:
        return split_tasks(rows("train"))

    def tasks(split: str, n: int, seed: int) -> list[Task]:
        source = held_out if split == "eval" and held_out is not None else train
        if callable(source) and "split" in _parameters(source):
            found = read(source, split=split, n=n, seed=seed)
        elif held_out is not None:
            found = shuffled(rows(split), seed)
        else:
            found = shuffled(sides()[split == "eval"], seed)
        return found[:n] if n else found

    return tasks


def _call(
    source: Callable[..., Iterable[Any]], name: str, split: str, n: int, seed: int
) -> Iterable[Any]:
    offered = {"split": split, "n": n, "seed": seed}
    watch = threading.Timer(
        SLOW_S, _log.warning, (SLOW, getattr(source, "__qualname__", name), SLOW_S, n, n)
    )
    watch.start()
    try:
        result = source(**{key: offered[key] for key in _parameters(source)})
    except TaskError:
        raise
    except Exception as error:
        raise TaskError(
            f"{name}: raised {type(error).__name__}: {error}; it is called with split, n and seed "
            "where named"
        ) from error
    finally:
        watch.cancel()
    result = rows_of(result, name) if not isinstance(result, Mapping) else result
    if isinstance(result, (str, bytes, Mapping)) or not isinstance(result, Iterable):
        raise TaskError(
            f"{name}: returned {type(result).__name__}; a task function returns a list of tasks or "
            "rows"
        )
    return result


def _parameters(source: Callable[..., Any]) -> list[str]:
    known = ("split", "n", "seed")
    parameters = inspect.signature(source).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return list(known)
    return [parameter.name for parameter in parameters if parameter.name in known]


def content_key(task: Task) -> str:
    """Return a hash of a task's content: everything except its id, its environment, and its index
    and split in a dataset."""
    info = {
        key: value for key, value in task.info.items() if key not in ("index", "split", "id", "env")
    }
    if isinstance(extra := info.get("extra_info"), Mapping):
        info["extra_info"] = {
            key: value for key, value in extra.items() if key not in ("index", "split")
        }
    images = [image.to_dict()["image"] for image in task.images]
    content = [[message.to_dict() for message in task.messages], task.answer, images, info]
    text = json.dumps(content, sort_keys=True, default=repr, ensure_ascii=False)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def split_tasks(
    tasks: Sequence[Task], n_eval: int | None = None, seed: int = 0
) -> tuple[list[Task], list[Task]]:
    """Split tasks into (training, held-out) by a hash of their content, independent of their order.

    Rows of equal content stay in one split, whatever their ids, so a few more than
    `n_eval` may be held out; by default one in five. Raises `TaskError` when a split
    would be empty, or the splits overlap.
    """
    if n_eval is None:
        n_eval = len(tasks) // HELD_OUT_SHARE
    if n_eval and n_eval >= len(tasks):
        raise TaskError(
            f"{n_eval} tasks are to be held out of {len(tasks)}; ask for fewer, or give eval tasks "
            "of their own"
        )
    keys = {task.id: content_key(task) for task in tasks}
    ranked = sorted(set(keys.values()), key=lambda key: _rank(key, seed))
    sizes = Counter(keys[task.id] for task in tasks)
    chosen: set[str] = set()
    count = 0
    for key in ranked:
        if count >= n_eval:
            break
        chosen.add(key)
        count += sizes[key]
    train = [task for task in tasks if keys[task.id] not in chosen]
    held_out = [task for task in tasks if keys[task.id] in chosen]
    if not train:
        raise TaskError(
            f"holding out {n_eval} tasks leaves none to train on, since equal rows stay together; "
            "give eval tasks"
        )
    check_disjoint(train, held_out)
    return train, held_out


def shuffled(tasks: Iterable[Task], seed: int) -> list[Task]:
    """Return tasks in an order that depends only on their ids and the seed."""
    return sorted(tasks, key=lambda task: _rank(task.id, seed))


def _rank(key: str, seed: int) -> bytes:
    return blake2b(f"{seed}/{key}".encode("utf-8", "surrogatepass"), digest_size=8).digest()


def check_disjoint(train: Iterable[Task], held_out: Iterable[Task]) -> None:
    """Raise `TaskError` for the first task whose id or content is in both splits."""
    held = list(held_out)
    ids = {task.id for task in held}
    contents = {content_key(task): task.id for task in held}
    for task in train:
        if task.id in ids:
            raise TaskError(
                f"task {task.id} is in training and held out; take it from one of them, or set "
                "eval.overlap"
            )
        if (twin := contents.get(content_key(task))) is not None:
            raise TaskError(
                f"task {task.id} of training has the content of the held-out task {twin}; take it "
                "from one of them"
            )
