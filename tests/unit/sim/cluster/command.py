"""In-process runs of the command `python -m meshrl.sim.cluster`."""

from __future__ import annotations

import contextlib
import gc
import io
from dataclasses import dataclass

from meshrl.sim.cluster.__main__ import main


@dataclass
class CommandResult:
    """Exit status and output of a command."""

    returncode: int
    stdout: str
    stderr: str


def run_command(*words: str) -> CommandResult:
    """Run the command with these words in this process and return its captured result."""
    out, errors, threshold = io.StringIO(), io.StringIO(), gc.get_threshold()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            status = main(words)
    finally:
        gc.set_threshold(*threshold)
    return CommandResult(status, out.getvalue(), errors.getvalue())
