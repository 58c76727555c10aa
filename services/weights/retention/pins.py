"""Pins of versions that a user retains, independently of the run.

Each is a file beside the chunks. Any process of the host can write and remove it, also while no
mesh runs.

    <store>/pins/<job>/<manifest>.json    {"run", "lineage", "version", "note", "at"}

A pin needs no coordination. It is written before its chunks are checked and marked as written, so a
collection that started earlier skips them (`ChunkStore.delete_unchanged`), and every later one
reads the pin.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from meshrl.common.api.weights import Manifest
from meshrl.common.base.digest import DIGEST_DIGITS
from meshrl.common.base.errors import CorruptData, NotFound
from meshrl.common.base.files import documents
from meshrl.common.base.files.disk_sync import fsync_path
from meshrl.common.weights.chunks.chunk_store import ChunkStore
from meshrl.common.weights.layout.manifest import read_complete_manifest

PINS_FOLDER = "pins"  # in the store's directory


@dataclass(frozen=True)
class VersionPin:
    """Pin of a version."""

    run: str  # the run's directory, to distinguish it from a later run of that name
    lineage: int
    version: int
    note: str = ""
    at: float = 0.0  # seconds since the epoch


def read_all_pins(store: Path) -> dict[str, dict[str, VersionPin]]:
    """Return the pins of all jobs by job and manifest."""
    return {
        unquote(path.name): read_pins(store, unquote(path.name))
        for path in (store / PINS_FOLDER).glob("*")
    }


def read_pins(store: Path, job: str) -> dict[str, VersionPin]:
    """Return the pins of a job by manifest; a corrupt file still pins the manifest in its name."""
    found: dict[str, VersionPin] = {}
    for path in _pin_directory(store, job).glob("*.json"):
        if len(path.stem) == DIGEST_DIGITS:
            try:
                found[path.stem] = VersionPin(**documents.decode(path.read_bytes(), str(path)))
            except (CorruptData, TypeError, FileNotFoundError):
                found[path.stem] = VersionPin("", -1, -1, "its file is corrupt")
    return found


def pin_version(chunks: ChunkStore, job: str, manifest_digest: str, new_pin: VersionPin) -> None:
    """Pin a version until it is unpinned.

    Raises:
        NotFound: The store no longer has all of it; then nothing is pinned.
        StorageFull: The disk is full.
        CorruptData: A manifest is corrupt.
    """
    path = _pin_directory(chunks.directory, job) / f"{manifest_digest}.json"
    before = path.is_file()
    documents.write(path, asdict(new_pin))
    fsync_path(path.parent.parent)
    try:
        mark_version_written(chunks, manifest_digest)
    except BaseException:
        if not before:
            unpin_version(chunks.directory, job, manifest_digest)
        raise


def mark_version_written(chunks: ChunkStore, manifest_digest: str) -> Manifest:
    """Mark the version's chunks as written now and return its manifest. NotFound, CorruptData."""
    found = read_complete_manifest(chunks.read, manifest_digest)
    base = [] if found.base is None else [found.base.manifest]
    missing = [
        digest
        for digest in [manifest_digest, *base, *list_chunks(found)]
        if not chunks.mark_written(digest)
    ]
    if missing:
        raise NotFound(
            f"version {found.version} of {found.job} is not complete any more: {len(missing)} "
            f"of its chunks are missing, such as {missing[0]}",
            where=str(chunks.directory),
            fix="Run `meshrl weights list` to list complete versions",
        )
    return found


def list_chunks(manifest: Manifest) -> list[str]:
    """Return the distinct chunks of a manifest."""
    return sorted({tensor.chunk for tensor in manifest.tensors})


def compute_chunk_sizes(manifests: Iterable[Manifest]) -> dict[str, int]:
    """Return the size of each chunk by digest: up to the end of its last piece."""
    found: dict[str, int] = {}
    for manifest in manifests:
        for piece in manifest.tensors:
            found[piece.chunk] = max(found.get(piece.chunk, 0), piece.offset + piece.size_bytes)
    return found


def unpin_version(store: Path, job: str, manifest_digest: str) -> bool:
    """Remove a pin, and return True if there was one; the next collection may delete the
    version.
    """
    path = _pin_directory(store, job) / f"{manifest_digest}.json"
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    fsync_path(path.parent)
    with suppress(OSError):  # other versions are pinned
        path.parent.rmdir()
    return True


def _pin_directory(store: Path, job: str) -> Path:
    return store / PINS_FOLDER / quote(job, safe="")
