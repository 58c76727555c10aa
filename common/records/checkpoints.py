"""Checkpoints in a run's files: the last committed one, and verification of their content."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from meshrl.common.base.digest import compute_file_digest, ignore_byte_count
from meshrl.common.base.errors import BadMessage, CorruptData, MeshError
from meshrl.common.base.files import corruption
from meshrl.common.base.files.disk_sync import fsync_path, fsync_tree
from meshrl.common.base.files.json_lines import decode_row
from meshrl.common.base.files.sealed_documents import read_sealed

NAME_PATTERN = re.compile(r"step-\d{3,}-\d{6,}-[0-9a-f]{8}")
STATE_FOLDER = "state"  # below a checkpoint's directory: all training state except the weights

MANIFEST_FILE = "version.manifest"  # below STATE_FOLDER: the weights' manifest, as in the store
BASE_MANIFEST_FILE = "base.manifest"  # beside it, for adapters: the manifest of their base


def format_checkpoint_name(lineage: int, step: int, manifest: str) -> str:
    """Return the name of a checkpoint's manifest without `.json`, and of its directory."""
    return f"step-{lineage:03d}-{step:06d}-{manifest[:8]}"


def find_newest_due_version(version: int, interval_steps: int, last_version: int) -> int:
    """Return the newest version up to this one for which a checkpoint is due.

    One is due every `interval_steps`, and one at the last version.
    """
    return version if version >= last_version else version - version % interval_steps


def list_manifest_paths(run_dir: Path) -> list[Path]:
    """Return checkpoint manifests by lineage and step; some steps may never have been committed."""
    return sorted((run_dir / "checkpoints").glob("step-*.json"))


def find_committed(run_dir: Path) -> Path | None:
    """Return the manifest of the last recorded commit, else the newest one; None if there is none.

    Manifests that fail their check are skipped.
    """
    found = {path.stem: path for path in list_manifest_paths(run_dir)}
    names = [name for name in _iter_committed_names(run_dir) if name in found]
    for name in dict.fromkeys([*names, *reversed(found)]):
        with suppress(MeshError):
            read_manifest(found[name])
            return found[name]
    return None


def list_older_names(run_dir: Path, name: str) -> list[str]:
    """Return the names of checkpoints of earlier steps than the named one, newest first."""
    step = int(name.split("-")[2])
    names = [path.stem for path in reversed(list_manifest_paths(run_dir))]
    return [other for other in names if other < name and int(other.split("-")[2]) < step]


# -- content --------------------------------------------------------------------------------------


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's manifest: job, lineage, step, weights, account and
    files.

    Raises:
        NotFound: There is no manifest.
        CorruptData: It is not what was written, or belongs to another checkpoint.
    """
    manifest = read_sealed(path)
    try:
        name = format_checkpoint_name(manifest["lineage"], manifest["step"], manifest["weights"])
    except (KeyError, TypeError) as error:
        raise CorruptData(
            f"it is not a manifest of a checkpoint: {error!r}", where=str(path)
        ) from error
    if name != path.stem:
        raise CorruptData(f"it belongs to {name}", where=str(path))
    try:
        check_paths(manifest.get("files", ()))
    except (BadMessage, TypeError) as error:
        raise CorruptData(f"it lists no files of a checkpoint: {error}", where=str(path)) from error
    return manifest


def check_paths(files: Iterable[str]) -> None:
    """Raise BadMessage for the first path that leads out of a checkpoint's directory.

    Writers of checkpoints must not choose other files of a host.
    """
    for name in files:
        path = PurePosixPath(name)
        if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
            raise BadMessage(f"{name!r:.80} is not a path in a checkpoint")


def list_files(directory: Path) -> list[str]:
    """Return the relative path of every file below a directory."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return [path.relative_to(directory).as_posix() for path in files]


def compute_file_digests(
    directory: Path, on_progress: Callable[[int], None] = ignore_byte_count
) -> dict[str, str]:
    """Return the digest of every file below a directory by relative path.

    Args:
        on_progress: Called with byte counts as files are read.
    """
    return {
        name: compute_file_digest(directory / name, on_progress) for name in list_files(directory)
    }


def check_files(directory: Path, files: dict[str, str], folder: str = STATE_FOLDER) -> None:
    """Read and check the files below `folder` of a checkpoint's directory.

    Args:
        files: Digests by path from the manifest.
    Raises:
        CorruptData: Names the first file that does not match.
    """
    listed = {name: digest for name, digest in files.items() if Path(name).is_relative_to(folder)}
    if not listed:
        raise CorruptData("its manifest lists no files of it", where=str(directory / folder))
    for name, digest in listed.items():
        path = directory / name
        if not path.is_file():
            raise CorruptData("it is missing", where=str(path))
        if compute_file_digest(path) != digest:
            raise CorruptData("its content does not match its digest", where=str(path))


