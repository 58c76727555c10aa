"""What becomes of a durable file whose bytes are not those that were written: a fate for each kind.

Every durable file has a check that is made when it is read. What fails it is never used, and never
deleted: it is set aside below `quarantine/`, an event `damaged` names it and what follows, and
the next best thing is used, or the job fails by name.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.base.files.durable import sync

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
        "set aside; the newest kept one before it is used, under a new lineage: what steps in "
        "between trained counts as host_lost, its prompts come again; without one the job fails",
    ),
    "weights": Fate(
        "a chunk and a manifest of a version are named by their digest",
        "set aside; written again by the trainer that has them, or from the checkpoint's own "
        "model; else as for a checkpoint",
    ),
    "group": Fate(
        "a finished group is named by its digest",
        "set aside; its prompt goes back, counted as host_lost; of a step that is repeated: a new "
        "lineage at the checkpoint",
    ),
    "versions": Fate(
        "a digest in the store's record of a job",
        "set aside; made again from Redis and the checkpoints, and nothing is swept until then",
    ),
    "kept": Fate(
        "a digest of each run of tensors, and one of all that is written last",
        "set aside; the process that slept goes on from the job's checkpoint, as after its death",
    ),
    "warm start": Fate(
        "a digest of the tensors in the cache's file",
        "set aside beside the cache; the warm start is made again",
    ),
    "ledger": Fate(
        "a CRC of the header and of each record; where Redis says that a segment was sealed",
        "set aside; what it told before the damage counts, other groups start from their prompts",
    ),
    "lengths": Fate("a CRC of each line", "set aside; the lines that are whole are kept"),
    "redis": Fate(
        "the server loads it; it begins with what the launcher has noted of it each second, and is "
        "no older than what that note, the recorded events and the checkpoints tell",
        "set aside; jobs go on from their newest checkpoints, each under a new lineage",
    ),
    "redis note": Fate(
        "a digest of redis-note.json in itself",
        "set aside; the records of the runs tell how far Redis had come",
    ),
    "bundle": Fate(
        "bytes and digest of each file in the job's document; after a start, of weights the bytes",
        "a named failure: of resume before it starts anything, of the process that reads it after",
    ),
    "job": Fate(
        "a digest of job.json in itself",
        "set aside; written again from memory, or from the copy in Redis, else a named failure",
    ),
    "events": Fate(
        "a number and a CRC of each line of events.jsonl, and the last event in in_flight.json",
        "set aside; made again from the stream in Redis and the lines that are whole",
    ),
    "metrics": Fate(
        "a number and a CRC of each line of metrics.jsonl",
        "set aside; made again from the steps in Redis and the lines that are whole",
    ),
    "usage": Fate("a digest of usage.json in itself", "set aside; counted anew"),
    "mark": Fate(
        "a digest of in_flight.json in itself", "set aside; counted from ledgers and events"
    ),
    "tracking": Fate(
        "a digest of tracking.json in itself", "set aside; trackers are shown the run anew"
    ),
    "summary": Fate("a digest of summary.json in itself", "the events tell how the run stands"),
    "samples": Fate("a CRC of each line of samples.jsonl", "the lines that are whole are shown"),
    "mesh": Fate(
        "a digest of settings.json, shape.json and launcher.json in themselves",
        "set aside and written again while the mesh runs, or by its next start",
    ),
    "pointer": Fate(
        "a digest of .meshrl/current.json in itself", "a named failure; the next start writes it"
    ),
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


def sentence(told: Mapping[str, Any]) -> str:
    """An event `damaged` as a person reads it."""
    then = str(told["then"])
    aside = f" It lies in {told['aside']}." if told.get("aside") else ""
    return f"{told['path']} is damaged: {told['why']}. {then[:1].upper()}{then[1:]}.{aside}"


def fields(
    kind: str, path: Path, why: str, then: str, *, job: str = "", aside: Path | None = None
) -> dict[str, Any]:
    """The fields of the event `damaged`: which file of which kind, why it is not used, where it
    lies now, and what follows.
    """
    moved = str(aside) if aside is not None else ""
    return {"job": job, "what": kind, "path": str(path), "why": why, "aside": moved, "then": then}
