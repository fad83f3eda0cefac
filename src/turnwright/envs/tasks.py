"""Task sources, and the split into training and held-out tasks.

`load_tasks` reads one source; `make_task_source` combines the two of an environment into the
function that `EnvSpec.tasks` calls. How a row becomes a task is in `task_from_row`.
"""

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
HELD_OUT_SHARE = 5
"""One row in this many is held out of a dataset without splits."""

_log = logging.getLogger(__name__)


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
    """Read tasks from a file, a Hugging Face dataset directory, a Python function or an iterable of
    rows.

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
        TaskError: when the source or a row cannot be read, the source is empty, or two different
            tasks have the same id.

    Example::

        >>> [task] = load_tasks([{"question": "2 + 2?", "answer": "4", "level": 1}])
        >>> task.messages[0].content, task.answer, task.info
        ('2 + 2?', '4', {'level': 1})
    """
    folder: Path | None = None
    if isinstance(source, (str, Path)):
        name = str(source)
        path = Path(source)
        folder = path if path.is_dir() else path.parent
        rows: Iterable[tuple[Any, str]] = read_rows(path)
    else:
        name = "tasks"
        if callable(source):
            name = f"{getattr(source, '__name__', type(source).__name__)}()"
            source = _call(source, name, split, n, seed)
        rows = ((row, f"{name} row {number}") for number, row in enumerate(rows_of(source, name)))
    root = None if media_root is None else Path(media_root)
    images = ImageSource(folder, return_multi_modal_inputs, root)

    tasks: dict[str, Task] = {}
    places: dict[str, str] = {}
    all_columns: dict[str, None] = {}  # in the order in which rows have them
    for row, where in rows:
        if not isinstance(row, Task):
            task = task_from_row(row, where, images, columns)
            all_columns |= dict.fromkeys([*task.info, *task.other_columns])
        elif columns:
            raise TaskError(
                f"{where}: is a tw.Task already; columns = {dict(columns)} maps rows, so leave "
                "it out"
            )
        else:
            task = row

        first = tasks.setdefault(task.id, task)
        first_place = places.setdefault(task.id, where)
        if first is not task and content_key(first) != content_key(task):
            raise TaskError(
                f"{where}: the id {task.id!r} belongs to another task at {first_place}; give each "
                "task its own id"
            )

    if not tasks:
        raise TaskError(f"{name}: no tasks in it; give at least one row")
    return [_with_empty_columns(task, all_columns) for task in tasks.values()]


def _with_empty_columns(task: Task, all_columns: Iterable[str]) -> Task:
    """Return a task with the columns that other rows have and its own lacks, as Parquet and Arrow
    have them."""
    columns_of_task = task.columns
    empty = {column: None for column in all_columns if column not in columns_of_task}
    if not empty:
        return task
    return replace(task, other_columns={**task.other_columns, **empty})


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
    if callable(train):
        taken = _parameters(train)
        if taken and "split" not in taken:
            if inspect.ismethod(train) and "split" in _parameters(train.__func__):
                raise TaskError(
                    f"{name}: tasks takes no self, so write @staticmethod above def "
                    f"{train.__name__}"
                )
            raise TaskError(
                f"{name}: a task function that takes {' and '.join(taken)} takes split too "
                "('train' or 'eval')"
            )

    read = functools.partial(
        load_tasks,
        return_multi_modal_inputs=return_multi_modal_inputs,
        columns=columns,
        media_root=media_root,
    )

    def source_of(split: str) -> TaskSource | None:
        return held_out if split == "eval" and held_out is not None else train

    @functools.cache
    def rows(split: str) -> tuple[Task, ...]:
        source = source_of(split)
        if source is None:
            raise TaskError(
                f"{name} has no {split} tasks; give it a tasks hook, or [[env]] tasks = a .jsonl "
                "file or file.py:function"
            )
        return tuple(read(source, split=split))

    @functools.cache
    def train_and_held_out() -> tuple[list[Task], list[Task]]:
        return split_tasks(rows("train"))

    def tasks(split: str, n: int, seed: int) -> list[Task]:
        source = source_of(split)
        if callable(source) and "split" in _parameters(source):
            chosen = read(source, split=split, n=n, seed=seed)
        elif held_out is not None:
            chosen = shuffled(rows(split), seed)
        else:
            train_rows, held_out_rows = train_and_held_out()
            chosen = shuffled(held_out_rows if split == "eval" else train_rows, seed)
        return chosen[:n] if n else chosen

    return tasks


