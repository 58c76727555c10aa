"""How a training process runs: as core, as a rank of a core of several, or as hybrid."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from common.errors import ConfigError, MeshError
from common.job.job_data import JobData
from common.runtime.mesh import Mesh, MeshSettings
from common.runtime.patience import patiently
from common.state import jobs
from services.trainer.arithmetic.learner import Learner
from services.trainer.core.beginning import (
    COMPILE_S,
    adapt,
    check,
    compile_kernels,
    fresh,
    fresh_learner,
)
from services.trainer.core.core import TrainerCore
from services.trainer.helpers.hybrid import Hybrid
from services.trainer.ranks.actor import RankActor, rank_name
from services.trainer.ranks.gang import GangCompute
from services.trainer.ranks.rank import Rank, ShardedLearner


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
            await obey(mesh, data, a.gang, a.epoch, make_rank(data, a.rank, a.ranks))
        elif a.core:
            rank = make_rank(data, 0, a.ranks) if a.ranks > 1 else None
            await train(mesh, data, a.gang, a.epoch, rank)
        else:
            await help_out(mesh, data, a.gang, a.epoch)
    finally:
        await mesh.leave()


def _place(a: argparse.Namespace) -> tuple[str, str]:
    """Kind and name of the process in the mesh."""
    if a.rank:
        return "rank", rank_name(a.job, a.rank)
    return ("trainer", f"trainer/{a.job}") if a.core else ("hybrid", f"hybrid/{a.gang}")


def make_rank(data: JobData, rank: int, ranks: int) -> Rank:
    """A rank of a core of several, in no group yet."""

    def make(group: DeviceMesh) -> ShardedLearner:
        adapted = partial(ShardedLearner, adapters=data.config.lora, seed=data.config.seed)
        return fresh(data, partial(adapted, mesh=group))

    return Rank(make, rank, ranks, data.config.mesh.device)


async def train(mesh: Mesh, data: JobData, gang: str, epoch: int, rank: Rank | None) -> None:
    """The core's life; an error in the job itself ends the job with its text."""
    try:
        core = _core(mesh, data, gang, epoch, rank)
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


def _core(mesh: Mesh, data: JobData, gang: str, epoch: int, rank: Rank | None) -> TrainerCore:
    check(data)
    arithmetic: Learner | GangCompute
    if rank is None:
        arithmetic = fresh_learner(data)
    else:
        meetings = Path(mesh.settings.run_root) / "mesh" / "gangs"
        within_s = data.config.training.rank_deadline_s
        arithmetic = GangCompute(mesh, data.id, rank, meetings, within_s)
    return TrainerCore(mesh, data, gang, epoch, arithmetic)


async def _fail(mesh: Mesh, data: JobData, error: ConfigError) -> None:
    await jobs.set_phase(
        mesh.state, data.id, jobs.Phase.FAILED, mesh.token, mesh.name, error=str(error)
    )


async def obey(mesh: Mesh, data: JobData, gang: str, epoch: int, rank: Rank) -> None:
    """The life of a rank beside the first."""
    within_s = data.config.training.rank_deadline_s
    actor = RankActor(mesh, data.id, gang, epoch, rank, within_s)
    await mesh.join(actor, stats=actor.stats)
    await actor.until_drained()


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
