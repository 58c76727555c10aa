"""The virtual environments of engines that need an interpreter of their own."""

from __future__ import annotations

import os
from pathlib import Path

DEFAULT_ROOT = "~/.cache/meshrl/engines"


def locate_environment(name: str) -> Path:
    """The virtual environment of an engine, whether or not it is there: below $MESHRL_ENGINES."""
    return Path(os.environ.get("MESHRL_ENGINES") or DEFAULT_ROOT).expanduser() / name


def locate_python(environment: Path) -> Path:
    """The Python interpreter of a virtual environment."""
    return environment / "bin" / "python"
