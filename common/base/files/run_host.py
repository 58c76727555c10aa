"""Where the runs of a mesh are at home: the head's directories, and whether this host sees them.

Nobody assumes that a path of another host is the same directory here. The head writes a probe, a
file of random bytes that are new at each start, and Redis names its host, its root and its digest:
who reads those bytes below that root sees that very directory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshrl.common.base.digest import compute_digest
from meshrl.common.base.files import documents

PROBE_PATH = "mesh/probe"  # below the root
PROBE_BYTES = 32  # of a probe: nobody guesses it, and no copy of a directory has that of today


@dataclass(frozen=True)
class RunHost:
    """The host where runs are at home, its root, and the digest of the probe there."""

    host: str
    root: str
    digest: str

    def is_visible_on(self, host: str, path: Path) -> bool:
        """Whether `path` of the home host is the same file or directory on `host`, which is this
        one. What lies outside of the root is proved by nothing, and counts as another's.
        """
        if host == self.host:
            return True
        root = Path(self.root)
        if not path.is_relative_to(root):
            return False
        try:
            return compute_digest((root / PROBE_PATH).read_bytes()) == self.digest
        except OSError:
            return False


def create_run_host(host: str, root: Path, probe: bytes) -> RunHost:
    """Writes the probe, for this user's eyes; what Redis is to tell of it."""
    root = root.absolute()
    documents.write_bytes(root / PROBE_PATH, probe)
    return RunHost(host, str(root), compute_digest(probe))
