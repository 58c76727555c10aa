"""The retention policy: what must stay. That is the newest few checkpoints up to the committed one
and those still being written, versions that a step or a checkpoint is about to name, those that
somebody comes back to, and those that the job asks for (`[weights]`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshrl.common.job.config import INITIAL
from meshrl.common.records.checkpoints import find_newest_due_version
from meshrl.common.state.jobs import JobRow


@dataclass(frozen=True, order=True)
class VersionNumber:
    """Which version of its job a manifest is."""

    lineage: int
    version: int


def find_expired(names: Sequence[str], committed: str, keep_count: int) -> list[str]:
    """Names (sorted, oldest first) that no recovery can need.

    The committed checkpoint and the `keep_count` - 1 before it stay, and so does everything after
    it: a step that is being committed has written its checkpoint already. Without a committed one
    nothing goes.
    """
    if committed not in names:
        return []
    return list(names[: max(0, list(names).index(committed) + 1 - max(1, keep_count))])


def find_permanent(row: JobRow) -> set[str]:
    """Manifests of a job's versions that stay whatever checkpoints say: the current one, the best
    one, and the first one while it is the reference."""
    reference = row.document.get("models", {}).get("reference", {})
    initial = row.initial_manifest if reference.get("path") == INITIAL else ""
    return {row.manifest, row.best_manifest, initial} - {""}


def read_checkpoint_schedule(row: JobRow) -> tuple[int, int]:
    """Which steps of a job are due a checkpoint: each so manieth, and the last one's number."""
    return row.document["training"]["checkpoint_every"], row.document["budget"]["steps"]


def find_awaited(row: JobRow, versions: Mapping[str, VersionNumber]) -> set[str]:
    """The manifests among `versions` that something is about to name.

    A step that is being committed names a version above the current one. A checkpoint names the
    version that it was begun with, however long it is written; the next one is begun when it is
    done or given up, and before its own step commits, so no other than the newest is being written.
    """
    current = VersionNumber(row.lineage, row.version)
    written = VersionNumber(
        row.lineage, find_newest_due_version(row.version, *read_checkpoint_schedule(row))
    )
    return {
        manifest for manifest, number in versions.items() if number > current or number == written
    }


def find_ancestors(
    versions: Mapping[str, VersionNumber], current: VersionNumber
) -> dict[int, list[str]]:
    """The manifests, by the number of their version, of those that led to the current one; several
    where a version was staged twice.

    A lineage goes on from a version of one before it, and makes the later ones anew: of a number
    the latest lineage counts, and what is above the current version leads to it no more.
    """
    found: dict[int, tuple[int, list[str]]] = {}
    for manifest, number in versions.items():
        if number.version > current.version or number.lineage > current.lineage:
            continue
        lineage, manifests = found.get(number.version, (-1, []))
        if number.lineage > lineage:
            found[number.version] = number.lineage, [manifest]
        elif number.lineage == lineage:
            manifests.append(manifest)
    return {number: sorted(found[number][1]) for number in sorted(found)}


def find_requested(
    versions: Mapping[str, VersionNumber],
    current: VersionNumber,
    weights_settings: Mapping[str, Any],
) -> dict[str, str]:
    """The manifests among `versions` that a job asks for by its table `[weights]`, each with the
    key that does.
    """
    led = find_ancestors(versions, current)
    every, newest = (
        weights_settings.get("keep_every", 0),
        list(led)[-weights_settings.get("keep", 1) :],
    )
    kept = {manifest: "keep" for number in newest for manifest in led[number]}
    periodic = [number for number in led if every and number and number % every == 0]
    return kept | {manifest: "keep_every" for number in periodic for manifest in led[number]}
