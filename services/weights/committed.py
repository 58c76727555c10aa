"""Which versions a run's record tells of, and its checkpoints; torch is not needed for that."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.base.errors import Damaged, NotFound
from common.base.files.lines import whole
from common.records.checkpoints import all_checkpoints, manifest_of

Checkpoint = tuple[Path, dict[str, Any]]  # the path of its manifest, and what that holds
COMMITS = ("initial", "step", "lineage", "restored")  # events that name the current version


@dataclass(frozen=True)
class StoredVersion:
    """A version of the lineage that a run ended in, or is in."""

    step: int
    manifest: str  # digest


def versions(run: Path) -> list[StoredVersion]:
    """The versions of the lineage that a run ended in, or is in, ascending; most are no longer
    stored.
    """
    found: dict[int, str] = {}
    for event in whole(run / "events.jsonl"):
        fields = event["fields"]
        if event["kind"] in COMMITS and fields.get("manifest"):
            step = int(fields["version"])
            found = {n: digest for n, digest in found.items() if n < step}
            found[step] = fields["manifest"]
    if not found:  # nothing was recorded
        found = {held["step"]: held["weights"] for _, held in checkpoints(run)}
    return [StoredVersion(step, digest) for step, digest in sorted(found.items())]


def checkpoints(run: Path) -> list[Checkpoint]:
    """Those whose manifests are whole, in the order of lineage and step."""
    found = []
    for path in all_checkpoints(run):
        with suppress(Damaged, NotFound):
            found.append((path, manifest_of(path)))
    return found
