"""What the launcher keeps beside Redis: how far its state and its file have come.

It is written each second, and made durable before the fencing tokens are raised above all that were
issued, so that a Redis that comes back older is noticed and issues none of them again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from common.errors import Damaged, StorageFull
from common.records.durable import flush, sync
from common.records.sealed import read_sealed, sealed
from common.state.rollback import JobMark, Mark
from meshrl.launch.redis.aof import Extent


@dataclass(frozen=True)
class Note:
    """`files` are those of the mesh's own Redis; tokens that are issued now are above `floor`.

    Jobs that are `gone` were lost with an earlier Redis and are not missed; `returning`: others are
    being put back, and until that is done none is.
    """

    mark: Mark = field(default_factory=Mark)
    files: Mapping[str, Extent] = field(default_factory=dict)
    floor: int = 0
    gone: tuple[str, ...] = ()
    returning: bool = False


def read(path: Path) -> Note:
    """The note; one of nothing where none is. Damaged when it is not what was written."""
    if not path.is_file():
        return Note()
    told = read_sealed(path)
    if "gone" not in told:
        raise Damaged("it is of an earlier version", where=str(path))
    mark, files = told["mark"], told["files"]
    jobs = {job: JobMark(**row) for job, row in mark["jobs"].items()}
    extents = {name: Extent(**row) for name, row in files.items()}
    noted = Mark(mark["event"], mark["token"], jobs)
    return Note(noted, extents, told["floor"], tuple(told["gone"]), told["returning"])


def write(path: Path, note: Note, durable: bool = False) -> None:
    """Whole or not at all; `durable`: it is on the disk on return. StorageFull."""
    fresh = path.with_name(path.name + ".new")
    try:
        fresh.unlink(missing_ok=True)
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(sealed(asdict(note)))
            file.flush()
            if durable:
                flush(file.fileno())
        fresh.replace(path)
        if durable:
            sync(path.parent)
    except OSError as error:
        raise StorageFull(
            f"how far Redis has come cannot be noted: {error}",
            where=str(path),
            fix="Make room on its disk",
        ) from error
