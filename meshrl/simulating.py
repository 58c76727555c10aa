"""`meshrl simulate`: a scenario on a simulated cluster, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def run(
    scenario: str, what_if: Sequence[str], changes: Sequence[str], out: Path | None = None
) -> int:
    """The exit status; without a scenario those that are here are named."""
    words = [sys.executable, "-m", "sim.cluster", *([scenario] if scenario else [])]
    words += [f"--what-if={one}" for one in what_if] + [f"--set={one}" for one in changes]
    words += [f"--out={out}"] if out is not None else []
    return subprocess.run(words, check=False).returncode
