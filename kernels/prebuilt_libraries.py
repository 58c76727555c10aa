"""Prebuilt libraries for hosts without a compiler, such as images.

`python -m meshrl.kernels FOLDER` compiles them, each for several kinds of processor; a host that
has the folder in $MESHRL_NATIVE loads the most capable one that its processor can run. A name has a
digest of the sources and flags, so that no library of another version is loaded.
"""

from __future__ import annotations

import hashlib
import os
import platform
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DIRECTORY_VARIABLE = "MESHRL_NATIVE"
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
ROOT_UID = 0


@dataclass(frozen=True)
class ProcessorKind:
    """Kind of processor: its name for compilers, and the features that Linux lists of it."""

    name: str
    flags: tuple[str, ...]
    features: frozenset[str]


_V3 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"])
_V4 = _V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
# The most capable first. The sources are written for these register widths and for bfloat16
# products in hardware. Other architectures have no kind and use PyTorch.
PROCESSOR_KINDS = {
    "x86_64": (
        ProcessorKind("v4-bf16", ("-march=x86-64-v4", "-mavx512bf16"), _V4 | {"avx512_bf16"}),
        ProcessorKind("v4", ("-march=x86-64-v4",), _V4),
        ProcessorKind("v3", ("-march=x86-64-v3",), _V3),
    )
}


def list_processor_kinds() -> tuple[ProcessorKind, ...]:
    """Return the kinds of this machine's architecture, the most capable first."""
    return PROCESSOR_KINDS.get(platform.machine(), ())


def get_file_name(
    name: str, definition: str, kind: ProcessorKind, flags: Sequence[str], sources: Sequence[Path]
) -> str:
    """Return the file name of a library that is compiled from these for such a processor."""
    hasher = hashlib.sha256()
    for part in (definition, *flags, *kind.flags):
        hasher.update(part.encode() + b"\0")
    for path in sources:
        hasher.update(path.read_bytes())
    return f"{name}-{kind.name}-{hasher.hexdigest()[:20]}.so"


def find_prebuilt(
    name: str, definition: str, flags: Sequence[str], sources: Sequence[Path]
) -> Path | None:
    """Return the prebuilt library for this processor, or None."""
    folder = os.environ.get(DIRECTORY_VARIABLE)
    if not folder:
        return None
    able = set(read_processor_features().split())
    for kind in list_processor_kinds():
        path = Path(folder, get_file_name(name, definition, kind, flags, sources))
        if kind.features <= able and is_trusted(path, ROOT_UID):
            return path
    return None


def read_processor_features() -> str:
    """Return the features of the processor, as Linux names them (x86: flags; ARM: Features)."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def is_trusted(path: Path, *trusted_uids: int) -> bool:
    """Return True if only trusted users can write to a path that is no link.

    The owner must be this user or one of `trusted_uids`.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    link, written = stat.S_ISLNK(found.st_mode), found.st_mode & WRITABLE_BY_OTHERS
    return found.st_uid in (os.getuid(), *trusted_uids) and not link and not written
