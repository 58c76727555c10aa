"""Runs a training process: as the core, as a further rank of its gang, or as a hybrid.

What only a core of several needs is imported where one begins: FSDP takes three seconds of CPU.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import torch

from common.api.ranks import rank_name
from common.errors import ConfigError, MeshError
from common.job.job_data import JobData
from common.runtime.mesh import Mesh, MeshSettings
from common.runtime.patience import patiently
from common.state import jobs
from services.trainer.core.beginning import (
    COMPILE_S,
    adapt,
    check,
    compile_kernels,
    fresh_learner,
)
from services.trainer.core.core import TrainerCore
from services.trainer.helpers.hybrid import Hybrid

if TYPE_CHECKING:
    from services.trainer.arithmetic.learner import Learner
    from services.trainer.ranks.rank import Rank


async def main(a: argparse.Namespace) -> None:
    settings = MeshSettings.from_env()
    kind, name = place(a)
    mesh = await Mesh.open(name, kind, settings)
    torch.set_num_threads(1)
    await serve(mesh, a, Arithmetic())


class Arithmetic:
    """What training processes compute with."""

    def prepare(self) -> None:
        """Whatever takes long and is done once on a host. It blocks."""
        compile_kernels()

    def learner(self, data: JobData) -> Learner:
        """That of a core alone, or of a hybrid."""
        return fresh_learner(data)

    def rank(self, data: JobData, rank: int, size: int) -> Rank:
        """One of a core of `size`, in no group yet."""
        from services.trainer.ranks.running import make_rank

        return make_rank(data, rank, size)


async def serve(mesh: Mesh, a: argparse.Namespace, arithmetic: Arithmetic) -> None:
    """The life of a training process."""
    row = await patiently(mesh.clock, lambda: jobs.job(mesh.state, a.job))
    if row is None:
        raise ConfigError(f"no job is called {a.job}", where=mesh.name)
    data = JobData.of(a.job, row.document, row.run_dir)
    try:
        if data.config.mesh.device == "cpu":
            await mesh.host.run_blocking(arithmetic.prepare, deadline_s=COMPILE_S)
        if a.rank:
            from services.trainer.ranks.running import obey

            await obey(mesh, data, a.gang, a.epoch, arithmetic.rank(data, a.rank, a.ranks))
        elif a.core:
            await train(mesh, data, a.gang, a.epoch, a.ranks, arithmetic)
        else:
            await help_out(mesh, data, a.gang, a.epoch, arithmetic)
    finally:
        await mesh.leave()


def place(a: argparse.Namespace) -> tuple[str, str]:
    """Kind and name of the process in the mesh."""
    if a.rank:
        return "rank", rank_name(a.job, a.rank)
    return ("trainer", f"trainer/{a.job}") if a.core else ("hybrid", f"hybrid/{a.gang}")


async def train(
    mesh: Mesh, data: JobData, gang: str, epoch: int, size: int, arithmetic: Arithmetic
) -> None:
    """The core's life; an error in the job itself ends the job with its text."""
    try:
        core = _core(mesh, data, gang, epoch, size, arithmetic)
    except ConfigError as error:
        await mesh.join(None)  # only who holds a lease ends a job
        await _fail(mesh, data, error)
        raise
    await mesh.join(core, stats=core.stats)
    try:
        await core.begin()
        await core.train()
    except ConfigError as error:
        await _fail(mesh, data, error)
        raise


def _core(
    mesh: Mesh, data: JobData, gang: str, epoch: int, size: int, arithmetic: Arithmetic
) -> TrainerCore:
    check(data)
    if size == 1:
        return TrainerCore(mesh, data, gang, epoch, arithmetic.learner(data))
    from services.trainer.ranks.running import compute_of

    compute = compute_of(mesh, data, arithmetic.rank(data, 0, size))
    return TrainerCore(mesh, data, gang, epoch, compute)


async def _fail(mesh: Mesh, data: JobData, error: ConfigError) -> None:
    await jobs.set_phase(
        mesh.state, data.id, jobs.Phase.FAILED, mesh.token, mesh.name, error=str(error)
    )


async def help_out(
    mesh: Mesh, data: JobData, gang: str, epoch: int, arithmetic: Arithmetic
) -> None:
    """A hybrid's life."""
    learner = arithmetic.learner(data)
    adapt(data, learner)
    hybrid = Hybrid(mesh, data, gang, epoch, learner)
    await mesh.join(hybrid, stats=hybrid.stats, bulk_address=hybrid.outbox.address)
    try:
        await hybrid.serve()
    except MeshError as error:
        mesh.telemetry.log.error("hybrid", error=str(error))
        raise
