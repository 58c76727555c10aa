"""Mixtures, gangs and their training rounds, which a gang must compute like one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from meshrl.common.job.config import AlgorithmConfig, OptimizerConfig
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.initial_parameters import RandomParameters, materialize_model
from meshrl.common.model.network.decoder import Decoder
from meshrl.services.trainer.bins.division import ZebraDivision
from meshrl.services.trainer.bins.packing import Bin, make_bins
from meshrl.services.trainer.learner.learner import Learner
from meshrl.services.trainer.models.forward import enable_activation_checkpointing
from tests.unit.trainer.ranks.batches_under_test import MODEL, sequence

SEED = 11
OPTIMIZER = OptimizerConfig(muon_lr=0.003, adamw_lr=0.001, weight_decay=0.01)
ALGORITHM = AlgorithmConfig(entropy_coefficient=0.05)
EXPERTS = 8
QWEN: dict[str, Any] = MODEL | {
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "num_hidden_layers": 3,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.01,
}
MIXTRAL: dict[str, Any] = MODEL | {
    "model_type": "mixtral",
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.02,
}
SHARED: dict[str, Any] = MODEL | {
    "model_type": "qwen2_moe",
    "num_hidden_layers": 4,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 20,
    "mlp_only_layers": [0, 2],
    "router_aux_loss_coef": 0.01,
}


@dataclass(frozen=True)
class Case:
    """Gang of four ranks that trains a mixture."""

    model: Mapping[str, Any]
    shape: ZebraDivision
    top: int = 2
    replayed: bool = False  # with recorded routing
    again: bool = False  # activation checkpointing
    dtype: torch.dtype = torch.float32
    experts: int = EXPERTS

    @property
    def config(self) -> ModelConfig:
        return ModelConfig.from_hf({**self.model, "num_experts_per_tok": self.top})


CASES = {
    "even": Case(QWEN, ZebraDivision(2, 2, 2, (0, 0, 0))),
    "one and three": Case(MIXTRAL, ZebraDivision(1, 3, 3, (0, 0)), top=1),
    "three and one": Case(QWEN, ZebraDivision(3, 1, 1, (1, 1, 1)), top=4, again=True),
    "asymmetric": Case(MIXTRAL, ZebraDivision(2, 2, 2, (1, 0)), top=3, replayed=True),
    "alone": Case(QWEN, ZebraDivision(1, 3, 4, (2, 0, 1)), top=2, replayed=True, again=True),
    "dense between": Case(SHARED, ZebraDivision(2, 2, 2, (0, 2))),
    "expert parallel": Case(QWEN, ZebraDivision(4, 0, 1, (2, 2, 2)), top=2),
    "layers elsewhere": Case(QWEN, ZebraDivision(2, 2, 1, (4, 0, 3)), top=3, replayed=True),
    "fewer experts": Case(
        MIXTRAL | {"num_local_experts": 4}, ZebraDivision(1, 3, 2, (0, 1)), experts=4
    ),
    "bfloat16": Case(QWEN, ZebraDivision(2, 2, 2, (0, 0, 0)), replayed=True, dtype=torch.bfloat16),
}


def bins(case: Case, number: int) -> list[Bin]:
    """Return the bins of a round, those of an attention rank side by side."""
    random = np.random.default_rng(number)
    found = []
    for _ in range(case.shape.attention_ranks * case.shape.micro_batches):
        (bin,) = make_bins([sequence(random, 0), sequence(random, 0)], 100, 0)
        if case.replayed:
            layers = len(case.config.sparse_layers)
            rows = [
                [random.choice(case.experts, case.top, replace=False) for _ in range(layers)]
                for _ in bin.tokens
            ]
            bin.expert_ids = np.array(rows, np.int16)
            bin.expert_ids[::7] = -1  # without recorded routing
        found.append(bin)
    return found


def one_process(case: Case) -> Learner:
    """Return the same model, unsharded."""
    with torch.device("meta"):
        model = Decoder(case.config)
    if case.again:
        enable_activation_checkpointing(model)
    whole = materialize_model(model, RandomParameters(case.config, SEED), "cpu")
    return Learner(whole, OPTIMIZER, ALGORITHM, dtype=case.dtype)
