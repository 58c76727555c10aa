"""Release of this MeshRL: processes of one mesh must have the same."""

from __future__ import annotations

from functools import cache
from importlib import metadata


@cache
def read_release() -> str:
    """Return the version; "sources" if MeshRL runs without installation."""
    try:
        return metadata.version("meshrl")
    except metadata.PackageNotFoundError:
        return "sources"
