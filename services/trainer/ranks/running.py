"""How the ranks of a core of several run: the first one as the core, the others as it orders."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh

from common.job.job_data import JobData
from common.runtime.mesh import Mesh
from services.trainer.core.beginning import fresh
from services.trainer.ranks.actor import RankActor
from services.trainer.ranks.gang import GangCompute
from services.trainer.ranks.rank import Rank, ShardedLearner


def make_rank(data: JobData, rank: int, size: int) -> Rank:
    """A rank of a core of `size`, in no group yet."""

    def make(group: DeviceMesh) -> ShardedLearner:
        adapted = partial(ShardedLearner, adapters=data.config.lora, seed=data.config.seed)
        return fresh(data, partial(adapted, mesh=group))

    return Rank(make, rank, size, data.config.mesh.device)


def compute_of(mesh: Mesh, data: JobData, rank: Rank) -> GangCompute:
    """The arithmetic of a core of several ranks, of which this process is the first."""
    meetings = Path(mesh.settings.run_root) / "mesh" / "gangs"
    within_s = data.config.training.rank_deadline_s
    return GangCompute(mesh, data.id, rank, meetings, within_s)


async def obey(mesh: Mesh, data: JobData, gang: str, epoch: int, rank: Rank) -> None:
    """The life of a rank beside the first."""
    within_s = data.config.training.rank_deadline_s
    actor = RankActor(mesh, data.id, gang, epoch, rank, within_s)
    await mesh.join(actor, stats=actor.stats)
    await actor.until_drained()
