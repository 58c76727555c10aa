"""Worker: reconciles its processes with its gang's record, and reports what runs.

It polls only its own record, which names its gang and changes whenever the gang does. It imports no
model code: its children, the role processes, do. It survives the agent. It exits when no agent of
its host has held its lease for a minute, or Redis was unreachable that long.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
from dataclasses import replace
from pathlib import Path

from meshrl.common.api.calls.interface import ChangeHint
from meshrl.common.api.node import Worker
from meshrl.common.api.stats import WorkerStats
from meshrl.common.base.errors import DeadlineExceeded, StateUnavailable
from meshrl.common.base.host.settings import BUDGET_VARIABLES
from meshrl.common.mesh.instances.orphans import ORPHAN_TIMEOUT_S, wait_until_orphaned
from meshrl.common.mesh.runtime.calls.actor import cast
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings, run_service
from meshrl.common.mesh.runtime.task_groups import run_first
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.workers.process_names import worker_name
from meshrl.common.state.pool.workers.rows import (
    MARKETS,
    Gang,
    InstancePhase,
    InstanceReport,
    Tier,
    TierBytes,
)
from meshrl.common.state.pool.workers.rows import WorkerRow as WorkerRow
from meshrl.services.node.instances.budgets import Budgets
from meshrl.services.node.instances.desired_roles import (
    DesiredRole,
    find_name_conflicts,
    list_desired_roles,
    override_commands,
)
from meshrl.services.node.instances.gpu_memory import GpuMemoryGuard
from meshrl.services.node.instances.role_process import WorkerContext
from meshrl.services.node.instances.segments import MemorySegments, SegmentCallsMixin
from meshrl.services.node.instances.worker_instances import WorkerInstances
from meshrl.services.node.residency.residency_manager import ResidencyManager
from meshrl.services.node.slices.slice_calls import SliceCallsMixin
from meshrl.services.node.slices.slice_scheduler import SliceScheduler

POLL_S = 0.5  # between two polls of the record; a hint arrives earlier
LEAVE_TIMEOUT_S = 3.0  # to release the name
MIN_RATE_CHANGE = 1.5  # factor by which a rate of moves has changed before it is published again


class GangWorker(SliceCallsMixin, SegmentCallsMixin):
    """Actor of a worker; `row` is its record at joining, and later state comes from Redis."""

    interface = Worker

    def __init__(self, mesh: Mesh, row: WorkerRow, context: WorkerContext) -> None:
        self._mesh, self._row, self._budgets = mesh, row, context.budgets
        self.residency = ResidencyManager(
            mesh,
            context.budgets,
            context.gpu_memory,
            lambda: self.instances.processes,
            lambda *killed: self.instances.kill(*killed),
        )
        self._wakeup = asyncio.Event()
        self._seen_revision: tuple[str, int, int] | None = None  # gang, membership, revision
        self._has_deleted_old_files = False  # offloaded by earlier instances to disk
        self.gang: Gang | None = None
        self.instances = WorkerInstances(
            replace(context, room=self.residency),
            self._invalidate_record,
            self._release_instance,
        )
        self.slice_scheduler = SliceScheduler(mesh, row.id, self.instances.kill, self.residency)
        self.segments = context.segments

    def stats(self) -> WorkerStats:
        workers = self.gang.workers if self.gang is not None else ()
        slice_stats = self.slice_scheduler.stats()
        return WorkerStats(
            slice_stats.granted_slices,
            slice_stats.killed_slices,
            slice_stats.slice_holders,
            worker=self._row.id,
            accelerator=self._row.accelerator,
            gang=self.gang.id if self.gang is not None else "",
            rank=workers.index(self._row.id) if self._row.id in workers else 0,
            used_bytes=self._budgets.stats(),
            instances=self.instances.stats(),
        )

    def _release_instance(self, instance: str) -> None:
        """End what waits for an instance's process, which has exited."""
        self.residency.release_instance(instance)
        self.slice_scheduler.release_instance(instance)

    @cast(Worker.notify_change)
    def notify_change(self, hint: ChangeHint) -> None:
        """Read the worker's record now instead of at the next poll."""
        self._wakeup.set()

    async def is_process(self, name: str, incarnation: str, owner: str | bytes) -> bool:
        """Return True if this worker runs the process of that name, incarnation and key."""
        return await self.instances.is_process(name, incarnation, owner)

    async def register(self) -> WorkerRow:
        """Register this worker, or adopt its existing record; return the record."""
        mesh = self._mesh
        return await pool.join_worker(mesh.state, replace(self._row, token=mesh.token))

    async def run(self) -> None:
        """Reconcile with the record until cancelled. A poll that Redis does not answer changes
        nothing.
        """
        while True:
            with contextlib.suppress(StateUnavailable, DeadlineExceeded):
                await self._poll_record()
                await self.publish_copy_rates()
            with contextlib.suppress(DeadlineExceeded):
                async with self._mesh.clock.timeout(POLL_S, "waiting for a hint"):
                    await self._wakeup.wait()
            self._wakeup.clear()

    async def _poll_record(self) -> None:
        """Read the worker's record; apply its gang's record if either has changed."""
        row = await pool.read_worker(self._mesh.state, self._row.id)
        if row is None or row.token != self._mesh.token:
            row = await self.register()
        revision = (row.gang, row.membership, row.revision)
        if revision == self._seen_revision:
            return
        self._seen_revision = revision  # read before the gang, which is therefore at least as new
        try:
            self.gang = await pool.read_gang(self._mesh.state, row.gang) if row.gang else None
            if self.gang is not None and self.gang.workers[0] == row.id:
                settings = await pool.read_settings(self._mesh.state)
                self.slice_scheduler.set_policy(settings.slice_policy)
        except (StateUnavailable, DeadlineExceeded):
            self._seen_revision = None
            raise
        desired_roles = list_desired_roles(self.gang, self._row.id)
        if not self._has_deleted_old_files:
            self._has_deleted_old_files = True
            await self.instances.delete_other_files(desired_roles)
        self.instances.set_desired(desired_roles)
        self.slice_scheduler.set_gang(self.gang)
        for desired, holder in find_name_conflicts(self.gang, self._row.id):
            await self._report_conflict(desired, holder)

    async def publish_copy_rates(self) -> None:
        """Publish the measured rates of moves if they have changed."""
        rates, known = self.residency.copy_rates, self._row.copy_rates
        changes = [(rate + 1.0) / (known.get(way, 0.0) + 1.0) for way, rate in rates.items()]
        if any(not 1 / MIN_RATE_CHANGE < change < MIN_RATE_CHANGE for change in changes):
            row = replace(self._row, copy_rates=rates)
            await pool.join_worker(self._mesh.state, replace(row, token=self._mesh.token))
            self._row = row

    async def _report_conflict(self, desired: DesiredRole, holder: str) -> None:
        """Report that an instance has no process, because another one has its name."""
        instance = desired.instance
        why = (
            f"{instance.id} cannot start here: {desired.name} already belongs to {holder} on "
            "this worker"
        )
        report = InstanceReport(
            rank=desired.rank,
            generation=instance.generation,
            epoch=instance.epoch,
            token=self._mesh.token,
            phase=InstancePhase.FAILED,
            tier=Tier.ABSENT,
            detail=f"{why}; remove one of them",
        )
        if report == desired.last_report:
            return
        try:
            accepted = await pool.report_instance(
                self._mesh.state, self._row.id, desired.gang, instance.id, report
            )
        except (StateUnavailable, DeadlineExceeded):
            self._seen_revision = None
            raise
        if not accepted:
            self._invalidate_record()

    def _invalidate_record(self) -> None:
        """Mark the record as stale: a report was rejected, so the record has changed since it was
        read.
        """
        self._seen_revision = None
        self._wakeup.set()


