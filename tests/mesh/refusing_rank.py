"""A rank that forms groups with the others, and then refuses every step.

Takes what services.trainer takes.
"""

from __future__ import annotations

import argparse

from common.api.ranks import Done, Order, Ranks, rank_name
from common.errors import Fenced
from common.job.job_data import JobData
from common.runtime.actor import call
from common.runtime.mesh import Mesh, MeshSettings, run
from common.state import jobs
from services.trainer.ranks.actor import RankActor
from services.trainer.ranks.running import make_rank


class RefusingRank(RankActor):
    @call(Ranks.begin)
    def begin(self, order: Order) -> Done:
        raise Fenced("this rank never begins")


async def main(a: argparse.Namespace) -> None:
    mesh = await Mesh.open(rank_name(a.job, a.rank), "rank", MeshSettings.from_env())
    row = await jobs.job(mesh.state, a.job)
    data = JobData.of(a.job, row.document, row.run_dir)
    rank = make_rank(data, a.rank, a.ranks)
    actor = RefusingRank(mesh, a.job, a.gang, a.epoch, rank, data.config.training.rank_deadline_s)
    await mesh.join(actor, stats=actor.stats)
    try:
        await actor.until_drained()
    finally:
        await mesh.leave()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gang", required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--epoch", type=int, required=True)
    parser.add_argument("--core", action="store_true")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    arguments = parser.parse_args()
    run(lambda: main(arguments))
