"""Paths that other processes name: those below a directory that this process knows itself."""

from __future__ import annotations

from pathlib import Path

from meshrl.common.base.errors import Refused


def resolve_below(directory: Path, path_text: str, where: str) -> Path:
    """What is `named`, without links. Refused: it lies elsewhere. `where`: who was told of it."""
    path = Path(path_text).resolve()
    if not path.is_relative_to(directory.resolve()):
        raise Refused(
            f"it was told of {path_text}, which is not below {directory}",
            where=where,
            fix="Whoever says so is not started as this mesh does it: `meshrl hosts` lists who may",
        )
    return path
