"""Files of a data source: one file, those of a pattern or directory, or those of a split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import ConfigError
from meshrl.job.hub.repository import is_hub_id
from meshrl.job.row_files import repository_layout
from meshrl.job.row_files.data_source import DataSource
from meshrl.job.row_files.row_file import RowFile


def has_source(source: DataSource) -> bool:
    """Return True if the path of a source, which may be a pattern, exists or can be a Hub id."""
    path = Path(source.path)
    return path.exists() or bool(_match_pattern(path)) or is_hub_id(source.path)


def find_files(source: DataSource) -> list[RowFile]:
    """Return the files of a source.

    Raises ConfigError, whose `where` may be the key of a wrong option, for a path that is no
    dataset or has no such split.
    """
    path = Path(source.path)
    if is_hub_id(source.path):  # the path of a file is absolute
        return repository_layout.fetch_split(source)
    if path.is_dir():
        return _find_in_directory(path, source)
    return [RowFile.from_path(file) for file in _match_pattern(path) or [path]]


def _match_pattern(path: Path) -> list[Path]:
    return sorted(path.parent.glob(path.name)) if "*" in path.name else []


def _find_in_directory(path: Path, source: DataSource) -> list[RowFile]:
    """Return a directory's files: of `save_to_disk`, or Parquet files."""
    if (path / "dataset_dict.json").is_file():
        splits = _read_json_list(path / "dataset_dict.json", "splits")
        _require_split(source, splits, path)
        path = path / source.split
    if (path / "state.json").is_file():
        return _list_saved_files(path)
    files = sorted(path.glob("*.parquet"))
    splits = sorted({name.partition("-")[0] for f in files if "-of-" in (name := f.name)})
    if len(splits) > 1:
        _require_split(source, splits, path)
        files = [file for file in files if file.name.startswith(f"{source.split}-")]
    if files:
        return [RowFile.from_path(file) for file in files]
    if not any(path.iterdir()):
        raise ConfigError(
            f"{path} is empty",
            fix="Name a JSONL, JSON, CSV or Parquet file, or a directory of one dataset",
        )
    names = repository_layout.find_split(path, source, str(path))
    return [RowFile.from_path(path / name) for name in names]


def _require_split(source: DataSource, splits: list[str], path: Path) -> None:
    if source.split not in splits:
        raise repository_layout.make_split_error(source, splits, str(path))


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
