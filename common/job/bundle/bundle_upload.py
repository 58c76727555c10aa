"""Bundle that a client uploads in pieces.

Its list of files is validated before any byte is accepted, and its bytes before the job counts.
Names are not trusted. Each stays below the bundle's own folders. Every file is created here, new
and empty, so that no link can redirect a write.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path, PurePosixPath
from typing import Any, get_args, get_type_hints

from meshrl.common.base.digest import DIGEST_DIGITS
from meshrl.common.base.errors import CorruptData, Refused
from meshrl.common.job.bundle import bundle_files
from meshrl.common.job.config import INITIAL, JobConfig
from meshrl.common.job.constraints import FilePath
from meshrl.common.job.named_files import TOKENIZER, list_named_files

FOLDERS = ("data", "model", "models", "modules", "tokenizer")  # of a bundle; see meshrl.job.bundle
MAX_FILES = 10_000  # of a bundle: sources, rows, and the shards of several models
MAX_BYTES = 64 << 30  # of a bundle: a model of 30 billion parameters in bfloat16
MAX_NAME_BYTES = 255  # of one part of a path, the limit of file systems
MAX_PATH_DEPTH = 16  # folders
MESH_PATH_KEYS = frozenset({"out", "cache"})  # paths that the mesh sets itself
PATH_MARKER = get_args(FilePath)[1]  # distinguishes a path's type from other text


def validate_files(files: Any, digest: str) -> dict[str, tuple[int, str]]:
    """Return the files of a bundle, name -> (bytes, digest); Refused if the list is invalid."""
    if not isinstance(files, dict) or not files or len(files) > MAX_FILES:
        raise Refused(f"a bundle must list 1 to {MAX_FILES} files")
    found = {name: _validate_file(name, about) for name, about in files.items()}
    total = sum(size for size, _ in found.values())
    if total > MAX_BYTES:
        raise Refused(f"the bundle has {total} bytes; the limit is {MAX_BYTES}")
    folders = {str(parent) for name in found for parent in PurePosixPath(name).parents}
    if both := sorted(folders & found.keys()):
        raise Refused(f"{both[0]!r} is both a file and a folder")
    if bundle_files.compute_digest({name: list(about) for name, about in found.items()}) != digest:
        raise Refused("the bundle's digest does not match its list of files")
    return found


def _validate_file(name: Any, size_and_digest: Any) -> tuple[int, str]:
    if not isinstance(name, str) or not _is_bundle_path(name):
        raise Refused(f"{name!r:.300} is not a valid file name in a bundle")
    if not isinstance(size_and_digest, list | tuple) or len(size_and_digest) != 2:
        raise Refused(f"{name!r} needs a size and a digest")
    size, digest = size_and_digest
    if type(size) is not int or size < 0 or type(digest) is not str or len(digest) != DIGEST_DIGITS:
        raise Refused(f"{size_and_digest!r:.100} is not a valid size and digest of {name!r}")
    return size, digest


def _is_bundle_path(name: str) -> bool:
    """Return True if `name` is the plain path of a file in one of a bundle's folders."""
    path = PurePosixPath(name)
    if str(path) != name or path.is_absolute() or not 2 <= len(path.parts) <= MAX_PATH_DEPTH:
        return False
    if path.parts[0] not in FOLDERS or ".." in path.parts:
        return False
    if any(not char.isprintable() for char in name):
        return False
    return all(len(part.encode(errors="replace")) <= MAX_NAME_BYTES for part in path.parts)


def check_config_paths(config: JobConfig, files: Mapping[str, Any]) -> None:
    """Raise Refused if the job names files outside its bundle, or a program or account of this
    host.

    A path outside the bundle may be of another host, or of this one.
    """
    named = {file.key: file for file in list_named_files(config)}
    for key, file in named.items():
        if not file.path and key != TOKENIZER:
            continue
        there = file.bundle_path in files or any(
            name.startswith(f"{file.bundle_path}/") for name in files
        )
        if file.path != file.bundle_path or not there:
            raise Refused(
                f"{key} = {file.path!r:.200}: in an uploaded job it must be {file.bundle_path!r}"
            )
    initial = {
        f"models.{role}.path"
        for role, model in config.models.models_by_role.items()
        if model.path == INITIAL
    }
    known = named.keys() | initial | MESH_PATH_KEYS
    for key, reference in (*_iterate_paths(config), *_iterate_host_references(config, files)):
        if reference and key not in known:
            raise Refused(
                f"{key} = {reference!r:.200}: an uploaded job must not name a file, program or "
                "account of the mesh's host",
                fix="Remove the key, or ask the mesh's own user to submit the job",
            )


def _iterate_paths(table: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, value) of every key that holds a path, found by its type."""
    for name, kind in get_type_hints(type(table), include_extras=True).items():
        value, key = getattr(table, name), f"{prefix}{name}"
        if is_dataclass(value):
            yield from _iterate_paths(value, f"{key}.")
        elif isinstance(value, list):
            for i, item in enumerate(value):
                if is_dataclass(item):
                    yield from _iterate_paths(item, f"{key}[{i}].")
        elif PATH_MARKER in getattr(kind, "__metadata__", ()):
            yield key, value


def _iterate_host_references(
    config: JobConfig, files: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of other references to this host: commands, directories, accounts."""
    yield "sandbox.runner", config.sandbox.runner
    flags = config.rollout.sglang_options
    yield "rollout.sglang_options", [flag for flag in flags if "/" in flag or "~" in flag]
    for server, command in config.environment.mcp.items():
        if not _is_bundle_command(command, files):
            yield f"environment.mcp.{server}", command
    tracking = config.tracking
    yield "tracking.tensorboard", isinstance(tracking.tensorboard, str) and tracking.tensorboard
    yield "tracking.wandb", tracking.wandb
    yield "tracking.trackio", tracking.trackio


def _is_bundle_command(command: list[str], files: Mapping[str, Any]) -> bool:
    """Return True if a command runs Python on a file of the bundle, and names no file elsewhere."""
    if len(command) < 2 or command[0] != "python" or f"modules/{command[1]}" not in files:
        return False
    return not any(
        word.startswith(("/", "~")) or "=/" in word or ".." in PurePosixPath(word).parts
        for word in command[2:]
    )


def create_empty_files(directory: Path, files: Mapping[str, tuple[int, str]]) -> None:
    """Create all files of a bundle, empty, below a new directory."""
    for name in files:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))


def write_piece(path: Path, size: int, offset: int, content: bytes) -> None:
    """Write bytes of a file of `size` bytes; Refused if they exceed it. Pieces may be repeated."""
    if offset < 0 or offset + len(content) > size:
        raise Refused(
            f"bytes {offset} to {offset + len(content)} exceed the file's size of {size} bytes",
            where=path.name,
        )
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
    try:
        view = memoryview(content)
        while view:
            written = os.pwrite(descriptor, view, offset)
            view, offset = view[written:], offset + written
    finally:
        os.close(descriptor)


def check_complete(directory: Path, files: Mapping[str, tuple[int, str]]) -> None:
    """Read all files and raise Refused for the first one that differs from the packed file."""
    try:
        bundle_files.check_files(directory, {n: list(f) for n, f in files.items()}, read_large=True)
    except CorruptData as error:
        name = error.message.replace(f"{directory}/", "")
        raise Refused(
            f"the received bundle is corrupt: {name}", fix="Submit the job again"
        ) from error
