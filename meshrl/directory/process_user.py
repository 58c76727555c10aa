"""User of a container's processes: often one without a writable home directory, or even a name.

Libraries take both for granted when they choose a cache directory.
"""

from __future__ import annotations

import atexit
import os
import pwd
import shutil
import tempfile
from pathlib import Path

from meshrl.common.mesh.process.entry.child import PRIVATE_UMASK


def ensure_home(home: Path) -> None:
    """Set `home` as the home directory of this process and its children if the user has no writable
    one.

    Set the user's number as its name if it has none.
    """
    if not os.access(os.path.expanduser("~"), os.W_OK | os.X_OK):  # "~" itself: no home is known
        home.mkdir(parents=True, exist_ok=True, mode=0o777 & ~PRIVATE_UMASK)
        os.environ["HOME"] = str(home)
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        os.environ.setdefault("USER", f"user{os.getuid()}")


def ensure_temporary_home() -> None:
    """Set a temporary home directory for a command that stores nothing, only if no home is known.

    The directory is a new one, as other users may have made files in any known one.
    """
    if os.path.expanduser("~") == "~":
        home = tempfile.mkdtemp(prefix="meshrl-home-")
        atexit.register(shutil.rmtree, home, ignore_errors=True)
        os.environ["HOME"] = home
