"""Launcher's note beside Redis: the progress of its state and its file.

The note is written each second, and before the fencing tokens are raised above all issued ones, so
that an older Redis is detected and issues none of them again. It is on the disk before anything
acts on the next state of Redis: Redis itself syncs with every write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from meshrl.common.base.errors import CorruptData, StorageFull
from meshrl.common.base.files import documents
from meshrl.common.base.files.documents import rename_keys
from meshrl.common.base.files.sealed_documents import encode_sealed, read_sealed
from meshrl.common.state.server_state.rollback import JobWatermark, StateWatermark
from meshrl.launch.redis.aof import Extent


@dataclass(frozen=True)
class RedisNote:
    """Progress of a Redis. `files` are those of the mesh's own; new tokens are above `floor`.

    Jobs in `gone` were lost with an earlier Redis and are no longer expected. `returning`: other
    jobs are being restored, and until that is done none is expected.
    """

    watermark: StateWatermark = field(default_factory=StateWatermark)
    file_extents: Mapping[str, Extent] = field(default_factory=dict)
    token_floor: int = 0
    lost_jobs: tuple[str, ...] = ()
    is_restoring: bool = False


_OLD_KEYS = {
    "mark": "watermark",
    "files": "file_extents",
    "floor": "token_floor",
    "gone": "lost_jobs",
    "returning": "is_restoring",
}


def read_note(
    path: Path, on_corrupt: Callable[[Path, CorruptData], None] | None = None
) -> RedisNote:
    """Return the note; an empty one if there is none, or if it is corrupt and `on_corrupt` is
    given.

    Raises CorruptData if it is corrupt and there is no callback.
    """
    if not path.is_file():
        return RedisNote()
    try:
        document = rename_keys(read_sealed(path), _OLD_KEYS)
        try:
            extents = {
                name: Extent(**rename_keys(row, {"length": "length_bytes"}))
                for name, row in document["file_extents"].items()
            }
            lost_jobs, mark = tuple(document["lost_jobs"]), document["watermark"]
        except (KeyError, TypeError):
            raise CorruptData("it was written by an earlier version", where=str(path)) from None
    except CorruptData as error:
        if on_corrupt is None:
            raise
        on_corrupt(path, error)
        return RedisNote()
    jobs = {job: JobWatermark(**row) for job, row in mark["jobs"].items()}
    watermark = StateWatermark(mark["event"], mark["token"], jobs)
    return RedisNote(
        watermark, extents, document["token_floor"], lost_jobs, document["is_restoring"]
    )


def write_note(path: Path, note: RedisNote) -> None:
    """Write the note atomically; it is on the disk on return. Raises StorageFull."""
    try:
        documents.write_bytes(path, encode_sealed(asdict(note)))
    except (OSError, StorageFull) as error:
        raise StorageFull(
            f"recording the progress of Redis failed: {error}",
            where=str(path),
            fix="Free disk space there",
        ) from error
