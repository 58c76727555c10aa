"""The retention policy: what must stay. That is the newest few checkpoints up to the committed one
and those still being written, versions that a step or a checkpoint is about to name, and those that
somebody comes back to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.job.config import INITIAL
from common.records.checkpoints import newest_due
from common.state.jobs import JobRow


@dataclass(frozen=True, order=True)
class Number:
    """Which version of its job a manifest is."""

    lineage: int
    version: int


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


def awaited(row: JobRow, versions: Mapping[str, Number]) -> set[str]:
    """The manifests among `versions` that something is about to name.

    A step that is being committed names a version above the current one. A checkpoint names the
    version that it was begun with, however long it is written; the next one is begun when it is
    done or given up, and before its own step commits, so no other than the newest is being written.
    """
    every, last = row.document["training"]["checkpoint_every"], row.document["budget"]["steps"]
    current = Number(row.lineage, row.version)
    written = Number(row.lineage, newest_due(row.version, every, last))
    return {
        manifest for manifest, number in versions.items() if number > current or number == written
    }
