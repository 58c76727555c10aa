"""The residents of one worker: a process for each, all run at once, so that no change, failure or
slow end of one touches another. Only processes of the same name follow one another.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from meshrl.common.api.stats import ResidentStats
from meshrl.common.base.errors import DeadlineExceeded, StateUnavailable
from meshrl.common.base.host.settings import kept_file
from meshrl.common.mesh.process.handle import Child
from meshrl.common.mesh.process.supervision.lease_watch import LeaseWatch
from meshrl.common.state.pool.store import store as pool
from meshrl.common.state.pool.workers.rows import Doing, Report, Tier
from meshrl.services.node.residents.keeping import Keeping, kept
from meshrl.services.node.residents.keepsakes import left_by
from meshrl.services.node.residents.process import Around, RoleProcess
from meshrl.services.node.residents.roles import RoleWish

STARTING_LOOK_S = 0.1  # while a process starts or moves: its readiness is news
LOOK_S = 0.5
KILL_S = 8.0  # for the kernel to end a process, within what a keeper of turns waits
DROP_S = 30.0  # to delete a file of some 100 GB
OLD_LOGS = 20  # of residents that are gone; all have other names, and each a log
OF_RESIDENTS = ("engine/", "hybrid/")  # processes that are named after their resident
QUIET_S = 5.0  # where all is as it is wished: news wakes it earlier


class Tenancy:
    """One name of a process on this worker, and who has it: one resident after the other."""

    def __init__(self, owner: Residents, name: str) -> None:
        self.name = name
        self.wish: RoleWish | None = None
        self.process: RoleProcess | Keeping | None = None
        self._awaits: list[str] = []  # workers whose accelerators its process is to have, too
        self._owner, self._around = owner, owner.around
        self._news = asyncio.Event()
        self._told: Report | None = None  # that the record has taken
        # Without a process: the resident that is to be asleep, and where it has kept what it had.
        self._left: tuple[str, Tier] | None = None

    def want(self, wish: RoleWish | None) -> None:
        """What the record says now; None: the resident is gone from it."""
        if wish is not None and wish.reported != self._told:
            self._told = None  # the record says otherwise: it is told again
        self.wish = wish
        if wish is not None and self.process is not None and wish.process == self.process.process:
            self.process.want(wish)
        self._news.set()

    @property
    def leaves(self) -> bool:
        """Whether its process is about to give the accelerator back."""
        process, wish = self.process, self.wish
        if process is None:
            return False
        if self._is_over(process, wish):
            return True
        assert wish is not None
        moves = process.tier == Tier.ACCELERATOR != wish.resident.tier
        return moves and process.doing != Doing.FAILED

    async def run(self) -> None:
        """Until nothing is wished and nothing runs. A look that Redis does not answer changes
        nothing.
        """
        while self.wish is not None or self.process is not None or self._left is not None:
            with contextlib.suppress(StateUnavailable, DeadlineExceeded):
                await self._step()
                await self._tell()
            with contextlib.suppress(DeadlineExceeded):
                async with self._around.mesh.clock.timeout(self._pause_s, "news"):
                    await self._news.wait()
            self._news.clear()

    async def end(self) -> None:
        if self.process is not None:
            await self.process.stop("the worker ends", leaving=True)

    async def _step(self) -> None:
        """One step from what runs towards what is wished."""
        process, wish = self.process, self.wish
        if self._left is not None and (wish is None or wish.resident.id != self._left[0]):
            await self._forget()
            self._left = None
        if process is not None and self._is_over(process, wish):
            await self._finish(process, wish)
        elif process is not None:
            assert wish is not None
            process.want(wish)  # it may have come while another step was under way
            await process.look()
        elif wish is not None and wish.asleep:
            if self._left is None:
                tier, held = await left_by(self._around, self.name)
                self._around.budgets.settled(self.name, held)
                self._left = wish.resident.id, tier
        elif wish is not None and not wish.absent:
            self._left = None
            gpus, self._awaits = await kept(self._around.mesh.state, wish)
            if not self._awaits:
                self.process = self._made(wish, gpus)
                await self.process.start()

    def _made(self, wish: RoleWish, gpus: Sequence[str]) -> RoleProcess | Keeping:
        owner = self._owner

        def beside() -> dict[int, str]:
            return {child.pid: child.name for child in owner.children}

        if wish.keeps:
            return Keeping(self._around, wish, self._others_leave, beside)
        hooks = owner.leases, self._news.set, owner.gone, self._others_leave, beside
        return RoleProcess(self._around, wish, *hooks, gpus)

    def _others_leave(self) -> bool:
        return any(other.leaves for other in self._owner.tenancies if other is not self)

    def _is_over(self, process: RoleProcess | Keeping, wish: RoleWish | None) -> bool:
        if wish is None or wish.process != process.process:
            return True
        # Who starts computes, and takes no turn, while others have the accelerator.
        return (wish.absent and process.may_end) or (wish.asleep and not process.up)

    async def _finish(self, process: RoleProcess | Keeping, wish: RoleWish | None) -> None:
        process.doing = Doing.DRAINING
        await self._tell()
        await process.stop(_reason(process, wish))
        self.process = None
        if wish is None or wish.resident.id != process.process[0]:
            await self._forget()
        self._news.set()

    async def _forget(self) -> None:
        """Nobody comes back for what a process of this name has kept here."""
        around = self._around
        around.segments.drop(self.name)
        file = kept_file(around.mesh.settings.kept_directory(around.mesh.name), self.name)
        await around.mesh.host.run_blocking(_remove, file, deadline_s=DROP_S)
        around.budgets.dropped(self.name)
        await self._owner.retire_log(self.name)

    async def _tell(self) -> None:
        """Writes what runs to the record, if that is news and the wish that it is for still is on
        record.
        """
        wish = self.wish
        if wish is None:
            return
        report = self._report(wish)
        if report == self._told:
            return
        mesh, around = self._around.mesh, self._around
        if await pool.report(mesh.state, around.worker, wish.gang, wish.resident.id, report):
            self._told = report
        else:
            self._owner.stale()

    def _report(self, wish: RoleWish) -> Report:
        process, resident = self.process, wish.resident
        if process is None:
            tier, detail = self._left[1] if wish.asleep and self._left else Tier.ABSENT, ""
            doing = Doing.GONE if wish.absent or wish.asleep else Doing.STARTING
            if self._awaits and doing == Doing.STARTING:
                detail = f"{', '.join(self._awaits)} to keep accelerators for it are awaited"
            if wish.asleep and tier == resident.tier:
                doing = Doing.READY
        else:
            doing, tier, detail = process.doing, process.tier, process.detail
            if process.process != wish.process:
                doing, detail = Doing.DRAINING, f"{process.name} of before ends"
        return Report(
            rank=wish.rank,
            generation=resident.generation,
            epoch=resident.epoch,
            token=self._around.mesh.token,
            doing=doing,
            tier=tier,
            detail=detail,
            held=self._around.budgets.held(self.name),
        )

    @property
    def _pause_s(self) -> float:
        process = self.process
        if process is None:
            return STARTING_LOOK_S if self._awaits else LOOK_S
        if self._told is None:  # Redis was away, or the wish has changed
            return LOOK_S
        if process.doing == Doing.READY and process.wish is self.wish:
            return QUIET_S
        return STARTING_LOOK_S if process.doing in (Doing.STARTING, Doing.MOVING) else LOOK_S


class Residents:
    """All of them, from `async with` to its end, at which their processes end."""

    def __init__(
        self, around: Around, stale: Callable[[], None], gone: Callable[[str], None]
    ) -> None:
        """`stale` is called when the record is not what it was when it was read, `gone` when a
        process of a resident has ended.
        """
        self.around, self.stale, self.gone = around, stale, gone
        mesh = around.mesh
        self.leases = LeaseWatch(mesh.state, mesh.clock, mesh.settings.host, lambda: self.children)
        self._tenancies: dict[str, Tenancy] = {}
        self._old_logs: deque[Path] = deque()  # the oldest first
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Residents:
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(tenancy.end() for tenancy in self._tenancies.values()))
        self._broken.cancel()

    def want(self, wishes: Mapping[str, RoleWish]) -> None:
        """What each process should be, by name; all others end."""
        for name in self._tenancies.keys() | wishes.keys():
            tenancy = self._tenancies.get(name)
            if tenancy is None:
                tenancy = self._tenancies[name] = Tenancy(self, name)
            tenancy.want(wishes.get(name))
            if name not in self._tasks:
                self._run(tenancy)

    async def clear(self, wishes: Mapping[str, RoleWish]) -> None:
        """Removes what others than these have kept on disk, before this worker last started."""
        mesh = self.around.mesh
        directory = Path(mesh.settings.kept_directory(mesh.name))
        kept = {kept_file(directory, name).name for name in wishes}
        await mesh.host.run_blocking(_clear, directory, kept, deadline_s=DROP_S)

    async def retire_log(self, name: str) -> None:
        """A resident is gone, and its name with it; the logs of the last ones stay."""
        log = self.around.log(name)
        if not name.startswith(OF_RESIDENTS) or log in self._old_logs:
            return
        self._old_logs.append(log)
        if len(self._old_logs) > OLD_LOGS:
            oldest = self._old_logs.popleft()
            await self.around.mesh.host.run_blocking(_remove, oldest, deadline_s=DROP_S)

    async def watch(self) -> None:
        """Compares processes with their leases, for ever; raises what ends the worker: its own
        lease is lost, or an error that nobody foresaw.
        """
        watching = asyncio.create_task(self.leases.run(), name="watch leases")
        try:
            await asyncio.wait([watching, self._broken], return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
        await (self._broken if self._broken.done() else watching)

    async def kill(self, resident: str, generation: int, why: str) -> None:
        """Ends the process of a resident at once, if there is one of that generation; it is started
        again. Returns when it is dead.
        """
        for process in self._processes():
            if process.process == (resident, generation):
                self.around.mesh.log.error("killed", process=process.name, why=why)
                await process.kill(KILL_S)

    @property
    def children(self) -> list[Child]:
        return [child for process in self._processes() for child in process.children]

    @property
    def tenancies(self) -> list[Tenancy]:
        """Of every name that has, or should have, a process here."""
        return list(self._tenancies.values())

    def stats(self) -> list[ResidentStats]:
        return [
            ResidentStats(
                process.process[0],
                process.wish.resident.job,
                process.wish.resident.role,
                process.doing,
                process.tier,
                process.pid,
                process.restarts,
            )
            for process in self._processes()
        ]

    def _processes(self) -> list[RoleProcess | Keeping]:
        return [t.process for t in self._tenancies.values() if t.process is not None]

    def _run(self, tenancy: Tenancy) -> None:
        task = asyncio.create_task(tenancy.run(), name=f"resident {tenancy.name}")
        self._tasks[tenancy.name] = task
        task.add_done_callback(lambda task: self._ended(tenancy, task))

    def _ended(self, tenancy: Tenancy, task: asyncio.Task[None]) -> None:
        del self._tasks[tenancy.name]
        if task.cancelled():
            return
        error = task.exception()
        if error is None and tenancy.wish is None:
            del self._tenancies[tenancy.name]
        elif error is None:  # it was wished again as it ended
            self._run(tenancy)
        elif not self._broken.done():
            self._broken.set_exception(error)


def _remove(file: Path) -> None:
    for path in file.parent.glob(f"{file.name}*"):  # whole, or half written
        path.unlink(missing_ok=True)


def _clear(directory: Path, kept: set[str]) -> None:
    for path in directory.glob("*.kept*"):
        if path.name.removesuffix(".new") not in kept:
            path.unlink(missing_ok=True)


def _reason(process: RoleProcess | Keeping, wish: RoleWish | None) -> str:
    id, generation = process.process
    if wish is None:
        return f"{id} is gone from the record"
    if wish.asleep and wish.process == process.process:
        return f"{id} is to sleep from epoch {wish.resident.epoch}, and is not up"
    if wish.absent:
        return f"{id} is to be absent from epoch {wish.resident.epoch}"
    return f"{wish.process[0]} is wished in generation {wish.process[1]} after {generation}"
