"""What the launcher keeps beside Redis: how far its state and its file have come.

It is written each second, and made durable before the fencing tokens are raised above all that were
issued, so that a Redis that comes back older is noticed and issues none of them again; also when a
job is new, begins, ends, or has another lineage, so that what was numbered once is not numbered
again. What is written each second lies beside what is durable: a power cut may leave a part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from common.base.errors import Damaged, StorageFull
from common.base.files import documents
from common.base.files.sealed import read_sealed, sealed
from common.state.jobs import ENDED
from common.state.server.rollback import JobMark, Mark
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


def newest(path: Path) -> Path:
    """Where the note of each second lies, beside the durable one at `path`."""
    return path.with_name(f"{path.stem}-newest{path.suffix}")


def read(path: Path, damaged: Callable[[Path, Damaged], None] | None = None) -> Note:
    """The newest note that is what was written; one of nothing where none is. `damaged` is told of
    each that is not; it is raised when nobody is told.
    """
    for place in (newest(path), path):  # a durable one is written without the other
        if not place.is_file():
            continue
        try:
            return _read(place)
        except Damaged as error:
            if damaged is None:
                raise
            damaged(place, error)
    return Note()


def _read(path: Path) -> Note:
    told = read_sealed(path)
    if "gone" not in told:
        raise Damaged("it is of an earlier version", where=str(path))
    mark, files = told["mark"], told["files"]
    jobs = {job: JobMark(**row) for job, row in mark["jobs"].items()}
    extents = {
        name: Extent(row["length"], row.get("checksum") or row["digest"])  # as earlier versions say
        for name, row in files.items()
    }
    noted = Mark(mark["event"], mark["token"], jobs)
    return Note(noted, extents, told["floor"], tuple(told["gone"]), told["returning"])


class NoteFile:
    """Writes the notes; `path` is where the durable one lies."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._durable: dict[str, tuple[int, bool, bool]] | None = None

    def write(self, note: Note, durable: bool = False) -> None:
        """Whole or not at all; `durable`: it is on the disk on return, as it is too when it tells
        what the durable one does not tell in the order of versions. StorageFull.
        """
        stand = {
            job: (one.lineage, one.begun, one.phase in ENDED) for job, one in note.mark.jobs.items()
        }
        durable = durable or stand != self._durable
        _write(self._path, note, durable)
        if durable:
            self._durable = stand


def _write(path: Path, note: Note, durable: bool) -> None:
    place = path if durable else newest(path)
    try:
        with documents.putting(place, sealed(asdict(note)), durable=durable):
            if durable:
                newest(path).unlink(missing_ok=True)  # it is older from now on
    except (OSError, StorageFull) as error:
        raise StorageFull(
            f"how far Redis has come cannot be noted: {error}",
            where=str(place),
            fix="Make room on its disk",
        ) from error