def _call(
    source: Callable[..., Iterable[Any]], name: str, split: str, n: int, seed: int
) -> Iterable[Any]:
    """Call a task function, and report it while it takes long."""
    offered = {"split": split, "n": n, "seed": seed}
    qualified_name = getattr(source, "__qualname__", name)
    watch = threading.Timer(SLOW_S, _log.warning, (SLOW, qualified_name, SLOW_S, n, n))
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

    if not isinstance(result, Mapping):
        result = rows_of(result, name)
    if isinstance(result, (str, bytes, Mapping)) or not isinstance(result, Iterable):
        raise TaskError(
            f"{name}: returned {type(result).__name__}; a task function returns a list of tasks or "
            "rows"
        )
    return result


def _parameters(source: Callable[..., Any]) -> list[str]:
    """Return those of `split`, `n` and `seed` that a task function takes."""
    offered = ("split", "n", "seed")
    parameters = inspect.signature(source).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return list(offered)
    return [parameter.name for parameter in parameters if parameter.name in offered]


def content_key(task: Task) -> str:
    """Return a hash of a task's content.

    Its id, its environment, and its index and split in a dataset are no content.
    """
    places = ("index", "split")
    left_out = (*places, "id", "env")
    info = {key: value for key, value in task.info.items() if key not in left_out}
    extra_info = info.get("extra_info")
    if isinstance(extra_info, Mapping):
        info["extra_info"] = {key: value for key, value in extra_info.items() if key not in places}

    messages = [message.to_dict() for message in task.messages]
    images = [image.to_dict()["image"] for image in task.images]
    content = [messages, task.answer, images, info]
    text = json.dumps(content, sort_keys=True, default=repr, ensure_ascii=False)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def split_tasks(
    tasks: Sequence[Task], n_eval: int | None = None, seed: int = 0
) -> tuple[list[Task], list[Task]]:
    """Split tasks into (training, held-out) by a hash of their content, independent of their order.

    Rows of equal content stay in one split, whatever their ids, so a few more than `n_eval` may be
    held out; by default one in five. Raises `TaskError` when a split would be empty, or the splits
    overlap.
    """
    if n_eval is None:
        n_eval = len(tasks) // HELD_OUT_SHARE
    if n_eval and n_eval >= len(tasks):
        raise TaskError(
            f"{n_eval} tasks are to be held out of {len(tasks)}; ask for fewer, or give eval tasks "
            "of their own"
        )

    # Hold out whole contents, in the order of their ranks, until there are enough rows.
    keys = {task.id: content_key(task) for task in tasks}
    rows_by_key = Counter(keys[task.id] for task in tasks)
    held_out_keys: set[str] = set()
    held_out_rows = 0
    for key in sorted(set(keys.values()), key=lambda key: _rank(key, seed)):
        if held_out_rows >= n_eval:
            break
        held_out_keys.add(key)
        held_out_rows += rows_by_key[key]

    train = [task for task in tasks if keys[task.id] not in held_out_keys]
    held_out = [task for task in tasks if keys[task.id] in held_out_keys]
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
    held_out = list(held_out)
    held_out_ids = {task.id for task in held_out}
    id_of_content = {content_key(task): task.id for task in held_out}
    for task in train:
        if task.id in held_out_ids:
            raise TaskError(
                f"task {task.id} is in training and held out; take it from one of them, or set "
                "eval.overlap"
            )
        twin = id_of_content.get(content_key(task))
        if twin is not None:
            raise TaskError(
                f"task {task.id} of training has the content of the held-out task {twin}; take it "
                "from one of them"
            )