def verify_checkpoint(path: Path) -> dict[str, Any]:
    """Return the manifest as `read_manifest` does, after checking the files of the training state.

    Weights are checked chunk by chunk when they are fetched; chunks missing in the store are made
    again from the checkpoint.

    Raises:
        CorruptData: Names the first file that is not what was written.
        NotFound: There is no manifest.
    """
    manifest = read_manifest(path)
    check_files(path.with_suffix(""), manifest["files"])
    return manifest


def quarantine_checkpoint(path: Path) -> Path | None:
    """Move a corrupt checkpoint's manifest and directory to the run's quarantine.

    Returns:
        New path of the manifest, or of the directory if there was no manifest; None if another
        process has moved them.
    """
    moved = None
    for part in (path.with_suffix(""), path):
        with suppress(FileNotFoundError):
            moved = corruption.quarantine(part, path.parent.parent)
    return moved


def install_checkpoint(
    scratch: Path,
    directory: Path,
    expected: Mapping[str, str] = MappingProxyType({}),
    on_progress: Callable[[int], None] = ignore_byte_count,
) -> dict[str, str]:
    """Make `scratch` a checkpoint's directory, completely or not at all even on power failure.

    An existing directory stays if its content is the same.

    Args:
        on_progress: Called with byte counts as files are read.
    Returns:
        Digests of the files by path.
    Raises:
        CorruptData: A file does not have its `expected` digest.
    """
    digests = compute_file_digests(scratch, on_progress)
    check_digests(scratch, digests, expected)
    if directory.exists() and compute_file_digests(directory, on_progress) != digests:
        corruption.quarantine(directory, directory.parent.parent)
    if not directory.exists():
        fsync_tree(scratch)
        scratch.rename(directory)
    fsync_path(directory.parent)
    return digests


def check_digests(scratch: Path, actual: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """Raise CorruptData if the `actual` digest of a file is not the `expected` one."""
    for name, digest in expected.items():
        if actual.get(name) != digest:
            raise CorruptData(
                "a file of a checkpoint differs from what was just written",
                where=str(scratch / name),
                fix="Check the disk; the next checkpoint is written independently of this file",
            )


# -- events ---------------------------------------------------------------------------------------


def read_last_committed_name(run_dir: Path) -> str:
    """Return the checkpoint named by the last recorded step commit; empty if there is none."""
    return next(_iter_committed_names(run_dir), "")


def _iter_committed_names(run_dir: Path) -> Iterator[str]:
    for event in _iter_events(run_dir, "step", direction=-1):
        if event["kind"] == "step" and (name := event["fields"].get("checkpoint", "")):
            yield name


def read_last_version(run_dir: Path) -> int:
    """Return the version of the last step commit or lineage on record; 0 without one."""
    for event in _iter_events(run_dir, "step", "lineage", direction=-1):
        if event["kind"] in ("step", "lineage", "restored"):
            return int(event["fields"]["version"])
    return 0


def read_last_lineage(run_dir: Path) -> int:
    """Return the highest lineage in a run's record or its checkpoints; 0 if there is none."""
    found = [int(path.name.split("-")[1]) for path in list_manifest_paths(run_dir)]
    events = _iter_events(run_dir, "lineage")
    found += (event["fields"].get("lineage", 0) for event in events)
    return max(found, default=0)


def _iter_events(run_dir: Path, *quoted_words: str, direction: int = 1) -> Iterator[Any]:
    """Yield a run's events whose lines contain one of these words in quotes.

    `direction` -1 yields the last one first. Corrupt and truncated lines are skipped.
    """
    path, quoted = run_dir / "events.jsonl", [f'"{word}"'.encode() for word in quoted_words]
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    for line in lines[::direction]:
        if any(word in line for word in quoted) and (event := decode_row(line)) is not None:
            yield event


@dataclass(frozen=True)
class BestVersion:
    """Best version according to the evaluations so far."""

    version: int
    manifest_digest: str  # of its weights
    value: float  # metric of the comparison


def read_best_version(run_dir: Path) -> BestVersion | None:
    """Return the best version in the run's record.

    None if no evaluation has compared versions since the last lineage that abandoned the best one.
    """
    found: BestVersion | None = None
    for event in _iter_events(run_dir, "evaluation", "lineage"):
        kind, fields = event["kind"], event["fields"]
        if kind == "lineage" and found is not None and found.version > int(fields["version"]):
            found = None
        elif kind == "evaluation" and fields.get("best"):
            found = BestVersion(
                int(fields["step"]), str(fields["manifest"]), float(fields["value"])
            )
    return found


def is_initial(path: Path) -> bool:
    """Return True if the checkpoint has version 0, before any training."""
    return path.name.split("-")[2] == "000000"
