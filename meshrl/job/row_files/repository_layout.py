"""Files of a split in the layout of the Hub's dataset repositories, as `datasets` finds them."""

from __future__ import annotations

import logging
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

from yaml import YAMLError

from meshrl.common.base.errors import ConfigError
from meshrl.job.hub.repository import Repository
from meshrl.job.row_files.data_source import DataSource
from meshrl.job.row_files.row_file import READERS, RowFile, get_format_suffix

if TYPE_CHECKING:
    from meshrl.job.hub.snapshots import Snapshot

DESCRIPTION_FILES = ("README.md", ".huggingface.yaml", "dataset_infos.json")
CONVERTED_REVISION = "refs/convert/parquet"  # branch to which the Hub writes Parquet files


def find_commit(source: DataSource) -> Repository:
    """Return the repository of a source at its commit."""
    snapshot = _open_snapshot(source)
    return replace(snapshot.repository, revision=snapshot.commit)


def fetch_split(source: DataSource) -> list[RowFile]:
    """Fetch the files of a source's split from the Hub, and return them."""
    snapshot, part = _open_snapshot(source), (source.config, source.split)
    if part not in snapshot.splits:
        snapshot.splits[part] = _find_in_snapshot(snapshot, source)
    names = snapshot.splits[part]
    directory = snapshot.fetch(names)
    return [RowFile.from_path(directory / name, f"{source.path}/{name}") for name in names]


def _find_in_snapshot(snapshot: Snapshot, source: DataSource) -> list[str]:
    """Return the paths in a snapshot of the files of a source's split."""
    name, key = source.path.rpartition("/")[2], source.get_option_key("revision")
    if f"{name}.py" in snapshot.sizes:
        raise ConfigError(
            f"{source.path}: the dataset needs its script {name}.py, and scripts are not run",
            fix=f"Set {key} = {CONVERTED_REVISION!r}, where the Hub has most of them as Parquet",
        )
    described = snapshot.fetch(n for n in DESCRIPTION_FILES if n in snapshot.sizes)
    with tempfile.TemporaryDirectory(prefix="meshrl-hub-") as scratch:
        # `datasets` reads the description and names alone, so that only needed files are fetched.
        outline = Path(scratch) / name
        for file in snapshot.sizes:
            (outline / file).parent.mkdir(parents=True, exist_ok=True)
            (outline / file).touch()
        for file in DESCRIPTION_FILES:
            if (described / file).is_file():
                shutil.copyfile(described / file, outline / file)
        return find_split(outline, source, source.path)


def find_split(directory: Path, source: DataSource, owner: str) -> list[str]:
    """Return the paths below a directory of the files of a source's split.

    `datasets` selects them by README.md, or else by the names of files and folders. `owner` is the
    directory's name in messages.
    """
    datasets = _import_datasets(source)
    with tempfile.TemporaryDirectory(prefix="meshrl-datasets-") as scratch:
        root = directory.resolve()
        try:
            configs = datasets.get_dataset_config_names(str(root))
            default = datasets.get_dataset_default_config_name(str(root))
            config = source.config or default
            if config not in configs:
                raise _make_config_error(source, owner, configs)
            builder = datasets.load_dataset_builder(str(root), config, cache_dir=scratch)
        except (OSError, ValueError, RuntimeError, TypeError, YAMLError, BadZipFile) as error:
            why = str(error).replace(str(root), owner)
            raise ConfigError(
                f"{owner}: the package datasets finds no rows: {why}",
                fix="Name the files instead: JSONL, JSON, CSV or Parquet",
            ) from error
    splits = {str(split): list(files) for split, files in builder.config.data_files.items()}
    if source.split not in splits:
        raise make_split_error(source, list(splits), owner)
    names = [Path(file).relative_to(root) for file in splits[source.split]]
    if other := [name for name in names if get_format_suffix(name) not in READERS]:
        raise ConfigError(
            f"{owner}: the file {other[0]} has none of the formats {', '.join(READERS)}",
            fix="Convert it, for example with Dataset.to_parquet of the package datasets",
        )
    return [str(name) for name in names]


def make_split_error(source: DataSource, splits: list[str], owner: str) -> ConfigError:
    """Return the error of a dataset without the source's split."""
    key = source.get_option_key("split")
    slices = ", without a slice in brackets" if "[" in source.split else ""
    return ConfigError(
        f"{key} = {source.split!r}: {owner} has no such split; it has {', '.join(splits)}",
        where=key,
        fix=f"Set {key} to one of them{slices}",
    )


def _make_config_error(source: DataSource, owner: str, configs: list[str]) -> ConfigError:
    """Return the error of a dataset whose configuration is missing or does not exist."""
    key = source.get_option_key("config")
    has = f"it has {', '.join(configs)}"
    wrong = f"{key} = {source.config!r}: {owner} has no such configuration; {has}"
    if not source.config:
        wrong = f"{key} is missing: {owner} has several configurations and no default; {has}"
    return ConfigError(wrong, where=key, fix=f"Set {key} to one of them")


def _open_snapshot(source: DataSource) -> Snapshot:
    from meshrl.job.hub.snapshots import open_snapshot  # its import takes a while

    key = source.get_option_key("revision")
    return open_snapshot(Repository(source.path, "dataset", source.revision, source.key, key))


def _import_datasets(source: DataSource) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{source.path}: the package datasets, which finds its files, is not installed",
            fix="Run `pip install 'meshrl[data]'`",
        ) from error
    # A description without metadata is no mistake.
    logging.getLogger("huggingface_hub.repocard").setLevel(logging.ERROR)
    return datasets
