"""What the launcher keeps beside Redis: how far its state and its file have come.

It is written each second, and before the fencing tokens are raised above all that were issued, so
that a Redis that comes back older is noticed and issues none of them again. It is on the disk
before anything acts on what Redis holds next: Redis itself syncs with every write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from meshrl.common.base.errors import Damaged, StorageFull
from meshrl.common.base.files import documents
from meshrl.common.base.files.sealed import read_sealed, sealed
from meshrl.common.state.server.rollback import JobMark, RollbackMark
from meshrl.launch.redis.aof import Extent


@dataclass(frozen=True)
class Note:
    """`files` are those of the mesh's own Redis; tokens that are issued now are above `floor`.

    Jobs that are `gone` were lost with an earlier Redis and are not missed; `returning`: others are
    being put back, and until that is done none is.
    """

    mark: RollbackMark = field(default_factory=RollbackMark)
    files: Mapping[str, Extent] = field(default_factory=dict)
    floor: int = 0
    gone: tuple[str, ...] = ()
    returning: bool = False


def read(path: Path, damaged: Callable[[Path, Damaged], None] | None = None) -> Note:
    """The note that was written; one of nothing where there is none, or a damaged one of which
    `damaged` is told. It is raised when nobody is told.
    """
    if not path.is_file():
        return Note()
    try:
        told = read_sealed(path)
        try:
            extents = {name: Extent(**row) for name, row in told["files"].items()}
            gone, mark = tuple(told["gone"]), told["mark"]
        except (KeyError, TypeError):
            raise Damaged("it is of an earlier version", where=str(path)) from None
    except Damaged as error:
        if damaged is None:
            raise
        damaged(path, error)
        return Note()
    jobs = {job: JobMark(**row) for job, row in mark["jobs"].items()}
    noted = RollbackMark(mark["event"], mark["token"], jobs)
    return Note(noted, extents, told["floor"], gone, told["returning"])


def write(path: Path, note: Note) -> None:
    """Whole or not at all; it is on the disk on return. StorageFull."""
    try:
        documents.put(path, sealed(asdict(note)))
    except (OSError, StorageFull) as error:
        raise StorageFull(
            f"how far Redis has come cannot be noted: {error}",
            where=str(path),
            fix="Make room on its disk",
        ) from error
