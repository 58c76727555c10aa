"""Handling of durable files whose bytes have changed since they were written, by kind of file.

Every durable file has a check for its reader. A file that fails it is never used, and never
deleted: it is quarantined below `quarantine/`, and an event `damaged` names it and the recovery.
The recovery uses the best replacement, or the job fails by name.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshrl.common.base.files.disk_sync import fsync_path

QUARANTINE_DIRECTORY = "quarantine"
CORRUPTION_EVENT = "damaged"


# docs/operate/recovery.md has this as a table, with the check of each kind.
RECOVERY_BY_KIND: dict[str, str] = {
    "checkpoint": (
        "quarantined; the newest earlier checkpoint is used, in a new lineage: the trajectories "
        "of later steps count as host_lost, and their prompts are generated again; without one "
        "the job fails"
    ),
    "weights": (
        "quarantined; written again by a trainer that has the weights, or from the checkpoint's "
        "own model; else as for a checkpoint"
    ),
    "group": (
        "quarantined; its prompt goes back to the queue and counts as host_lost; if a step is "
        "being repeated: a new lineage at the checkpoint"
    ),
    "versions": (
        "quarantined; rebuilt from Redis and the checkpoints, and nothing is swept until then"
    ),
    "kept": (
        "quarantined; the sleeping process continues from the job's checkpoint, as after its death"
    ),
    "warm start": "quarantined beside the cache; the warm start runs again",
    "ledger": (
        "quarantined; records before the corruption count, other groups start from their prompts"
    ),
    "lengths": "quarantined; intact lines are retained",
    "redis": "quarantined; jobs continue from their newest checkpoints, each in a new lineage",
    "profiles": "quarantined; written again from Redis, or from new measurements",
    "redis note": "quarantined; the records of the runs determine the last state of Redis",
    "bundle": (
        "an error that names the file: from resume before it starts any process, later from the "
        "process that reads the file"
    ),
    "job": (
        "quarantined; written again from memory or from the copy in Redis, else an error that "
        "names the file"
    ),
    "events": "quarantined; rebuilt from the stream in Redis and the intact lines",
    "metrics": "quarantined; rebuilt from the steps in Redis and the intact lines",
    "usage": "quarantined; counting starts again",
    "mark": "quarantined; counted from ledgers and events",
    "tracking": "quarantined; trackers receive the run from its beginning",
    "summary": "the events show how the run ended",
    "samples": "the intact lines are shown",
    "mesh": "quarantined and written again while the mesh runs, or by its next start",
    "pointer": "an error that names the file; the next start writes it",
}


def quarantine(path: Path, root: Path) -> Path:
    """Move a corrupt file or directory to `<root>/quarantine/<its path below root>`; return the new
    path.

    A number is appended to an existing name. Raises FileNotFoundError if the file is missing.
    """
    below = path.relative_to(root) if path.is_relative_to(root) else Path(path.name)
    target = root / QUARANTINE_DIRECTORY / below
    target.parent.mkdir(parents=True, exist_ok=True)
    numbered = (target.with_name(f"{target.name}.{number}") for number in itertools.count(1))
    free = next(place for place in itertools.chain([target], numbered) if not place.exists())
    path.rename(free)
    fsync_path(free.parent)
    fsync_path(path.parent)
    return free


def describe_event(event: Mapping[str, Any]) -> str:
    """Format an event `damaged` for users."""
    then = str(event["then"])
    move_note = f" It was moved to {event['aside']}." if event.get("aside") else ""
    return f"{event['path']} is corrupt: {event['why']}. {then[:1].upper()}{then[1:]}.{move_note}"


def make_event_fields(
    kind: str,
    path: Path,
    why: str,
    recovery: str,
    *,
    job: str = "",
    quarantined_path: Path | None = None,
) -> dict[str, Any]:
    """Return the fields of the event `damaged`: file, kind, reason, quarantine path and
    recovery.
    """
    moved = str(quarantined_path) if quarantined_path is not None else ""
    return {
        "job": job,
        "what": kind,
        "path": str(path),
        "why": why,
        "aside": moved,
        "then": recovery,
    }
