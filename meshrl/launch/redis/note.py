"""What the launcher keeps beside Redis: how far its state and its file have come.

It is written each second, and made durable before the fencing tokens are raised above all that were
issued, so that a Redis that comes back older is noticed and issues none of them again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import xxhash

from common.errors import Damaged
from common.records.durable import flush, sync
from common.state.rollback import JobMark, Mark
from meshrl.launch.redis.aof import Extent


@dataclass(frozen=True)
class Note:
    """`files` are those of the mesh's own Redis; tokens that are issued now are above `floor`."""

    mark: Mark = field(default_factory=Mark)
    files: Mapping[str, Extent] = field(default_factory=dict)
    floor: int = 0


def read(path: Path) -> Note:
    """The note; one of nothing where none is. Damaged when it is not what was written."""
    if not path.is_file():
        return Note()
    try:
        held = json.loads(path.read_bytes())
        digest, told = held["digest"], held["note"]
        if digest != _digest(told):
            raise ValueError("its digest is another")
        mark, files = told["mark"], told["files"]
        jobs = {job: JobMark(**row) for job, row in mark["jobs"].items()}
        extents = {name: Extent(**row) for name, row in files.items()}
        return Note(Mark(mark["event"], mark["token"], jobs), extents, told["floor"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(
            f"the launcher's note of how far Redis had come is damaged: {error!r}",
            where=str(path),
            fix="It is set aside; the records of the runs tell the rest.",
        ) from error


def write(path: Path, note: Note, durable: bool = False) -> None:
    """Whole or not at all; `durable`: it is on the disk on return. OSError."""
    told = asdict(note)
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump({"note": told, "digest": _digest(told)}, file)
        file.flush()
        if durable:
            flush(file.fileno())
    fresh.replace(path)
    if durable:
        sync(path.parent)


def _digest(told: object) -> str:
    text = json.dumps(told, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(text.encode())
