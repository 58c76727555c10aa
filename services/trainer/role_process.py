"""Training process: a core, a further rank of its gang, or a hybrid.

Only a core of several ranks imports FSDP, which takes three seconds of CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from meshrl.common.api.ranks import COMPUTE_TIMEOUT_S, rank_name
from meshrl.common.base.errors import ConfigError, MeshError
from meshrl.common.hardware.gpus import gpu_requirement
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.mesh.instances.job_pauses import follow_job_pauses
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings
from meshrl.common.mesh.runtime.retry_policy import retry
from meshrl.common.records.slice_records import record_slices
from meshrl.common.state import jobs
from meshrl.common.state.pool.workers.placement import Placement
from meshrl.common.weights.store.job_files import open_local_job
from meshrl.services.trainer.compute.gradient_transfer import make_hybrid_name
from meshrl.services.trainer.compute.piece_runner import PieceRunner
from meshrl.services.trainer.core.core import TrainerCore
from meshrl.services.trainer.gang.gang_compute import GangCompute
from meshrl.services.trainer.hybrids.hybrid import Hybrid
from meshrl.services.trainer.initialization.initial_weights import (
    COMPILE_TIMEOUT_S,
    add_adapters,
    check_job,
    compile_kernels,
    create_learner,
)
from meshrl.services.trainer.ranks.rank import Rank

if TYPE_CHECKING:
    from meshrl.services.trainer.learner.learner import Learner


async def main(placement: Placement) -> None:
    settings = MeshSettings.from_env()
    kind, name = get_process_kind_and_name(placement)
    mesh = await Mesh.open(name, kind, settings, placement.job)
    torch.set_num_threads(1)
    await run_role(mesh, placement, LearnerFactory())


class LearnerFactory:
    def prepare(self) -> None:
        """Do the slow preparations that a host needs once; it blocks."""
        compile_kernels()

    def make_learner(self, data: JobData) -> Learner:
        """Return the learner of a single-rank core or of a hybrid."""
        _check_gpu(data)
        return create_learner(data)

    def make_rank(self, data: JobData, placement: Placement, accelerator: str) -> Rank:
        """Return a core's rank on this accelerator; with several ranks it is in no group yet."""
        if placement.ranks == 1:
            return Rank.for_single_rank(self.make_learner(data))
        from meshrl.services.trainer.gang.rank_process import make_rank

        _check_gpu(data)
        return make_rank(data, placement, accelerator)


def _check_gpu(data: JobData) -> None:
    """Raise NoGpuPath on a worker with a GPU that torch cannot use."""
    if data.config.mesh.device == "cuda":
        gpu_requirement.require_gpu("the trainer")


async def run_role(mesh: Mesh, placement: Placement, learner_factory: LearnerFactory) -> None:
    row = await retry(mesh.clock, lambda: jobs.read_job(mesh.state, placement.job))
    data = await open_local_job(mesh, row)
    try:
        async with follow_job_pauses(mesh, placement.job):
            if data.config.mesh.device == "cpu":
                await mesh.host.run_blocking(learner_factory.prepare, deadline_s=COMPILE_TIMEOUT_S)
            if placement.rank:
                from meshrl.services.trainer.gang.rank_process import run_rank

                rank = learner_factory.make_rank(data, placement, mesh.settings.accelerator)
                await run_rank(
                    mesh, data, placement, rank, await _measure_profile(mesh, data, placement)
                )
            elif placement.core:
                await run_core(mesh, data, placement, learner_factory)
            else:
                await run_hybrid(mesh, data, placement, learner_factory)
    finally:
        await mesh.leave()


async def _measure_profile(mesh: Mesh, data: JobData, placement: Placement) -> dict[str, Any]:
    """Return the accelerator profile to publish, if the planner divides the core by it."""
    training = data.config.training
    if placement.ranks == 1 or not training.zebra.auto or training.emulate:
        return {}
    from meshrl.services.trainer.zebra.accelerator_profile import load_or_measure_profile

    return await load_or_measure_profile(mesh, data)


def get_process_kind_and_name(placement: Placement) -> tuple[str, str]:
    """Return the kind and name of the process in the mesh."""
    if placement.rank:
        return "rank", rank_name(placement.job, placement.rank)
    if placement.core:
        return "trainer", f"trainer/{placement.job}"
    return "hybrid", make_hybrid_name(placement.instance)


async def run_core(
    mesh: Mesh, data: JobData, placement: Placement, learner_factory: LearnerFactory
) -> None:
    """Run the core; an error in the job itself ends the job with its text."""
    try:
        check_job(data)
        rank = learner_factory.make_rank(data, placement, mesh.settings.accelerator)
        group_s = data.config.training.rank_deadline_s if placement.ranks > 1 else COMPUTE_TIMEOUT_S
        compute = GangCompute(
            mesh,
            data.id,
            rank,
            PieceRunner.from_placement(mesh, data, placement),
            collective_timeout_s=group_s,
        )
        core = TrainerCore(mesh, data, placement, compute)
    except ConfigError as error:
        await mesh.join(None)  # only the holder of the lease can end a job
        await _fail_job(mesh, data, error)
        raise
    profile = await _measure_profile(mesh, data, placement)
    await mesh.join(core, stats=lambda: core.collect_stats() | profile)
    try:
        async with record_slices(mesh, data, placement, core.time_slices, compute.kinds):
            await core.begin()
            await core.run_steps()
    except ConfigError as error:
        await _fail_job(mesh, data, error)
        raise


async def _fail_job(mesh: Mesh, data: JobData, error: ConfigError) -> None:
    await jobs.set_phase(
        mesh.state, data.id, jobs.Phase.FAILED, mesh.token, mesh.name, error=str(error)
    )


async def run_hybrid(
    mesh: Mesh, data: JobData, placement: Placement, learner_factory: LearnerFactory
) -> None:
    learner = learner_factory.make_learner(data)
    add_adapters(data, learner)
    learner.drop_moments()
    hybrid = Hybrid(mesh, data, placement, learner)
    await mesh.join(hybrid, stats=hybrid.collect_stats, bulk_address=hybrid.outbox.address)
    try:
        async with record_slices(mesh, data, placement, hybrid.time_slices, hybrid.kinds):
            await hybrid.serve()
    except MeshError as error:
        mesh.telemetry.log.error("hybrid", error=str(error))
        raise
