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
            f"the received path {path_text} is not below {directory}",
            where=where,
            fix="The sender was not started by this mesh: run `meshrl hosts` to list its hosts",
        )
    return path
