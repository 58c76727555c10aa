"""Rank that forms groups with the others and rejects every step.

It takes the arguments of meshrl.services.trainer.
"""

from __future__ import annotations

from meshrl.common.api.ranks import BeginStep, Ranks, rank_name
from meshrl.common.base.errors import Fenced
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.mesh.runtime.calls.actor import call
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings, run_service
from meshrl.common.state import jobs
from meshrl.common.state.pool.workers.placement import Placement, build_parser
from meshrl.services.trainer.gang.rank_process import make_rank
from meshrl.services.trainer.ranks.rank_actor import RankActor


class RejectingRank(RankActor):
    @call(Ranks.begin_step)
    def begin_step(self, order: BeginStep) -> None:
        raise Fenced("this rank never begins")


async def main(seat: Placement) -> None:
    mesh = await Mesh.open(rank_name(seat.job, seat.rank), "rank", MeshSettings.from_env())
    row = await jobs.read_job(mesh.state, seat.job)
    data = JobData.from_document(seat.job, row.document, row.run_dir)
    rank = make_rank(data, seat)
    actor = RejectingRank(mesh, data, seat, rank)
    await mesh.join(actor, stats=actor.collect_stats)
    try:
        await actor.wait_until_drained()
    finally:
        await mesh.leave()


if __name__ == "__main__":
    seat = Placement.from_args(build_parser(__doc__).parse_args())
    run_service(lambda: main(seat))
