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


# docs/operate/operations.md has this as a table, with the check of each kind.
RECOVERY_BY_KIND: dict[str, str] = {
    "checkpoint": (
        "set aside; the newest kept one before it is used, under a new lineage: what steps in "
        "between trained counts as host_lost, its prompts come again; without one the job "
        "fails"
    ),
    "weights": (
        "set aside; written again by the trainer that has them, or from the checkpoint's own "
        "model; else as for a checkpoint"
    ),
    "group": (
        "set aside; its prompt goes back, counted as host_lost; of a step that is repeated: a "
        "new lineage at the checkpoint"
    ),
    "versions": (
        "set aside; made again from Redis and the checkpoints, and nothing is swept until then"
    ),
    "kept": (
        "set aside; the process that slept goes on from the job's checkpoint, as after its death"
    ),
    "warm start": "set aside beside the cache; the warm start is made again",
    "ledger": (
        "set aside; what it told before the damage counts, other groups start from their prompts"
    ),
    "lengths": "set aside; the lines that are whole are kept",
    "redis": "set aside; jobs go on from their newest checkpoints, each under a new lineage",
    "redis note": "set aside; the records of the runs tell how far Redis had come",
    "bundle": (
        "a named failure: of resume before it starts anything, of the process that reads it after"
    ),
    "job": "set aside; written again from memory, or from the copy in Redis, else a named failure",
    "events": "set aside; made again from the stream in Redis and the lines that are whole",
    "metrics": "set aside; made again from the steps in Redis and the lines that are whole",
    "usage": "set aside; counted anew",
    "mark": "set aside; counted from ledgers and events",
    "tracking": "set aside; trackers are shown the run anew",
    "summary": "the events tell how the run stands",
    "samples": "the lines that are whole are shown",
    "mesh": "set aside and written again while the mesh runs, or by its next start",
    "pointer": "a named failure; the next start writes it",
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
    aside = f" It lies in {event['aside']}." if event.get("aside") else ""
    return f"{event['path']} is damaged: {event['why']}. {then[:1].upper()}{then[1:]}.{aside}"


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