async def main(args: argparse.Namespace) -> None:
    """Open the mesh as this worker, and serve until it must exit."""
    await serve(await Mesh.open(worker_name(args.worker), "worker", MeshSettings.from_env()), args)


async def serve(mesh: Mesh, args: argparse.Namespace) -> None:
    """Serve in a scope that owns the memory segments, which outlive the role processes."""
    root = Path(mesh.settings.run_root) / "mesh"

    def read_free_bytes() -> int:
        return mesh.host.measure_free_space(root).memory_bytes

    async with MemorySegments(
        read_free_bytes, args.memory_bytes, mesh.name
    ) as segments:  # longer than their processes' end
        await _serve_with_segments(mesh, args, root, segments)


async def _serve_with_segments(
    mesh: Mesh, args: argparse.Namespace, root: Path, segments: MemorySegments
) -> None:
    """Run the worker until it is orphaned, cancelled, or loses its lease; then leave the mesh."""
    budget = TierBytes(args.accelerator_bytes, args.memory_bytes, args.disk_bytes)
    budgets = Budgets(budget, mesh.host, root, lambda: segments.unused_bytes)
    commands = override_commands(args.role_command)
    gpu_memory = GpuMemoryGuard(mesh, args.gpu)
    context = WorkerContext(
        mesh, args.worker, commands, root / "logs", budgets, segments, gpu_memory, args.accelerator
    )
    settings = mesh.settings
    row = WorkerRow(
        args.worker,
        settings.host,
        args.accelerator,
        0,
        budget=budget,
        uuid=args.gpu,
        market=args.market,
        price=args.price,
        network=settings.network,
    )
    worker = GangWorker(mesh, row, context)
    try:
        async with worker.residency, worker.instances:
            await mesh.join(worker, stats=lambda: worker.stats().encode())
            await worker.register()
            mesh.ready = True
            why = await run_first(
                [
                    wait_until_orphaned(mesh, args.orphan_s),
                    worker.run(),
                    worker.release_segments(),
                    worker.slice_scheduler.run(),
                    worker.instances.watch_leases(),
                ]
            )
            mesh.telemetry.log.warning("worker exits", why=why)
    finally:
        with contextlib.suppress(DeadlineExceeded):
            async with mesh.clock.timeout(LEAVE_TIMEOUT_S, "leaving"):
                await mesh.leave()


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", required=True, help="worker id")
    parser.add_argument("--accelerator", default="cpu:0")
    parser.add_argument("--gpu", default="", help="UUID of the GPU or MIG instance")
    add_market_option(parser)
    add_budget_options(parser)
    parser.add_argument("--role-command", action="append", default=[], metavar="ROLE=COMMAND")
    parser.add_argument("--orphan-s", type=float, default=ORPHAN_TIMEOUT_S)
    return parser


def add_market_option(options: argparse.ArgumentParser) -> None:
    """Add `--market`, the kind of capacity, and `--price`, which the cost of a job counts."""
    options.add_argument("--market", default=MARKETS[0], choices=MARKETS)
    options.add_argument("--price", type=float, default=0.0, help="of an hour of each worker")


def add_budget_options(options: argparse.ArgumentParser) -> None:
    """Add an option for the byte budget of each tier."""
    for tier, variable in BUDGET_VARIABLES.items():
        options.add_argument(
            f"--{tier}-bytes",
            type=int,
            default=os.environ.get(variable, "0"),
            help=f"bytes that instances may use; 0: all; also in ${variable}",
        )


if __name__ == "__main__":
    arguments = build_parser().parse_args()
    run_service(lambda: main(arguments))
