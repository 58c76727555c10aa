"""A process that runs tests and loses its lease says why it ends where somebody hears it: pytest
has taken its stderr, and the worker of a run would end without a word.
"""

from __future__ import annotations

import os
from typing import NoReturn

from meshrl.common.mesh.runtime.lease import LEASE_LOST_EXIT_STATUS

_heard = 2


def listen() -> None:
    """From now on that is this process's stderr as it is now."""
    global _heard
    _heard = os.dup(2)


def report(text: str) -> None:
    """Write a text where the user of this run reads it, though pytest captures the output."""
    os.write(_heard, text.encode())


def lost(why: str) -> NoReturn:
    """What `Mesh` is to call when its lease is lost, in place of an end that nobody hears of."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "a process of a test")
    report(f"\n{test}: {why}\n")
    os._exit(LEASE_LOST_EXIT_STATUS)
