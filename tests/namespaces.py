"""Namespaces of this machine, of which hosts for tests are made: `loadtests.hosts` makes them."""

from __future__ import annotations

import os
import shutil
import subprocess

SPACES = ("--net", "--pid", "--fork", "--mount", "--uts", "--ipc")


def are_permitted() -> bool:
    """True if this process may make the namespaces that hosts are, and their tunnel."""
    if os.geteuid() != 0 or not os.path.exists("/dev/net/tun") or not shutil.which("unshare"):
        return False
    return subprocess.run(["unshare", *SPACES, "true"], capture_output=True).returncode == 0
