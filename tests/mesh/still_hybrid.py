"""A hybrid that stands still (SIGSTOP) with the first round that it is given in its hands.

Takes what services.trainer takes.
"""

from __future__ import annotations

import argparse
import os
import signal

from common.api.trainer import RoundLease, RoundResult
from common.job.job_data import JobData
from common.runtime.mesh import Mesh, MeshSettings, run
from common.state import jobs
from services.trainer.core.beginning import fresh_learner
from services.trainer.helpers.hybrid import Hybrid


class StillHybrid(Hybrid):
    async def _compute(self, lease: RoundLease) -> RoundResult:
        os.kill(os.getpid(), signal.SIGSTOP)
        return await super()._compute(lease)


async def main(gang: str, job: str, epoch: int) -> None:
    mesh = await Mesh.open(f"hybrid/{gang}", "hybrid", MeshSettings.from_env())
    row = await jobs.job(mesh.state, job)
    data = JobData.of(job, row.document, row.run_dir)
    hybrid = StillHybrid(mesh, data, gang, epoch, fresh_learner(data))
    await mesh.join(hybrid, stats=hybrid.stats, bulk_address=hybrid.outbox.address)
    try:
        await hybrid.serve()
    finally:
        await mesh.leave()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gang", required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--epoch", type=int, required=True)
    arguments = parser.parse_args()
    run(lambda: main(arguments.gang, arguments.job, arguments.epoch))
