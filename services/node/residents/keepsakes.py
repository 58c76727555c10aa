"""What a role process that has ended asleep has left on its worker, whole: its next start takes it
up.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from meshrl.common.base.errors import Damaged
from meshrl.common.base.files.kept import File, Mapped, Medium, head_of
from meshrl.common.base.host.settings import kept_file
from meshrl.common.state.pool.workers.rows import Budget, Tier
from meshrl.services.node.residents.process import Around

LOOK_S = 30.0  # to read a head from a busy disk


async def left_by(around: Around, name: str) -> tuple[Tier, Budget]:
    """The tier where a process of this name has kept something, with the bytes; absent: nothing
    whole is there.
    """
    mesh = around.mesh
    file = kept_file(mesh.settings.kept_directory(mesh.name), name)
    segment = around.segments.find(name).path
    return await mesh.host.run_blocking(_left, segment, file, deadline_s=LOOK_S)


def _left(segment: str, file: Path) -> tuple[Tier, Budget]:
    if segment and (size := _whole(lambda: Mapped(segment))):
        return Tier.MEMORY, Budget(memory=size)
    if size := _whole(lambda: File(file)):
        return Tier.DISK, Budget(disk=size)
    return Tier.ABSENT, Budget()


def _whole(opened: Callable[[], Medium]) -> int:
    """Bytes of what lies there; 0 when it is not whole, or not there."""
    try:
        medium = opened()
    except FileNotFoundError:
        return 0
    try:
        head_of(medium)
        return medium.size
    except Damaged:
        return 0
    finally:
        medium.close()
