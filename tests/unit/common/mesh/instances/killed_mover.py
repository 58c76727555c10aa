"""Process that saves its kinds, changes them, and is killed at a piece of the next copies.

`python -m tests.unit.common.mesh.instances.killed_mover DIRECTORY PIECE`
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from meshrl.common.state.pool.workers.rows import Tier
from tests.unit.common.mesh.instances.test_kind_controller import Process


class KilledProcess(Process):
    """Process that dies instead of waiting at its gate."""

    def pass_gate(self) -> None:
        if self._pieces_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._pieces_left -= 1


async def move_until_killed(directory: Path, piece: int) -> None:
    process = KilledProcess(directory, seed=1)
    await process.kinds.write_back(Tier.DISK)
    await process.kinds.save_record(Tier.DISK, {"version": 1})
    process.kinds.is_asleep = False
    async with process.kinds.use_kinds((), tuple(process.tensors)):
        for group in process.tensors.values():
            for tensor in group.values():
                tensor.add_(1.0)
    process.close_gate(piece)
    await process.order("write_back", *process.tensors)


if __name__ == "__main__":
    asyncio.run(move_until_killed(Path(sys.argv[1]), int(sys.argv[2])))
