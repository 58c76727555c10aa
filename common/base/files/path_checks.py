"""Checks of paths that other processes name, against a directory of this process."""

from __future__ import annotations

from pathlib import Path

from meshrl.common.base.errors import Refused


def resolve_below(directory: Path, path_text: str, where: str) -> Path:
    """Resolve `path_text` without links; raise Refused if it is not below `directory`.

    `where` names the receiver of the path.
    """
    path = Path(path_text).resolve()
    if not path.is_relative_to(directory.resolve()):
        raise Refused(
            f"it was told of {path_text}, which is not below {directory}",
            where=where,
            fix="Whoever says so is not started as this mesh does it: `meshrl hosts` lists who may",
        )
    return path
