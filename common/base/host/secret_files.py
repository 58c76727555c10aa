"""Files that hold a secret, put where a process finds them by a person or an orchestrator."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from meshrl.common.base.errors import ConfigError


def read_secret(path: Path, description: str, fix: str, max_chars: int) -> str:
    """What is in the file, of `most` characters at most; ConfigError when it cannot be read, or
    when others than its reader can. `what` it is, and the `fix` for one that is not there.
    """
    try:
        with path.open(encoding="utf-8") as file:
            about = os.fstat(file.fileno())
            found = file.read(max_chars).strip()
    except (OSError, UnicodeDecodeError) as error:
        why = f"no {description} can be read there: {error}"
        raise ConfigError(why, where=str(path), fix=fix) from None
    # Root may have put it where one group, or a container, reads it: it knows whom that tells.
    given_by_root = about.st_uid == 0 != os.geteuid()
    if stat.S_IMODE(about.st_mode) & 0o077 and not given_by_root:
        raise ConfigError(
            f"others can read the {description}",
            where=str(path),
            fix=f"chmod 600 {path}; it is a secret",
        )
    return found
