"""A worker's accelerator, kept for an engine whose process another worker of its gang has started.

That process computes on the accelerators of all workers of its gang, and begins when each of them
has said that nobody else is on its own any more. It is worth nothing without them: when one of
these workers is lost, the planner ends the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from meshrl.common.base.errors import DeadlineExceeded, StateUnavailable
from meshrl.common.hardware.gpus.driver import GpuLost, GpuTrouble, NoDriver
from meshrl.common.mesh.process.handle import Child
from meshrl.common.state.pool.store import store as pool
from meshrl.common.state.pool.workers.rows import Budget, Doing, Report, Resident, Tier
from meshrl.common.state.redis.client import State
from meshrl.services.node.residents.budgets import OverBudget
from meshrl.services.node.residents.process import ROOM_AGAIN_S, Around
from meshrl.services.node.residents.roles import RoleWish


class Keeping:
    """In place of a `RoleProcess`, of which it has what a tenancy asks for."""

    pid, restarts = 0, 0
    up, may_end = False, True  # nothing is lost with it
    children: list[Child] = []  # noqa: RUF012 (there never are any)

    def __init__(
        self,
        around: Around,
        wish: RoleWish,
        others_leave: Callable[[], bool],
        beside: Callable[[], Mapping[int, str]],
    ) -> None:
        """`others_leave` says whether somebody is about to give the accelerator back, `beside`
        which processes the worker has, by pid.
        """
        self.wish = wish
        self.name, self.process = wish.name, wish.process
        self.doing, self.detail, self.tier = Doing.STARTING, "", Tier.ABSENT
        self._around, self._others_leave, self._beside = around, others_leave, beside
        self._not_before = 0.0  # when it looks for room again

    def want(self, wish: RoleWish) -> None:
        self.wish = wish

    async def start(self) -> None:
        """Keeps the accelerator, if it is free by now."""
        await self.look()

    async def look(self) -> None:
        """Waits for those who leave; then takes the bytes of the engine's part on record. What this
        host cannot give is told as a failure, and tried again.
        """
        if self.doing == Doing.READY or self._now() < self._not_before:
            return
        if self._others_leave():
            self.detail = "others leave the accelerator"
            return
        around, resident = self._around, self.wish.resident
        try:
            size = await around.gpu.least(resident)
            first = _told(resident, resident.reports, resident.ranks[0])
            if first is None or first.tier != Tier.ACCELERATOR:  # else it has the memory already
                await around.gpu.check(resident, self.name, size, self._beside())
            around.budgets.settled(self.name, Budget(accelerator=size))
        except OverBudget as error:
            around.budgets.dropped(self.name)
            self._failed(str(error))
        except (DeadlineExceeded, StateUnavailable, GpuLost, GpuTrouble, NoDriver) as error:
            self._failed(str(error))
        else:
            self.doing, self.detail, self.tier = Doing.READY, "", Tier.ACCELERATOR

    async def stop(self, reason: str, *, leaving: bool = False) -> None:
        self._around.budgets.ended(self.name)
        self.doing, self.detail, self.tier = Doing.GONE, "", Tier.ABSENT

    async def kill(self, deadline_s: float) -> None:
        """There is no process to end."""

    def _failed(self, why: str) -> None:
        self.doing, self.detail = Doing.FAILED, why
        self._not_before = self._now() + ROOM_AGAIN_S

    def _now(self) -> float:
        return self._around.mesh.clock.monotonic()


async def kept(state: State, wish: RoleWish) -> tuple[list[str], list[str]]:
    """The UUIDs of the GPUs that the process of an engine computes on, none of CPU workers; and the
    workers that have not said yet that theirs is free.
    """
    if not wish.gathers:
        return [], []
    gang = await pool.gang(state, wish.gang)
    if gang is None:
        return [], ["its gang"]
    ranks = wish.resident.ranks
    there = next((one for one in gang.residents if one.id == wish.resident.id), None)
    told = {rank: _told(wish.resident, there.reports, rank) for rank in ranks} if there else {}
    keep = [rank for rank, report in told.items() if report and report.doing == Doing.READY]
    if lacking := [gang.workers[rank] for rank in ranks[1:] if rank not in keep]:
        return [], lacking
    uuids = {worker.id: worker.uuid for worker in await pool.workers(state)}
    own = [gang.workers[rank] for rank in ranks]
    return [uuid for uuid in map(uuids.get, own) if uuid], []


def _told(resident: Resident, reports: Mapping[int, Report], rank: int) -> Report | None:
    """What the worker of this rank has said of the resident in its generation."""
    report = reports.get(rank)
    return report if report is not None and report.generation == resident.generation else None
