"""Pins: versions that a person keeps, whatever the run needs. Each is a file beside the chunks,
which any process of the host writes and removes, also while no mesh runs.

    <store>/pins/<job>/<manifest>.json    {"run", "lineage", "version", "note", "at"}

Nobody is asked for a pin to hold: it is there before the chunks are looked at, and those count as
written then, so a collection that began earlier leaves them (`ChunkStore.delete`), and every later
one sees the pin.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from meshrl.common.api.weights import Manifest
from meshrl.common.base.digest import DIGITS
from meshrl.common.base.errors import Damaged, NotFound
from meshrl.common.base.files import documents
from meshrl.common.base.files.durable import sync
from meshrl.common.weights.chunks.chunks import ChunkStore
from meshrl.common.weights.layout.manifest import read_whole

PINS = "pins"  # in the store's directory


@dataclass(frozen=True)
class Pin:
    """Why a version stays."""

    run: str  # the run's directory, which tells it from a later run of that name
    lineage: int
    version: int
    note: str = ""
    at: float = 0.0  # seconds of the epoch


def all_pins(store: Path) -> dict[str, dict[str, Pin]]:
    """Those of all jobs, by the job's name and by manifest."""
    return {
        unquote(path.name): pins(store, unquote(path.name)) for path in (store / PINS).glob("*")
    }


def pins(store: Path, job: str) -> dict[str, Pin]:
    """Those of a job, by manifest. A file that is damaged pins by its name."""
    found: dict[str, Pin] = {}
    for path in _directory(store, job).glob("*.json"):
        if len(path.stem) == DIGITS:
            try:
                found[path.stem] = Pin(**documents.decode(path.read_bytes(), str(path)))
            except (Damaged, TypeError, FileNotFoundError):
                found[path.stem] = Pin("", -1, -1, "its file is damaged")
    return found


def pin(chunks: ChunkStore, job: str, manifest: str, made: Pin) -> None:
    """Keeps a version until it is unpinned. NotFound when the store has it no longer as a whole;
    then nothing is pinned. StorageFull, Damaged.
    """
    path = _directory(chunks.directory, job) / f"{manifest}.json"
    before = path.is_file()
    documents.write(path, asdict(made))
    sync(path.parent.parent)
    try:
        hold(chunks, manifest)
    except BaseException:
        if not before:
            unpin(chunks.directory, job, manifest)
        raise


def hold(chunks: ChunkStore, manifest: str) -> Manifest:
    """The version's manifest, once its chunks count as written just now; NotFound, Damaged."""
    found = read_whole(chunks.read, manifest)
    base = [] if found.base is None else [found.base.digest]
    missing = [digest for digest in [manifest, *base, *names(found)] if not chunks.touch(digest)]
    if missing:
        raise NotFound(
            f"version {found.version} of {found.job} is not stored as a whole any more: "
            f"{len(missing)} of its chunks are missing, as {missing[0]}",
            where=str(chunks.directory),
            fix="`meshrl weights list` says which versions are",
        )
    return found


def names(manifest: Manifest) -> list[str]:
    """The chunks that a manifest names, each once."""
    return sorted({tensor.chunk for tensor in manifest.tensors})


def sizes(manifests: Iterable[Manifest]) -> dict[str, int]:
    """The bytes of each chunk that these name, by its digest: up to the end of the last piece."""
    found: dict[str, int] = {}
    for manifest in manifests:
        for piece in manifest.tensors:
            found[piece.chunk] = max(found.get(piece.chunk, 0), piece.offset + piece.size)
    return found


def unpin(store: Path, job: str, manifest: str) -> bool:
    """Whether it was pinned; it goes with the next collection, unless something else keeps it."""
    path = _directory(store, job) / f"{manifest}.json"
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    sync(path.parent)
    with suppress(OSError):  # others are pinned
        path.parent.rmdir()
    return True


def _directory(store: Path, job: str) -> Path:
    return store / PINS / quote(job, safe="")
