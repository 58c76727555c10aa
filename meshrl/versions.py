"""What `meshrl --version` says."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path


def line() -> str:
    """The version as installed, or where the sources are that run without having been."""
    try:
        version = metadata.version("meshrl")
    except metadata.PackageNotFoundError:
        version = f"from {Path(__file__).parents[1]}, not installed"
    return f"meshrl {version} (Python {platform.python_version()})"
