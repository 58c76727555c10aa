"""Which MeshRL this is: processes of one mesh must be of the same release."""

from __future__ import annotations

from functools import cache
from importlib import metadata


@cache
def read_release() -> str:
    """Its version; "sources" where it runs without having been installed."""
    try:
        return metadata.version("meshrl")
    except metadata.PackageNotFoundError:
        return "sources"
