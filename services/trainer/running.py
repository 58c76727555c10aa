"""Runs a training process: as the core, as a further rank of its gang, or as a hybrid.

What only a core of several needs is imported where one begins: FSDP takes three seconds of CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from meshrl.common.api.ranks import COMPUTE_S, rank_name
from meshrl.common.base.errors import ConfigError, MeshError
from meshrl.common.hardware.gpus import computing
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.mesh.residents.pausing import stands_while_paused
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings
from meshrl.common.mesh.runtime.patience import patiently
from meshrl.common.state import jobs
from meshrl.common.state.pool.workers.seat import Seat
from meshrl.common.weights.store.local_files import local_job
from meshrl.services.trainer.compute.gradient_transfer import hybrid_name
from meshrl.services.trainer.compute.piece_runner import PieceRunner
from meshrl.services.trainer.core.core import TrainerCore
from meshrl.services.trainer.gang.compute import Compute
from meshrl.services.trainer.hybrids.hybrid import Hybrid
from meshrl.services.trainer.initial.beginning import (
    COMPILE_S,
    adapt,
    check,
    compile_kernels,
    fresh_learner,
)
from meshrl.services.trainer.ranks.rank import Rank

if TYPE_CHECKING:
    from meshrl.services.trainer.arithmetic.learner import Learner


async def main(seat: Seat) -> None:
    settings = MeshSettings.from_env()
    kind, name = place(seat)
    mesh = await Mesh.open(name, kind, settings, seat.job)
    torch.set_num_threads(1)
    await serve(mesh, seat, Arithmetic())


class Arithmetic:
    def prepare(self) -> None:
        """Whatever takes long and is done once on a host. It blocks."""
        compile_kernels()

    def learner(self, data: JobData) -> Learner:
        """That of a core alone, or of a hybrid."""
        _check(data)
        return fresh_learner(data)

    def rank(self, data: JobData, seat: Seat, accelerator: str) -> Rank:
        """One of a core, on an accelerator of this name; of several in no group yet."""
        if seat.ranks == 1:
            return Rank.alone(self.learner(data))
        from meshrl.services.trainer.gang.running import make_rank

        _check(data)
        return make_rank(data, seat, accelerator)


def _check(data: JobData) -> None:
    """NoGpuPath on a worker with a GPU that torch cannot use."""
    if data.config.mesh.device == "cuda":
        computing.need("the trainer")


async def serve(mesh: Mesh, seat: Seat, arithmetic: Arithmetic) -> None:
    row = await patiently(mesh.clock, lambda: jobs.job(mesh.state, seat.job))
    data = await local_job(mesh, row)
    try:
        async with stands_while_paused(mesh, seat.job):
            if data.config.mesh.device == "cpu":
                await mesh.host.run_blocking(arithmetic.prepare, deadline_s=COMPILE_S)
            if seat.rank:
                from meshrl.services.trainer.gang.running import obey

                rank = arithmetic.rank(data, seat, mesh.settings.accelerator)
                await obey(mesh, data, seat, rank, await _profile(mesh, data, seat))
            elif seat.core:
                await train(mesh, data, seat, arithmetic)
            else:
                await help_out(mesh, data, seat, arithmetic)
    finally:
        await mesh.leave()


async def _profile(mesh: Mesh, data: JobData, seat: Seat) -> dict[str, Any]:
    """What a rank publishes of its accelerator, if the planner is to divide the core by that."""
    training = data.config.training
    if seat.ranks == 1 or not training.zebra.auto or training.pace:
        return {}
    from meshrl.services.trainer.zebra.profiling import profile_of

    return await profile_of(mesh, data)


def place(seat: Seat) -> tuple[str, str]:
    """Kind and name of the process in the mesh."""
    if seat.rank:
        return "rank", rank_name(seat.job, seat.rank)
    if seat.core:
        return "trainer", f"trainer/{seat.job}"
    return "hybrid", hybrid_name(seat.resident)


async def train(mesh: Mesh, data: JobData, seat: Seat, arithmetic: Arithmetic) -> None:
    """The core's life; an error in the job itself ends the job with its text."""
    try:
        check(data)
        rank = arithmetic.rank(data, seat, mesh.settings.accelerator)
        group_s = data.config.training.rank_deadline_s if seat.ranks > 1 else COMPUTE_S
        compute = Compute(mesh, data.id, rank, PieceRunner.of(mesh, data, seat), group_s=group_s)
        core = TrainerCore(mesh, data, seat, compute)
    except ConfigError as error:
        await mesh.join(None)  # only who holds a lease ends a job
        await _fail(mesh, data, error)
        raise
    profile = await _profile(mesh, data, seat)
    await mesh.join(core, stats=lambda: core.published() | profile)
    try:
        await core.begin()
        await core.train()
    except ConfigError as error:
        await _fail(mesh, data, error)
        raise


async def _fail(mesh: Mesh, data: JobData, error: ConfigError) -> None:
    await jobs.set_phase(
        mesh.state, data.id, jobs.Phase.FAILED, mesh.token, mesh.name, error=str(error)
    )


async def help_out(mesh: Mesh, data: JobData, seat: Seat, arithmetic: Arithmetic) -> None:
    learner = arithmetic.learner(data)
    adapt(data, learner)
    hybrid = Hybrid(mesh, data, seat, learner)
    await mesh.join(hybrid, stats=hybrid.published, bulk_address=hybrid.outbox.address)
    try:
        await hybrid.serve()
    except MeshError as error:
        mesh.telemetry.log.error("hybrid", error=str(error))
        raise
