"""Files with a secret, which a person or an orchestrator provides to a process."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from meshrl.common.base.errors import ConfigError


def read_secret(path: Path, description: str, fix: str, max_chars: int) -> str:
    """Read a secret of at most `max_chars` characters from a file.

    Args:
        path: file with the secret.
        description: name of the secret, for errors.
        fix: remedy for a missing file, for errors.
        max_chars: maximum number of characters.

    Raises ConfigError if the file cannot be read, or if other users can read it.
    """
    try:
        with path.open(encoding="utf-8") as file:
            about = os.fstat(file.fileno())
            found = file.read(max_chars).strip()
    except (OSError, UnicodeDecodeError) as error:
        why = f"the {description} cannot be read: {error}"
        raise ConfigError(why, where=str(path), fix=fix) from None
    # Root may share the file with a group or a container on purpose.
    given_by_root = about.st_uid == 0 != os.geteuid()
    if stat.S_IMODE(about.st_mode) & 0o077 and not given_by_root:
        raise ConfigError(
            f"other users can read the {description}",
            where=str(path),
            fix=f"Run `chmod 600 {path}`; the file is a secret",
        )
    return found
