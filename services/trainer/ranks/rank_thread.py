"""Thread of a rank's arithmetic, which can end the waits of a lost collective."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

from meshrl.common.base.errors import MeshError, RankLost
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.serial_executor import (
    STUCK_EXIT_STATUS,
    SerialExecutor,
    consume_exception,
)
from meshrl.services.trainer.ranks.group_failures import find_group_failure, is_collective_error

T = TypeVar("T")
TIMEOUT_MARGIN_S = 30.0
LEAVE_TIMEOUT_S = 60.0  # to abort all groups; `ncclCommAbort` waits for the device
GPU_ERROR_EXIT_STATUS = 74  # exit status of a process whose CUDA context is unusable


class RankThread(SerialExecutor):
    """Executor for work with collectives; past their deadline the process exits."""

    def __init__(self, mesh: Mesh, collective_timeout_s: float) -> None:
        super().__init__(mesh, collective_timeout_s + TIMEOUT_MARGIN_S)
        self._leave_task: asyncio.Task[None] | None = None
        self._leave_count = 0

    async def run(self, work: Callable[..., T], *args: Any, deadline_s: float) -> T:
        """Run `work` and return its result.

        RankLost if a collective of it fails, or if its groups are left or fail while it runs:
        an aborted NCCL collective raises nothing, and its result is undefined. A process whose GPU
        reports an error exits, because nothing can be computed on that CUDA context any more.
        """
        thread = self

        @wraps(work)
        def run_and_check(*args: Any) -> T:
            leaves = thread._leave_count
            try:
                result = work(*args)
            except torch.AcceleratorError as error:
                raise GpuFailed(f"the GPU reports an error: {error}") from error
            except MeshError:
                raise
            except Exception as error:  # undefined sums may have been used as sizes or indexes
                if failure := thread._find_failure(leaves):
                    raise RankLost(f"a collective failed: {failure}") from error
                if isinstance(error, RuntimeError) and is_collective_error(error):
                    raise RankLost(f"a collective failed: {error}") from error
                raise
            if failure := thread._find_failure(leaves):
                raise RankLost(f"a collective failed: {failure}")
            return result

        try:
            return await super().run(run_and_check, *args, deadline_s=deadline_s)
        except GpuFailed as error:
            self._mesh.host.exit(GPU_ERROR_EXIT_STATUS, str(error), error)

    def _find_failure(self, leaves: int) -> str:
        if self._leave_count != leaves:
            return "the group was left during this work"
        return find_group_failure()

    async def leave(self, leave: Callable[[], None]) -> None:
        """Run `leave`, which ends the group, beside current work; concurrent calls share a run.

        The process exits if the groups cannot be aborted, for example because a device hangs: it
        could not join another group.
        """
        if self._leave_task is None or self._leave_task.done():
            self._leave_count += 1
            running = self._mesh.host.run_blocking(leave, deadline_s=LEAVE_TIMEOUT_S)
            self._leave_task = asyncio.create_task(running, name="leave")
            self._leave_task.add_done_callback(consume_exception)
        try:
            await asyncio.shield(self._leave_task)
        except Exception as error:
            self._mesh.host.exit(STUCK_EXIT_STATUS, f"aborting the group: {error}", error)


class GpuFailed(RankLost):
    """Error raised when CUDA reports an error on this rank's device."""

    code = "gpu_failed"
