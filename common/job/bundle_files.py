"""The files of a bundle, checked by whoever reads them: a bundle never changes under a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from common.errors import Damaged

BLOCK = 1 << 20
LARGE = 64 << 20  # bytes; of larger ones, which are weights, only the size is looked at in passing
START_OVER = "Put it back from a copy of the run. To start over: meshrl run JOB"

Files = Mapping[str, Sequence[Any]]  # by their names in the bundle: bytes and digest


def listed(directory: Path) -> dict[str, list[Any]]:
    """Bytes and digest of each file of a bundle, by its name in it."""
    found = sorted(path for path in directory.rglob("*") if path.is_file())
    return {
        path.relative_to(directory).as_posix(): [path.stat().st_size, digest(path)]
        for path in found
    }


def digest(path: Path) -> str:
    """xxh3_128 of a file's bytes."""
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            hasher.update(block)
    return hasher.hexdigest()


def digest_of(files: Files) -> str:
    """xxh3_128 over names, sizes and digests of all files, in name order: the bundle's own."""
    told = "".join(f"{len(name)}:{name}:{size}:{of};" for name, (size, of) in sorted(files.items()))
    return xxhash.xxh3_128_hexdigest(told.encode())


def check(directory: Path, files: Files, below: str = "", *, large: bool = False) -> None:
    """Damaged, which names the first file that is not what was packed: of one file or folder, or of
    all. Weights are read for it only if `large`; extra files, such as what Python has compiled, are
    not looked at.
    """
    chosen = {n: f for n, f in files.items() if not below or _lies(n, below)}
    for name, (size, packed) in chosen.items():
        path = directory / name
        if not path.is_file():
            raise Damaged(f"{path} is missing", fix=START_OVER)
        if (found := path.stat().st_size) != size:
            raise Damaged(f"{path} has {found} bytes instead of {size}", fix=START_OVER)
        if (large or size <= LARGE) and digest(path) != packed:
            raise Damaged(f"{path} is not what was packed: its digest differs", fix=START_OVER)


def of(document: Mapping[str, Any]) -> Files:
    """The files that a job's document lists; none in a document from before they were."""
    found: Files = document["bundle"].get("files", {})
    return found


def _lies(name: str, below: str) -> bool:
    return name == below or name.startswith(f"{below}/")


def folder(path: str) -> str:
    """The folder of a name in a bundle; the name itself where it lies in none."""
    parent, _, _ = path.rpartition("/")
    return parent or path
