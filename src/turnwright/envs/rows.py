"""Rows of any library as plain data: the same row reads alike from JSONL, Parquet, pandas,
pyarrow and datasets."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

from turnwright.errors import TaskError

_UNCHANGED = (str, int, bool, float, bytes, type(None))

_BATCH = 256
"""Rows that a dataset converts at once."""


def plain_row(row: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a row as plain data, without its empty values.

    Arrow gives every object the keys of all objects of its column, null where a row had none, so
    null and missing are the same there. A key whose value is null, NaN, NaT or NA is therefore
    dropped at every depth, from every source. Items of lists stay, also null ones
    (`enum: ["a", null]`), and JSON text stays as it is written.

    Arrays of numpy become lists, except pictures (uint8 with two axes or more); scalars of numpy
    and pyarrow become numbers and texts, and times their ISO text. Objects of other kinds stay.
    """
    result: dict[Any, Any] = {}
    for key, item in row.items():
        plain = _plain(item)
        if not _is_empty(plain):
            result[_plain(key)] = plain
    return result


def _is_empty(plain: Any) -> bool:
    return plain is None or (type(plain) is float and plain != plain)


def _plain(value: Any) -> Any:
    if type(value) in _UNCHANGED:
        return value
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    if type(value) is dict or isinstance(value, Mapping):
        return plain_row(value)

    numpy = _loaded("numpy")
    if numpy and isinstance(value, (numpy.ndarray, numpy.generic)):
        return _of_numpy(value)
    pyarrow = _loaded("pyarrow")
    if pyarrow and isinstance(value, pyarrow.Scalar):
        return _plain(value.as_py())
    pandas = _loaded("pandas")
    if pandas and (value is pandas.NaT or value is pandas.NA):
        return None
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    return value


def _of_numpy(value: Any) -> Any:
    """Convert an array or a scalar, except a picture."""
    # In nanoseconds, times would become bare integers.
    if value.dtype.kind == "M":
        value = value.astype("datetime64[us]")
    elif value.dtype.kind == "m":
        value = value.astype("timedelta64[us]")
    is_picture = value.dtype == "uint8" and value.ndim >= 2
    return value if is_picture else _plain(value.tolist())


def _loaded(library: str) -> Any:
    """Return a library that a value may be of: only one that is imported already has made any."""
    return sys.modules.get(library)


def rows_of(source: Any, name: str) -> Iterable[Any]:
    """Return the rows of an object: a pandas DataFrame, a pyarrow Table, a `datasets.Dataset`, or
    an iterable of rows.

    Raises:
        TaskError: for a mapping, such as a `DatasetDict`.
    """
    if isinstance(source, Mapping):
        keys = ", ".join(map(repr, list(source)[:8]))
        raise TaskError(
            f"{name}: {type(source).__name__} is no list of rows; name one of its parts: {keys}"
        )
    rows: Iterable[Any] = source
    pandas = _loaded("pandas")
    if pandas and isinstance(source, pandas.DataFrame):
        return list(source.to_dict("records"))
    pyarrow = _loaded("pyarrow")
    if pyarrow and isinstance(source, (pyarrow.Table, pyarrow.RecordBatch)):
        return rows_of_table(source)
    datasets = _loaded("datasets")
    if datasets and isinstance(source, datasets.Dataset):
        # A custom format is code of the user, which makes the rows.
        is_transformed = source.format["type"] == "custom"
        return rows if is_transformed else _rows_of_dataset(source)
    return rows


def row_mapping(row: Any) -> Any:
    """Return a row of pandas (a `Series`) as a mapping; any other row as it is."""
    pandas = _loaded("pandas")
    if pandas and isinstance(row, pandas.Series):
        return row.to_dict()
    return row


def _rows_of_dataset(source: Any) -> Iterator[Any]:
    """Yield the rows of a `datasets.Dataset` as its files hold them, so that both read alike,
    whatever its format is."""
    for table in source.with_format("arrow").iter(batch_size=_BATCH):
        for row in rows_of_table(table):
            yield {key: _stored(value, source.features[key]) for key, value in row.items()}


def _stored(value: Any, feature: Any) -> Any:
    """Return a value with images that are files as paths: the library opens them, so they need no
    directory of ours."""
    if isinstance(feature, _loaded("datasets").Image) and isinstance(value, Mapping):
        has_file = value.get("bytes") is None and value.get("path") is not None
        return Path(value["path"]) if has_file else value
    if isinstance(feature, Mapping):
        if not isinstance(value, Mapping):
            return value
        return {key: _stored(item, feature[key]) for key, item in value.items()}

    # Of a list, the feature of its items.
    inner = feature[0] if isinstance(feature, list) else vars(feature).get("feature")
    if inner is None or not isinstance(value, list):
        return value
    return [_stored(item, inner) for item in value]


def rows_of_table(table: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of an Arrow table or batch; columns of JSON (`arrow.json`) are read."""
    readers = _json_readers(table.schema)
    for row in table.to_pylist():
        for name, read in readers.items():
            row[name] = read(row[name])
        yield row


def _json_readers(fields: Iterable[Any]) -> dict[str, Callable[[Any], Any]]:
    """Return the readers of those Arrow fields that hold JSON texts, by name."""
    readers = {}
    for field in fields:
        reader = _json_reader(field.type)
        if reader is not None:
            readers[field.name] = reader
    return readers


def _json_reader(kind: Any) -> Callable[[Any], Any] | None:
    """Return a function that reads the JSON texts within values of an Arrow type; None for a type
    without."""
    pyarrow = _loaded("pyarrow")
    types = pyarrow.types
    if isinstance(kind, pyarrow.BaseExtensionType) and kind.extension_name == "arrow.json":
        return lambda text: json.loads(text) if isinstance(text, str) else text

    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        read_item = _json_reader(kind.value_type)
        if read_item is None:
            return None
        return lambda items: None if items is None else [read_item(item) for item in items]

    if not types.is_struct(kind):
        return None
    readers = _json_readers(kind)
    if not readers:
        return None

    def read_struct(value: Any) -> Any:
        if value is None:
            return None
        return {key: readers[key](item) if key in readers else item for key, item in value.items()}

    return read_struct
