"""Files of a data source: one file, those of a pattern or directory, or those of a split."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import ConfigError
from meshrl.job.row_files import arrow_formats, text_formats
from meshrl.job.row_files.data_source import DataSource
from meshrl.job.row_files.dataset_row import DatasetRow

READERS = text_formats.READERS | arrow_formats.READERS  # by the suffix of a file


@dataclass(frozen=True)
class RowFile:
    """File of rows, and its name in messages."""

    path: Path
    name: str
    suffix: str  # of its format

    @classmethod
    def from_path(cls, path: Path, name: str = "") -> RowFile:
        """Return a file whose suffix names its format; `name` defaults to the path."""
        suffix = Path(path.name.removesuffix(text_formats.COMPRESSED_SUFFIX)).suffix
        return cls(path, name or str(path), suffix)

    def read(self) -> Iterator[DatasetRow]:
        """Yield the rows; a file of an unknown suffix has an object on each line."""
        return READERS.get(self.suffix, text_formats.read_jsonl)(self.path, self.name)


def has_source(source: DataSource) -> bool:
    """Return True if the path of a source, which may be a pattern, exists."""
    path = Path(source.path)
    return path.exists() or bool(_match_pattern(path))


def find_files(source: DataSource) -> list[RowFile]:
    """Return the files of a source.

    Raises ConfigError, whose `where` may be the key of a wrong option, for a path that is no
    dataset or has no such split.
    """
    path = Path(source.path)
    if path.is_dir():
        return _find_in_directory(path, source)
    return [RowFile.from_path(file) for file in _match_pattern(path) or [path]]


def _match_pattern(path: Path) -> list[Path]:
    return sorted(path.parent.glob(path.name)) if "*" in path.name else []


def _find_in_directory(path: Path, source: DataSource) -> list[RowFile]:
    """Return a directory's files: of `save_to_disk`, or Parquet files."""
    if (path / "dataset_dict.json").is_file():
        splits = _read_json_list(path / "dataset_dict.json", "splits")
        require_split(source, splits, str(path))
        path = path / source.split
    if (path / "state.json").is_file():
        return _list_saved_files(path)
    files = sorted(path.glob("*.parquet"))
    splits = sorted({name.partition("-")[0] for f in files if "-of-" in (name := f.name)})
    if len(splits) > 1:
        require_split(source, splits, str(path))
        files = [file for file in files if file.name.startswith(f"{source.split}-")]
    if not files:
        raise ConfigError(
            f"{path} is not a dataset: it contains neither state.json nor *.parquet",
            fix="Name a JSONL, JSON, CSV or Parquet file, a directory of Parquet files, or one "
            "that datasets.Dataset.save_to_disk wrote",
        )
    return [RowFile.from_path(file) for file in files]


def require_split(source: DataSource, splits: list[str], owner: str) -> None:
    """Raise ConfigError unless `owner` has the source's split."""
    if source.split not in splits:
        key = source.get_option_key("split")
        raise ConfigError(
            f"{key} = {source.split!r}: {owner} has no such split; it has {', '.join(splits)}",
            where=key,
            fix=f"Set {key} to one of them",
        )


def _list_saved_files(path: Path) -> list[RowFile]:
    """Return the Arrow streams that `save_to_disk` wrote, which state.json lists."""
    if _read_json_list(path / "state.json", "_indices_data_files", []):
        raise ConfigError(
            f"{path} contains a selection of rows, not the rows themselves",
            fix="Call flatten_indices() before you save the dataset",
        )
    entries = _read_json_list(path / "state.json", "_data_files")
    files = [path / str(e["filename"] if isinstance(e, dict) else e) for e in entries]
    return [RowFile(file, str(file), ".arrow") for file in files]


def _read_json_list(file: Path, key: str, default: list[Any] | None = None) -> list[Any]:
    """Return a list in a JSON file that `datasets` wrote; raise ConfigError if it is missing."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        listed = found.get(key, default) or default
        if isinstance(listed, list):
            return listed
        message = f"the file has no list {key!r}"
    except (OSError, ValueError, AttributeError) as error:
        message = str(error)
    raise ConfigError(
        f"{file} is not a file of the package datasets: {message}", fix="Save the dataset again"
    )
