"""Reports of test processes that lose their lease, written to the original stderr.

Pytest captures stderr, so that a worker would otherwise exit without a message.
"""

from __future__ import annotations

import os
from typing import NoReturn

from meshrl.common.mesh.runtime.lease import LEASE_LOST_EXIT_STATUS

_heard = 2


def listen() -> None:
    """Retain this process's present stderr for later reports."""
    global _heard
    _heard = os.dup(2)


def report(text: str) -> None:
    """Write a text to the user of this run, past pytest's capture of the output."""
    os.write(_heard, text.encode())


def report_lost_lease(why: str) -> NoReturn:
    """Report a lost lease and exit; passed to `Mesh` in place of its own exit."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "a process of a test")
    report(f"\n{test}: {why}\n")
    os._exit(LEASE_LOST_EXIT_STATUS)
