"""How the ranks of a core of several run: the first one as the core, the others as it orders."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from common.job.job_data import JobData
from common.pool.seat import Seat
from common.runtime.mesh import Mesh
from common.wire.meeting import meetings_of
from services.trainer.core.beginning import DTYPES, outlined
from services.trainer.ranks.actor import RankActor
from services.trainer.ranks.gang import GangCompute
from services.trainer.ranks.rank import Rank
from services.trainer.sharding.learners import ShardedLearner


def make_rank(data: JobData, rank: int, size: int) -> Rank:
    """A rank of a core of `size`, in no group yet."""

    def make(group: DeviceMesh) -> ShardedLearner:
        config = data.config
        model, beginning = outlined(data)
        return ShardedLearner(
            model,
            config.optimizer,
            config.algorithm,
            config.rollout.temperature,
            DTYPES[config.training.dtype],
            mesh=group,
            beginning=beginning,
            adapters=config.lora,
            seed=config.seed,
            expert_parallel=config.training.expert_parallel,
        )

    return Rank(make, rank, size, data.config.mesh.device)


def compute_of(mesh: Mesh, data: JobData, rank: Rank) -> GangCompute:
    """The arithmetic of a core of several ranks, of which this process is the first."""
    meetings = meetings_of(mesh.settings)
    within_s = data.config.training.rank_deadline_s
    return GangCompute(mesh, data.id, rank, meetings, within_s)


async def obey(mesh: Mesh, data: JobData, seat: Seat, rank: Rank) -> None:
    """The life of a rank beside the first."""
    actor = RankActor(mesh, data, seat, rank)
    await mesh.join(actor, stats=actor.stats)
    await actor.until_drained()
