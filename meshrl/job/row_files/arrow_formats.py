"""Readers of rows in Parquet files and Arrow streams."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import ConfigError
from meshrl.job.row_files.dataset_row import DatasetRow, explain_bad_value


def read_parquet(path: Path, name: str) -> Iterator[DatasetRow]:
    """Yield the rows of a Parquet file; `name` is the file's in messages."""
    arrow = _import_pyarrow(name)
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
    except arrow.ArrowInvalid as error:
        raise ConfigError(f"{name}: not Parquet ({error})") from error
    with file:
        yield from _read_batches(name, file.iter_batches())


def read_arrow(path: Path, name: str) -> Iterator[DatasetRow]:
    """Yield the rows of an Arrow stream, as `save_to_disk` of `datasets` writes it."""
    arrow = _import_pyarrow(name)
    try:
        with arrow.OSFile(str(path)) as opened, arrow.ipc.open_stream(opened) as stream:
            yield from _read_batches(name, stream)
    except (OSError, arrow.ArrowInvalid) as error:
        message = str(error).partition(". Detail")[0]
        raise ConfigError(
            f"{name} cannot be read: {message}", fix="Save the dataset again"
        ) from error


READERS = {".parquet": read_parquet, ".arrow": read_arrow}


def _read_batches(name: str, batches: Any) -> Iterator[DatasetRow]:
    number = 0
    for batch in batches:
        for value in batch.to_pylist():
            number += 1
            place = f"{name}, row {number}"
            try:
                yield DatasetRow.from_value(place, value)
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"{place}: {explain_bad_value(value)}",
                    fix="Use only text, numbers, lists and tables",
                ) from error


def _import_pyarrow(name: str) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise ConfigError(
            f"{name}: the package pyarrow, which reads this file, is not installed",
            fix="Run `pip install 'meshrl[data]'`",
        ) from error
    return pyarrow
