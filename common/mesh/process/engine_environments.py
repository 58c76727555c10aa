"""Virtual environments of engines that need a separate interpreter."""

from __future__ import annotations

import os
from pathlib import Path

DEFAULT_ROOT = "~/.cache/meshrl/engines"


def locate_environment(name: str) -> Path:
    """Return the path of an engine's virtual environment below $MESHRL_ENGINES, which may not
    exist.
    """
    return Path(os.environ.get("MESHRL_ENGINES") or DEFAULT_ROOT).expanduser() / name


def locate_python(environment: Path) -> Path:
    """Return the Python interpreter of a virtual environment."""
    return environment / "bin" / "python"
