"""Hybrid that stops itself (SIGSTOP) with its first leased round.

It takes the arguments of meshrl.services.trainer.
"""

from __future__ import annotations

import os
import signal

from meshrl.common.api.trainer import RoundLease
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings, run_service
from meshrl.common.state import jobs
from meshrl.common.state.pool.workers.placement import Placement, build_parser
from meshrl.services.trainer.hybrids.hybrid import Hybrid
from meshrl.services.trainer.initialization.initial_weights import create_learner


class StoppedHybrid(Hybrid):
    async def _compute_round(self, lease: RoundLease) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        await super()._compute_round(lease)


async def main(seat: Placement) -> None:
    mesh = await Mesh.open(f"hybrid/{seat.instance}", "hybrid", MeshSettings.from_env())
    row = await jobs.read_job(mesh.state, seat.job)
    data = JobData.from_document(seat.job, row.document, row.run_dir)
    hybrid = StoppedHybrid(mesh, data, seat, create_learner(data))
    await mesh.join(hybrid, stats=hybrid.collect_stats, bulk_address=hybrid.outbox.address)
    try:
        await hybrid.serve()
    finally:
        await mesh.leave()


if __name__ == "__main__":
    seat = Placement.from_args(build_parser(__doc__).parse_args())
    run_service(lambda: main(seat))
