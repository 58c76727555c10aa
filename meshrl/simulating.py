"""`meshrl simulate`: a scenario on a simulated cluster, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

VALIDITY, ABOUT = "validity", "The simulator beside a virtual mesh of 64 gangs, and a real one"


def run(
    scenario: str,
    what_if: Sequence[str],
    changes: Sequence[str],
    out: Path | None = None,
    run_dir: Path | None = None,
) -> int:
    """The exit status; without a scenario and a run those that are here are named."""
    if scenario == VALIDITY:
        return _validity(any((what_if, changes, out, run_dir)))
    words = [sys.executable, "-m", "sim.cluster", *([scenario] if scenario else [])]
    words += [f"--from={run_dir}"] if run_dir is not None else []
    words += [f"--what-if={one}" for one in what_if] + [f"--set={one}" for one in changes]
    words += [f"--out={out}"] if out is not None else []
    status = subprocess.run(words, check=False).returncode
    if not scenario and run_dir is None:
        print(f"{VALIDITY:12} {ABOUT}")
    return status


def _validity(more: bool) -> int:
    """Holds the simulator against a virtual mesh and a real one."""
    if more:
        print(f"{VALIDITY} takes no options: python -m loadtests.simulator --help", file=sys.stderr)
        return 2
    words = [sys.executable, "-m", "loadtests.simulator", "--arms=broad,real"]
    return subprocess.run(words, check=False).returncode
