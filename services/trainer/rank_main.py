"""Entry of a training process: the role process of a worker in the training role, as core or
hybrid.
"""

from __future__ import annotations

import argparse

import torch

from common.errors import ConfigError, MeshError
from common.jobdata import JobData
from common.mesh import Mesh, MeshSettings, run
from common.patience import patiently
from common.state import jobs
from services.trainer.beginning import check, fresh_learner
from services.trainer.core import TrainerCore
from services.trainer.hybrid import Hybrid


async def main(gang: str, job_id: str, epoch: int, core: bool) -> None:
    settings = MeshSettings.from_env()
    kind, name = ("trainer", f"trainer/{job_id}") if core else ("hybrid", f"hybrid/{gang}")
    mesh = await Mesh.open(name, kind, settings)
    torch.set_num_threads(1)
    row = await patiently(mesh.clock, lambda: jobs.job(mesh.state, job_id))
    if row is None:
        raise ConfigError(f"no job is called {job_id}", where=name)
    data = JobData.of(job_id, row.document, row.run_dir)
    try:
        if core:
            await train(mesh, data, gang, epoch)
        else:
            await help_out(mesh, data, gang, epoch)
    finally:
        await mesh.leave()


async def train(mesh: Mesh, data: JobData, gang: str, epoch: int) -> None:
    """The core's life; an error in the job itself ends the job with its text."""
    check(data)
    learner = fresh_learner(data)
    core = TrainerCore(mesh, data, gang, epoch, learner)
    await mesh.join(core, stats=core.stats)
    try:
        await core.begin()
        await core.train()
    except ConfigError as error:
        await jobs.set_phase(mesh.state, data.id, "failed", mesh.token, mesh.name, error=str(error))
        raise


async def help_out(mesh: Mesh, data: JobData, gang: str, epoch: int) -> None:
    """A hybrid's life."""
    hybrid = Hybrid(mesh, data, gang, epoch, fresh_learner(data))
    await mesh.join(hybrid, stats=hybrid.stats)
    try:
        await hybrid.serve()
    except MeshError as error:
        mesh.telemetry.log.error("hybrid", error=str(error))
        raise


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gang", required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--epoch", type=int, required=True)
    parser.add_argument("--core", action="store_true")
    arguments = parser.parse_args()
    run(lambda: main(arguments.gang, arguments.job, arguments.epoch, arguments.core))
