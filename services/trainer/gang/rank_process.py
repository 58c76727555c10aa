"""Ranks of a core of several processes: the core is the first, and orders the others."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from meshrl.common.base.clock import SystemClock
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.bundle.model_shape import load_model_config
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state.pool.workers.placement import Placement
from meshrl.common.state.pool.workers.rows import ExpertSplit
from meshrl.services.trainer.bins.division import EvenDivision, RoundDivision, ZebraDivision
from meshrl.services.trainer.initialization.initial_weights import (
    DTYPES,
    build_meta_model,
    describe_model,
)
from meshrl.services.trainer.learner.learner import LearnerSettings
from meshrl.services.trainer.ranks.rank import Rank
from meshrl.services.trainer.ranks.rank_actor import RankActor
from meshrl.services.trainer.sharding.learners import FsdpLearner, RankContext, RowShardedLearner
from meshrl.services.trainer.zebra.emulated_bins import EmulatedBins
from meshrl.services.trainer.zebra.zebra_emulation import build_emulation
from meshrl.services.trainer.zebra.zebra_learner import ZebraLearner

STATE_TENSORS = 3  # a weight and two moments, in float32


def make_rank(data: JobData, placement: Placement, accelerator: str = "") -> Rank:
    """Return a rank on this accelerator, in no group; ConfigError for an undeclared one."""
    division = build_division(data, placement.ranks, placement.expert_split)
    pace = build_emulation(data, accelerator)

    def make(group: DeviceMesh) -> RowShardedLearner:
        config = data.config
        model, beginning = build_meta_model(data)
        temperature, dtype = config.rollout.temperature, DTYPES[config.training.dtype]
        settings = LearnerSettings(config.optimizer, config.algorithm, temperature, dtype)
        place = RankContext(group, beginning, config.training.rank_deadline_s)
        if isinstance(division, ZebraDivision):
            again = config.training.activation_checkpointing
            return ZebraLearner(model, settings, place, division, again, pace)
        parallel = config.training.expert_parallel
        return FsdpLearner(model, settings, place, config.lora, config.seed, parallel)

    bins, device = None, data.config.mesh.device
    if pace is not None and isinstance(division, EvenDivision):  # otherwise tasks are padded
        bins = EmulatedBins(pace, division.expert_parallel, SystemClock())
    state_bytes = STATE_TENSORS * 4 * describe_model(data)[1]
    about = placement.rank, placement.ranks, device, division, pace, bins, state_bytes
    return Rank(make, *about)


def build_division(
    data: JobData, ranks: int, expert_split: ExpertSplit | None = None
) -> RoundDivision:
    """Return the division of rounds over ranks, with the planner's `expert_split` if any."""
    if expert_split is not None:
        experts = ranks - expert_split.attention_ranks
        return ZebraDivision(
            expert_split.attention_ranks,
            experts,
            expert_split.micro_batches,
            expert_split.hosted_experts,
        )
    training = data.config.training
    zebra = training.zebra
    if not zebra.attention:
        return EvenDivision(ranks, training.expert_parallel)
    layers = len(load_model_config(data).sparse_layers)
    hosted = zebra.hosted or [0]
    each = hosted * layers if len(hosted) == 1 else hosted
    experts = ranks - zebra.attention
    return ZebraDivision(zebra.attention, experts, zebra.micro_batches, tuple(each))


async def run_rank(
    mesh: Mesh, data: JobData, placement: Placement, rank: Rank, profile: dict[str, Any]
) -> None:
    """Run a rank beside the first; it publishes `profile` of its accelerator."""
    actor = RankActor(mesh, data, placement, rank)
    await mesh.join(actor, stats=lambda: actor.collect_stats() | profile)
    await actor.wait_until_drained()
