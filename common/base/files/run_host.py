"""Run host of a mesh: the head's directories, and their visibility on this host.

A path of another host may be a different directory here. The head writes a probe, a file of random
bytes that are new at each start, and stores its host, root and digest in Redis. A process that
reads those bytes below that root shares that directory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshrl.common.base.digest import compute_digest
from meshrl.common.base.files import documents

PROBE_PATH = "mesh/probe"  # below the root
PROBE_BYTES = 32  # too many to guess; an older copy of the directory has another probe


@dataclass(frozen=True)
class RunHost:
    """Host of the runs, its root, and the digest of the probe below it."""

    host: str
    root: str
    probe_digest: str

    def is_visible_on(self, host: str, path: Path) -> bool:
        """Return True if `path` of the run host is the same file on `host`, which is this one.

        A path outside of the root cannot be verified, and counts as different.
        """
        if host == self.host:
            return True
        root = Path(self.root)
        if not path.is_relative_to(root):
            return False
        try:
            return compute_digest((root / PROBE_PATH).read_bytes()) == self.probe_digest
        except OSError:
            return False


def create_run_host(host: str, root: Path, probe: bytes) -> RunHost:
    """Write the probe, readable by this user only, and return the record for Redis."""
    root = root.absolute()
    documents.write_bytes(root / PROBE_PATH, probe)
    return RunHost(host, str(root), compute_digest(probe))
