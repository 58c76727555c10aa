"""How a training process runs: as core, as a rank of a core of several, or as hybrid.

What only a core of several needs is imported where one begins: FSDP takes three seconds of CPU.
"""

from __future__ import annotations

import argparse

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


async def main(a: argparse.Namespace) -> None:
    settings = MeshSettings.from_env()
    kind, name = _place(a)
    mesh = await Mesh.open(name, kind, settings)
    torch.set_num_threads(1)
    row = await patiently(mesh.clock, lambda: jobs.job(mesh.state, a.job))
    if row is None:
        raise ConfigError(f"no job is called {a.job}", where=name)
    data = JobData.of(a.job, row.document, row.run_dir)
    try:
        if data.config.mesh.device == "cpu":
            await mesh.host.run_blocking(compile_kernels, deadline_s=COMPILE_S)
        if a.rank:
            from services.trainer.ranks.running import obey

            await obey(mesh, data, a.gang, a.epoch, a.rank, a.ranks)
        elif a.core:
            await train(mesh, data, a.gang, a.epoch, a.ranks)
        else:
            await help_out(mesh, data, a.gang, a.epoch)
    finally:
        await mesh.leave()


def _place(a: argparse.Namespace) -> tuple[str, str]:
    """Kind and name of the process in the mesh."""
    if a.rank:
        return "rank", rank_name(a.job, a.rank)
    return ("trainer", f"trainer/{a.job}") if a.core else ("hybrid", f"hybrid/{a.gang}")


async def train(mesh: Mesh, data: JobData, gang: str, epoch: int, size: int) -> None:
    """The core's life; an error in the job itself ends the job with its text."""
    try:
        core = _core(mesh, data, gang, epoch, size)
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


def _core(mesh: Mesh, data: JobData, gang: str, epoch: int, size: int) -> TrainerCore:
    check(data)
    if size == 1:
        return TrainerCore(mesh, data, gang, epoch, fresh_learner(data))
    from services.trainer.ranks.running import compute_of

    arithmetic = compute_of(mesh, data, size)
    return TrainerCore(mesh, data, gang, epoch, arithmetic)


async def _fail(mesh: Mesh, data: JobData, error: ConfigError) -> None:
    await jobs.set_phase(mesh.state, data.id, "failed", mesh.token, mesh.name, error=str(error))


async def help_out(mesh: Mesh, data: JobData, gang: str, epoch: int) -> None:
    """A hybrid's life."""
    learner = fresh_learner(data)
    adapt(data, learner)
    hybrid = Hybrid(mesh, data, gang, epoch, learner)
    await mesh.join(hybrid, stats=hybrid.stats, bulk_address=hybrid.outbox.address)
    try:
        await hybrid.serve()
    except MeshError as error:
        mesh.telemetry.log.error("hybrid", error=str(error))
        raise
