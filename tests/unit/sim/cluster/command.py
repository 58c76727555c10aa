"""The command `python -m meshrl.sim.cluster`, run in this process."""

from __future__ import annotations

import contextlib
import gc
import io
from dataclasses import dataclass

from meshrl.sim.cluster.__main__ import main


@dataclass
class Ran:
    """Exit status and output of a command."""

    returncode: int
    stdout: str
    stderr: str


def ran(*words: str) -> Ran:
    """Run the command with these words; it writes into the result, and changes nothing here."""
    out, errors, threshold = io.StringIO(), io.StringIO(), gc.get_threshold()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            status = main(words)
    finally:
        gc.set_threshold(*threshold)
    return Ran(status, out.getvalue(), errors.getvalue())
