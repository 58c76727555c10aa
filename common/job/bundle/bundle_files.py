"""Files of a bundle, checked by each reader: a bundle never changes during a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshrl.common.base.digest import check_digest, compute_file_digest
from meshrl.common.base.digest import compute_digest as digest_of_bytes
from meshrl.common.base.errors import CorruptData

LARGE_FILE_BYTES = 64 << 20  # larger files are weights: normally only their size is checked
RESTORE_FIX = "Restore it from a copy of the run, or start over with `meshrl run JOB`"

BundleFiles = Mapping[str, Sequence[Any]]  # by their names in the bundle: bytes and digest


def list_files(directory: Path) -> dict[str, list[Any]]:
    """Return bytes and digest of each file of a bundle, by its name in it."""
    found = sorted(path for path in directory.rglob("*") if path.is_file())
    return {
        path.relative_to(directory).as_posix(): [path.stat().st_size, compute_file_digest(path)]
        for path in found
    }


def compute_digest(files: BundleFiles) -> str:
    """Return the bundle's digest: of the names, sizes and digests of its files, in name order."""
    listing = "".join(
        f"{len(name)}:{name}:{size}:{of};" for name, (size, of) in sorted(files.items())
    )
    return digest_of_bytes(listing.encode())


def check_files(
    directory: Path, files: BundleFiles, below: str = "", *, read_large: bool = False
) -> None:
    """Raise CorruptData for the first file that differs from the packed one.

    Check the file or folder `below`, or all files. Weights are read only if `read_large`. Extra
    files, such as Python's compiled ones, are ignored. Refused for a bundle that an earlier version
    packed.
    """
    for name, (size, packed) in files.items():
        if below and name != below and not name.startswith(f"{below}/"):
            continue
        check_digest(packed, str(directory))
        path = directory / name
        if not path.is_file():
            raise CorruptData(f"{path} is missing", fix=RESTORE_FIX)
        if (found := path.stat().st_size) != size:
            raise CorruptData(f"{path} has {found} bytes instead of {size}", fix=RESTORE_FIX)
        if (read_large or size <= LARGE_FILE_BYTES) and compute_file_digest(path) != packed:
            raise CorruptData(
                f"{path} is corrupt: its digest differs from the packed file's", fix=RESTORE_FIX
            )


def read_file_list(document: Mapping[str, Any]) -> BundleFiles:
    """Return the files that a job's document lists; none in a document of an earlier version."""
    found: BundleFiles = document["bundle"].get("files", {})
    return found
