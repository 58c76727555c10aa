"""A worker: it makes its processes match its gang's record, and reports what runs.

Its own record is all that it polls: it says which gang the worker is in, and that something about
it has changed. It imports no model code: role processes, its children, do. It lives on when the
agent dies, and ends itself when no agent of its host has held its lease for a minute, or Redis was
unreachable that long.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

from meshrl.common.api.calls.interface import Look
from meshrl.common.api.node import Worker
from meshrl.common.api.stats import WorkerStats
from meshrl.common.base.errors import DeadlineExceeded, StateUnavailable
from meshrl.common.mesh.residents.orphan import ORPHAN_S, until_orphaned
from meshrl.common.mesh.runtime.calls.actor import cast
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings, run
from meshrl.common.mesh.runtime.tasks import first_of
from meshrl.common.state.pool.store import store as pool
from meshrl.common.state.pool.workers.names import worker_process
from meshrl.common.state.pool.workers.rows import Budget, Doing, Gang, Report, Tier
from meshrl.common.state.pool.workers.rows import WorkerRow as WorkerRow
from meshrl.services.node.residents.budgets import Budgets
from meshrl.services.node.residents.process import Around
from meshrl.services.node.residents.residents import Residents
from meshrl.services.node.residents.roles import RoleWish, clashes, wishes, with_overrides
from meshrl.services.node.residents.room import GpuRoom
from meshrl.services.node.residents.segments import KeepsSegments, Segments
from meshrl.services.node.residents.turn_keeper import KeepsTurns, TurnKeeper

LOOK_S = 0.5  # between two looks at the record; a hint comes earlier
LEAVE_S = 3.0  # to give the name back


class GangWorker(KeepsTurns, KeepsSegments):
    """`row` is the worker's record as it is when it joins; what the planner says of it comes from
    Redis.
    """

    interface = Worker

    def __init__(self, mesh: Mesh, row: WorkerRow, around: Around) -> None:
        self._mesh, self._row, self._budgets = mesh, row, around.budgets
        self._news = asyncio.Event()
        self._seen: tuple[str, int, int] | None = None  # gang, membership, revision
        self._cleared = False  # of what earlier residents have left on disk
        self.gang: Gang | None = None
        self.residents = Residents(
            around, self._read_again, lambda resident: self.turns.gone(resident)
        )
        self.turns = TurnKeeper(mesh, row.id, self.residents.kill)
        self.segments = around.segments

    def stats(self) -> WorkerStats:
        workers = self.gang.workers if self.gang is not None else ()
        turns = self.turns.stats()
        return WorkerStats(
            turns.turns,
            turns.turns_killed,
            turns.turn_of,
            worker=self._row.id,
            accelerator=self._row.accelerator,
            gang=self.gang.id if self.gang is not None else "",
            rank=workers.index(self._row.id) if self._row.id in workers else 0,
            held_bytes=self._budgets.stats(),
            residents=self.residents.stats(),
        )

    @cast(Worker.look)
    def look(self, m: Look) -> None:
        self._news.set()

    async def join(self) -> WorkerRow:
        """Puts this worker on record, or takes its record up again."""
        mesh = self._mesh
        return await pool.join_worker(mesh.state, replace(self._row, token=mesh.token))

    async def follow(self) -> None:
        """Looks at the record for ever. A look that Redis does not answer changes nothing."""
        while True:
            with contextlib.suppress(StateUnavailable, DeadlineExceeded):
                await self._look_once()
            with contextlib.suppress(DeadlineExceeded):
                async with self._mesh.clock.timeout(LOOK_S, "a hint"):
                    await self._news.wait()
            self._news.clear()

    async def _look_once(self) -> None:
        row = await pool.worker_row(self._mesh.state, self._row.id)
        if row is None or row.token != self._mesh.token:
            row = await self.join()
        seen = (row.gang, row.membership, row.revision)
        if seen == self._seen:
            return
        self._seen = seen  # before the gang is read, which is at least as new
        try:
            self.gang = await pool.gang(self._mesh.state, row.gang) if row.gang else None
        except (StateUnavailable, DeadlineExceeded):
            self._seen = None
            raise
        wanted = wishes(self.gang, self._row.id)
        if not self._cleared:
            self._cleared = True
            await self.residents.clear(wanted)
        self.residents.want(wanted)
        self.turns.follow(self.gang)
        for wish, holder in clashes(self.gang, self._row.id):
            await self._refuse(wish, holder)

    async def _refuse(self, wish: RoleWish, holder: str) -> None:
        """Says that a resident has no process, because another one has its name."""
        resident = wish.resident
        why = f"{resident.id} has no process here: {wish.name} is that of {holder}, on this worker"
        report = Report(
            rank=wish.rank,
            generation=resident.generation,
            epoch=resident.epoch,
            token=self._mesh.token,
            doing=Doing.FAILED,
            tier=Tier.ABSENT,
            detail=f"{why}; remove either",
        )
        if report == wish.reported:
            return
        try:
            accepted = await pool.report(
                self._mesh.state, self._row.id, wish.gang, resident.id, report
            )
        except (StateUnavailable, DeadlineExceeded):
            self._seen = None
            raise
        if not accepted:
            self._read_again()

    def _read_again(self) -> None:
        """A report was refused: the record is not what it was when it was read."""
        self._seen = None
        self._news.set()


async def main(a: argparse.Namespace) -> None:
    await serve(await Mesh.open(worker_process(a.worker), "worker", MeshSettings.from_env()), a)


async def serve(mesh: Mesh, a: argparse.Namespace) -> None:
    root = Path(mesh.settings.run_root) / "mesh"

    def left() -> int:
        return mesh.host.room(root).memory

    async with Segments(left, a.memory_bytes, mesh.name) as segments:  # beyond their processes' end
        await _serve(mesh, a, root, segments)


async def _serve(mesh: Mesh, a: argparse.Namespace, root: Path, segments: Segments) -> None:
    budget = Budget(a.accelerator_bytes, a.memory_bytes, a.disk_bytes)
    budgets = Budgets(budget, mesh.host, root)
    commands = with_overrides(a.role_command)
    gpu = GpuRoom(mesh, a.gpu)
    around = Around(mesh, a.worker, commands, root / "logs", budgets, segments, gpu, a.accelerator)
    settings = mesh.settings
    row = WorkerRow(
        a.worker,
        settings.host,
        a.accelerator,
        0,
        budget=budget,
        uuid=a.gpu,
        market=a.market,
        network=settings.network,
    )
    worker = GangWorker(mesh, row, around)
    try:
        async with worker.residents:
            await mesh.join(worker, stats=lambda: worker.stats().encoded())
            await worker.join()
            mesh.ready = True
            why = await first_of(
                [
                    until_orphaned(mesh, a.orphan_s),
                    worker.follow(),
                    worker.turns.run(),
                    worker.residents.watch(),
                ]
            )
            mesh.telemetry.log.warning("worker ends", why=why)
    finally:
        with contextlib.suppress(DeadlineExceeded):
            async with mesh.clock.timeout(LEAVE_S, "leaving"):
                await mesh.leave()


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__)
    found.add_argument("--worker", required=True, help="its id")
    found.add_argument("--accelerator", default="cpu:0")
    found.add_argument("--gpu", default="", help="UUID of the GPU or MIG instance")
    market_option(found)
    budget_options(found)
    found.add_argument("--role-command", action="append", default=[], metavar="ROLE=COMMAND")
    found.add_argument("--orphan-s", type=float, default=ORPHAN_S)
    return found


def market_option(options: argparse.ArgumentParser) -> None:
    options.add_argument("--market", default="reserved", choices=["reserved", "spot", "lent"])


def budget_options(options: argparse.ArgumentParser) -> None:
    for what in ("accelerator", "memory", "disk"):
        options.add_argument(
            f"--{what}-bytes", type=int, default=0, help="that residents may take; 0: all there is"
        )


if __name__ == "__main__":
    arguments = parser().parse_args()
    run(lambda: main(arguments))
