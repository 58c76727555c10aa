"""The virtual environments of engines that need an interpreter of their own."""

from __future__ import annotations

import os
from pathlib import Path

DEFAULT = "~/.cache/meshrl/engines"


def home(name: str) -> Path:
    """The virtual environment of an engine, whether or not it is there: below $MESHRL_ENGINES."""
    return Path(os.environ.get("MESHRL_ENGINES") or DEFAULT).expanduser() / name


def interpreter(environment: Path) -> Path:
    """The Python interpreter of a virtual environment."""
    return environment / "bin" / "python"
