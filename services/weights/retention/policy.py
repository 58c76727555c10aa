"""Retention policy: versions and checkpoints that must stay.

These are the newest checkpoints up to the committed one and those being written, versions that a
step or checkpoint is about to name, permanent versions, and those that the job requests
(`[weights]`).
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
    """Lineage and number of a version in its job."""

    lineage: int
    version: int


def find_expired(names: Sequence[str], committed: str, keep_count: int) -> list[str]:
    """Return the names that no recovery can need, from names sorted oldest first.

    The committed checkpoint and the `keep_count` - 1 before it stay. So does everything after it: a
    step that is being committed has written its checkpoint already. Without a committed checkpoint
    nothing expires.
    """
    if committed not in names:
        return []
    return list(names[: max(0, list(names).index(committed) + 1 - max(1, keep_count))])


def find_permanent(row: JobRow) -> set[str]:
    """Return manifests that stay regardless of checkpoints.

    They are the current version, the best one, and the first one while it is the reference.
    """
    reference = row.document.get("models", {}).get("reference", {})
    initial = row.initial_manifest if reference.get("path") == INITIAL else ""
    return {row.manifest, row.best_manifest, initial} - {""}


def read_checkpoint_schedule(row: JobRow) -> tuple[int, int]:
    """Return a job's checkpoint interval in steps, and the number of its last step."""
    return row.document["training"]["checkpoint_every"], row.last_step


def find_awaited(row: JobRow, versions: Mapping[str, VersionNumber]) -> set[str]:
    """Return the manifests among `versions` that a commit or checkpoint is about to name.

    A step that is being committed names a version above the current one. A checkpoint names the
    version it was started with, however long writing takes. The next one starts when it is done or
    abandoned, and before its own step commits. Therefore only the newest due one is being written.
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
    """Return the manifests that led to the current one by version number.

    A number has several manifests if a version was staged twice. A lineage continues from a version
    of an earlier one and makes the later ones again. So the latest lineage of a number counts, and
    versions above the current one are excluded.
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
    """Return the manifests among `versions` that a job's table `[weights]` keeps, with the key of
    each.
    """
    led = find_ancestors(versions, current)
    every, newest = (
        weights_settings.get("keep_every", 0),
        list(led)[-weights_settings.get("keep", 1) :],
    )
    retained = {manifest: "keep" for number in newest for manifest in led[number]}
    periodic = [number for number in led if every and number and number % every == 0]
    return retained | {manifest: "keep_every" for number in periodic for manifest in led[number]}
