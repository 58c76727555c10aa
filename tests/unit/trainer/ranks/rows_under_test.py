"""Sharded model of `batches_under_test`."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.initial_parameters import RandomParameters
from meshrl.common.model.network.decoder import Decoder
from meshrl.services.trainer.learner.learner import LearnerSettings
from meshrl.services.trainer.sharding import expert_parallel, fsdp
from meshrl.services.trainer.sharding.fsdp import MAX_UNSHARDED_BYTES
from meshrl.services.trainer.sharding.learners import FsdpLearner, RankContext
from tests.unit.trainer.ranks.batches_under_test import MODEL_SEED, OPTIMIZER, variant_of


def sharded_learner(variant: str, mesh: DeviceMesh) -> FsdpLearner:
    """Return the sharded counterpart of `fresh_learner` for one rank."""
    chosen = variant_of(variant)
    shape = ModelConfig.from_hf(chosen.model)
    with torch.device("meta"):
        model = Decoder(shape)
    for module in (fsdp, expert_parallel):
        vars(module)["MAX_UNSHARDED_BYTES"] = 0 if chosen.large else MAX_UNSHARDED_BYTES
    settings = LearnerSettings(OPTIMIZER, chosen.algorithm, dtype=chosen.dtype)
    place = RankContext(mesh, RandomParameters(shape, MODEL_SEED))
    return FsdpLearner(model, settings, place, chosen.adapters, 3, chosen.expert_parallel)
