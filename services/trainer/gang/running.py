"""How the ranks of a core of several run: the first one as the core, the others as it orders."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from meshrl.common.base.clock import SystemClock
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.bundle.model_shape import model_config
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state.pool.workers.rows import Apart
from meshrl.common.state.pool.workers.seat import Seat
from meshrl.services.trainer.arithmetic.learner import LearnerSettings
from meshrl.services.trainer.bins.division import EvenDivision, RoundDivision, ZebraDivision
from meshrl.services.trainer.initial.beginning import DTYPES, outlined
from meshrl.services.trainer.ranks.actor import RankActor
from meshrl.services.trainer.ranks.rank import Rank
from meshrl.services.trainer.sharding.learners import GangPlace, RowsLearner, ShardedLearner
from meshrl.services.trainer.zebra.alike import PacedBins
from meshrl.services.trainer.zebra.learner import ZebraLearner
from meshrl.services.trainer.zebra.pace import pace_of


def make_rank(data: JobData, seat: Seat, accelerator: str = "") -> Rank:
    """Make a rank on this accelerator, in no group yet; ConfigError without its pace."""
    division = division_of(data, seat.ranks, seat.apart)
    pace = pace_of(data, accelerator)

    def make(group: DeviceMesh) -> RowsLearner:
        config = data.config
        model, beginning = outlined(data)
        temperature, dtype = config.rollout.temperature, DTYPES[config.training.dtype]
        settings = LearnerSettings(config.optimizer, config.algorithm, temperature, dtype)
        place = GangPlace(group, beginning, config.training.rank_deadline_s)
        if isinstance(division, ZebraDivision):
            again = config.training.activation_checkpointing
            return ZebraLearner(model, settings, place, division, again, pace)
        parallel = config.training.expert_parallel
        return ShardedLearner(model, settings, place, config.lora, config.seed, parallel)

    bins, device = None, data.config.mesh.device
    if pace is not None and isinstance(division, EvenDivision):  # else tasks keep it
        bins = PacedBins(pace, division.expert_parallel, SystemClock())
    return Rank(make, seat.rank, seat.ranks, device, division, pace, bins)


def division_of(data: JobData, ranks: int, apart: Apart | None = None) -> RoundDivision:
    """Return how so many ranks compute rounds, of which the planner may set some `apart`."""
    if apart is not None:
        experts = ranks - apart.attention
        return ZebraDivision(apart.attention, experts, apart.micro_batches, apart.hosted)
    training = data.config.training
    zebra = training.zebra
    if not zebra.attention:
        return EvenDivision(ranks, training.expert_parallel)
    layers = len(model_config(data).sparse_layers)
    hosted = zebra.hosted or [0]
    each = hosted * layers if len(hosted) == 1 else hosted
    experts = ranks - zebra.attention
    return ZebraDivision(zebra.attention, experts, zebra.micro_batches, tuple(each))


async def obey(mesh: Mesh, data: JobData, seat: Seat, rank: Rank, profile: dict[str, Any]) -> None:
    """The life of a rank beside the first. `profile`: what it publishes of its accelerator."""
    actor = RankActor(mesh, data, seat, rank)
    await mesh.join(actor, stats=lambda: actor.published() | profile)
    await actor.until_drained()
