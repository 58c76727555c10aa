"""Where the tests find an interpreter that has SGLang."""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def python() -> Path:
    """Of `make test-sglang`, or another that $MESHRL_SGLANG_PYTHON names."""
    named = os.environ.get("MESHRL_SGLANG_PYTHON")
    return Path(named) if named else REPOSITORY / ".venvs/sglang/bin/python"
