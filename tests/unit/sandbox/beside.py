"""Programs in processes of their own, as this user or as another."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.load import scaled

ROOT = Path(__file__).parents[3]
PLAIN = ("-m", "tests.unit.sandbox.plain_user", sys.executable)
STILL_ROOT = ("-m", "tests.unit.sandbox.plain_user", "--still-root", sys.executable)


def printed(program: str, *arguments: str, become: Sequence[str] = ()) -> str:
    """What a program prints, which must end well."""
    done = subprocess.run(
        [sys.executable, *become, "-c", program, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=scaled(100),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
