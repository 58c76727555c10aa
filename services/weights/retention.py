"""What must stay: the newest few checkpoints up to the committed one and those still being written,
and versions that somebody comes back to.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.config import INITIAL
from common.state.jobs import JobRow


def expired(names: Sequence[str], committed: str, keep: int) -> list[str]:
    """Names (sorted, oldest first) that no recovery can need.

    The committed checkpoint and the `keep` - 1 before it stay, and so does everything after it: a
    step that is being committed has written its checkpoint already. Without a committed one nothing
    goes.
    """
    if committed not in names:
        return []
    position = list(names).index(committed)
    return list(names[: max(0, position + 1 - max(1, keep))])


def pinned(row: JobRow) -> set[str]:
    """Manifests of a job's versions that stay whatever checkpoints say: the current one, the best
    one, and the first one while it is the reference."""
    reference = row.document.get("models", {}).get("reference", {})
    initial = row.initial_manifest if reference.get("path") == INITIAL else ""
    return {row.manifest, row.best_manifest, initial} - {""}
