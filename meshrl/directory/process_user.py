"""The user whom a container runs processes as: often one without a home directory that it can write
to, or even a name, both of which libraries take for granted when they look for a place to cache.
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
    """`home` is the home directory of this process, and of all that it starts, where the user has
    none that it can write to; and its number its name where it has none.
    """
    if not os.access(os.path.expanduser("~"), os.W_OK | os.X_OK):  # "~" itself: nobody knows
        home.mkdir(parents=True, exist_ok=True, mode=0o777 & ~PRIVATE_UMASK)
        os.environ["HOME"] = str(home)
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        os.environ.setdefault("USER", f"user{os.getuid()}")


def ensure_temporary_home() -> None:
    """The same for a command that keeps nothing: only where no home directory is known at all. The
    home directory is a new one, as other users may have made files in any known one.
    """
    if os.path.expanduser("~") == "~":
        home = tempfile.mkdtemp(prefix="meshrl-home-")
        atexit.register(shutil.rmtree, home, ignore_errors=True)
        os.environ["HOME"] = home
