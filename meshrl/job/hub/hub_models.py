"""Models of the Hub: their descriptions when a job is read, their weights when it is packed."""

from __future__ import annotations

import fnmatch
import json
from dataclasses import replace
from pathlib import Path

from meshrl.common.base.errors import ConfigError
from meshrl.common.model.files.weight_files import INDEX_FILE, OTHER_FORMATS, SINGLE_FILE
from meshrl.job.hub.repository import Repository, parse_snapshot_path

DESCRIPTION_PATTERNS = ("*.json", "*.txt", "*.model", "*.jinja")  # in the top folder


def fetch_description(repository: Repository) -> Path:
    """Fetch a model's files without its weights; return their directory in the Hub's cache."""
    from meshrl.job.hub.snapshots import open_snapshot

    snapshot = open_snapshot(repository)
    names = [name for name in snapshot.sizes if "/" not in name]
    if "config.json" not in names:
        raise _make_error(repository, "the repository has no config.json, so it is no model")
    if snapshot.is_listed and INDEX_FILE not in names and SINGLE_FILE not in names:
        for pattern, (description, fix) in OTHER_FORMATS.items():
            if fnmatch.filter(names, pattern):
                wrong = f"the repository has no safetensors, but {description}"
                raise _make_error(repository, wrong, fix)
        raise _make_error(repository, "the repository has no safetensors")
    # The index comes with the weights: a directory with an index and no weights is incomplete.
    return snapshot.fetch(
        name
        for name in names
        if name != INDEX_FILE and any(fnmatch.fnmatch(name, p) for p in DESCRIPTION_PATTERNS)
    )


def has_weights(path: str) -> bool:
    """Return True unless a path is a snapshot in the Hub's cache that lacks its weights."""
    if parse_snapshot_path(path) is None or (Path(path) / SINGLE_FILE).is_file():
        return True
    index = Path(path) / INDEX_FILE
    return index.is_file() and all((Path(path) / name).is_file() for name in _list_shards(index))


def fetch_weights(path: str, key: str) -> None:
    """Fetch the weights of a model whose path, the value of `key`, is in the Hub's cache."""
    from meshrl.job.hub.snapshots import open_snapshot

    repository = parse_snapshot_path(path)
    if repository is None:
        return
    snapshot = open_snapshot(replace(repository, key=key))
    if INDEX_FILE in snapshot.sizes:
        snapshot.fetch([INDEX_FILE])
        snapshot.fetch(_list_shards(Path(path) / INDEX_FILE))
    else:
        snapshot.fetch([SINGLE_FILE])


def _list_shards(index: Path) -> list[str]:
    return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))


def _make_error(repository: Repository, message: str, fix: str = "") -> ConfigError:
    return ConfigError(
        f"{repository.id}: {message}",
        fix=fix
        or "Use a repository with config.json and safetensors, in the layout of transformers",
    )
