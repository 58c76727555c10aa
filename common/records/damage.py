"""What becomes of a durable file whose bytes are not those that were written: a fate for each kind.

Every durable file has a check that is made when it is read. What fails it is never used, and never
deleted: it is set aside below `quarantine/`, an event `damaged` names it and what follows, and
the next best thing is used, or the job fails by name.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.records.durable import sync

QUARANTINE = "quarantine"
EVENT = "damaged"


@dataclass(frozen=True)
class Fate:
    """How damage to a file shows, and what follows."""

    check: str
    then: str


# docs/operations.md has this as a table.
FATES: dict[str, Fate] = {
    "checkpoint": Fate(
        "digests of its files in its manifest, and a digest of the manifest itself",
        "set aside; the older kept checkpoint is used, under a new lineage",
    ),
    "weights": Fate(
        "a chunk and a manifest of a version are named by their digest",
        "set aside; written again from the trainer or the checkpoint, else as for a checkpoint",
    ),
    "group": Fate(
        "a finished group is named by its digest",
        "set aside; its prompt goes back, counted as host_lost",
    ),
    "versions": Fate(
        "a digest in the store's record of a job",
        "set aside; made again from Redis and the checkpoints",
    ),
    "ledger": Fate(
        "a CRC of the header and of each record",
        "set aside; what it told before the damage counts, the rest of its prompts go back",
    ),
    "redis": Fate(
        "the server loads it; it begins with what the launcher has noted of it each second, and is "
        "no older than what that note, the recorded events and the checkpoints tell",
        "set aside; jobs go on from their newest checkpoints, each under a new lineage",
    ),
    "bundle": Fate("sizes and digests in job.json", "a named failure before the start"),
    "job": Fate("a digest in job.json", "the copy in Redis, else a named failure"),
    "events": Fate("a digest of each line", "set aside; made again from the stream in Redis"),
    "metrics": Fate("each line is JSON", "set aside; made again from the steps in Redis"),
    "usage": Fate("it is JSON of the known shape", "set aside; counted anew"),
}


def set_aside(path: Path, root: Path) -> Path:
    """Moves a damaged file or directory to `<root>/quarantine/<its path below root>`, with a number
    behind it where one lies there already; where it lies now. FileNotFoundError when it is gone.
    """
    below = path.relative_to(root) if path.is_relative_to(root) else Path(path.name)
    target = root / QUARANTINE / below
    target.parent.mkdir(parents=True, exist_ok=True)
    numbered = (target.with_name(f"{target.name}.{number}") for number in itertools.count(1))
    free = next(place for place in itertools.chain([target], numbered) if not place.exists())
    path.rename(free)
    sync(free.parent)
    sync(path.parent)
    return free


def fields(
    kind: str, path: Path, why: str, then: str, *, job: str = "", aside: Path | None = None
) -> dict[str, Any]:
    """The fields of the event `damaged`: which file of which kind, why it is not used, where it
    lies now, and what follows.
    """
    moved = str(aside) if aside is not None else ""
    return {"job": job, "what": kind, "path": str(path), "why": why, "aside": moved, "then": then}
