"""Path of an interpreter with SGLang, which `make test-sglang` sets.

Other commands skip these tests even if SGLang is installed: a server takes half a minute to start.
"""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
NOWHERE = Path("no interpreter: see make test-sglang")


def python() -> Path:
    named = os.environ.get("MESHRL_SGLANG_PYTHON")
    return Path(named) if named else NOWHERE
