"""Offloaded state of a role process that exited asleep; the process's next start restores it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from meshrl.common.base.errors import CorruptData
from meshrl.common.base.files.offload_media import MemorySegment, OffloadFile, make_segment_key
from meshrl.common.base.files.offloaded_tensors import COPIES_BYTES, OffloadMedium, read_header
from meshrl.common.base.host.settings import make_offload_path
from meshrl.common.state.pool.workers.rows import Tier, TierBytes
from meshrl.services.node.instances.role_process import WorkerContext

READ_TIMEOUT_S = 30.0  # to read a head from a busy disk


async def find_offloaded_state(context: WorkerContext, name: str) -> tuple[Tier, TierBytes]:
    """Return the tier and bytes of the state that a process of this name has offloaded.

    Memory is preferred to disk. Return Tier.ABSENT if no state is complete.
    """
    mesh = context.mesh
    file = make_offload_path(mesh.settings.make_offload_directory(mesh.name), name)
    segment = context.segments.find(make_segment_key(name)).path
    return await mesh.host.run_blocking(
        _read_offloaded_state, segment, file, deadline_s=READ_TIMEOUT_S
    )


def _read_offloaded_state(segment: str, file: Path) -> tuple[Tier, TierBytes]:
    if segment and (size := _read_complete_size(lambda: MemorySegment(segment))):
        return Tier.MEMORY, TierBytes(memory=size)
    if size := _read_complete_size(lambda: OffloadFile(file)):
        return Tier.DISK, TierBytes(disk=size)
    return Tier.ABSENT, TierBytes()


def _read_complete_size(open_medium: Callable[[], OffloadMedium]) -> int:
    """Return the bytes of an offloaded state by its record; 0 if it is missing or incomplete.

    The record is written after the copies of all kinds.
    """
    try:
        medium = open_medium()
    except FileNotFoundError:
        return 0
    try:
        record = read_header(medium).metadata
        return medium.size_bytes + int(record.get(COPIES_BYTES, 0))
    except CorruptData:
        return 0
    finally:
        medium.close()
