"""How the ranks of a core of several run: the first one as the core, the others as it orders."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from common.job.job_data import JobData
from common.job.model_shape import model_config
from common.pool.seat import Seat
from common.runtime.mesh import Mesh
from common.wire.meeting import meetings_of
from services.trainer.core.beginning import DTYPES, outlined
from services.trainer.ranks.actor import RankActor
from services.trainer.ranks.division import Division, EvenDivision, ZebraDivision
from services.trainer.ranks.gang import GangCompute
from services.trainer.ranks.rank import Rank
from services.trainer.sharding.learners import RowsLearner, ShardedLearner
from services.trainer.zebra.learner import ZebraLearner


def make_rank(data: JobData, rank: int, size: int) -> Rank:
    """A rank of a core of `size`, in no group yet."""
    division = division_of(data, size)

    def make(group: DeviceMesh) -> RowsLearner:
        config = data.config
        model, beginning = outlined(data)
        about = (
            model,
            config.optimizer,
            config.algorithm,
            config.rollout.temperature,
            DTYPES[config.training.dtype],
        )
        if isinstance(division, ZebraDivision):
            return ZebraLearner(
                *about,
                mesh=group,
                beginning=beginning,
                division=division,
                deadline_s=config.training.rank_deadline_s,
                again=config.training.activation_checkpointing,
            )
        return ShardedLearner(
            *about,
            mesh=group,
            beginning=beginning,
            adapters=config.lora,
            seed=config.seed,
            expert_parallel=config.training.expert_parallel,
            deadline_s=config.training.rank_deadline_s,
        )

    return Rank(make, rank, size, data.config.mesh.device, division)


def division_of(data: JobData, ranks: int) -> Division:
    """How the job has its rounds computed by so many ranks."""
    training = data.config.training
    zebra = training.zebra
    if not zebra.attention:
        return EvenDivision(ranks, training.expert_parallel)
    layers = len(model_config(data).sparse_layers)
    hosted = zebra.hosted or [0]
    each = hosted * layers if len(hosted) == 1 else hosted
    experts = ranks - zebra.attention
    return ZebraDivision(zebra.attention, experts, zebra.micro_batches, tuple(each))


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
