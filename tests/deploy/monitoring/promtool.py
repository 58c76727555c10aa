"""Runs of promtool for tests of compose/monitoring."""

from __future__ import annotations

import subprocess
from pathlib import Path

from loadtests.monitoring.files import PROMETHEUS
from tests.load import scaled

PROMTOOL_S = 60.0  # a tenth of a second on an idle machine


def run_promtool(*words: str | Path, cwd: Path = PROMETHEUS) -> str:
    """Return promtool's output; AssertionError with all of it if promtool finds a mistake."""
    command = ["promtool", *map(str, words)]
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=scaled(PROMTOOL_S)
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout
