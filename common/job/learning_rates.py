"""Usual learning rates by kind of training, and descriptions of rates far above them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshrl.common.job.config import JobConfig, OptimizerConfig

HIGH_RATE_FACTOR = 10.0  # times the usual rate, from which on a rate is called high
ROUNDING = 1e-9  # relative, of products of rates
MAX_LORA_RATE = 1e-4  # usual rate of adapters of high rank
# Of reinforcement learning: TRL's GRPOConfig, verl and prime-rl use 1e-6 in full training, and
# adapters take ten times the rate ("LoRA Without Regret", Schulman et al. 2025).
REINFORCEMENT_RATE, LORA_FACTOR = 1e-6, 10.0
SUPERVISED_RATE = 2e-5  # TRL's SFTConfig; its guide for adapters has 2e-4
# Muon's update of a square matrix of width d has the root mean square 1 / sqrt(d), AdamW's about
# 0.2 (Liu et al. 2025, "Muon is Scalable for LLM Training"): a factor of 6 to 13 for 1024 to 4096.
MUON_FACTOR = 10.0


@dataclass(frozen=True)
class UsualRates:
    """Usual rates of a kind of training, with their source."""

    training: str
    adamw: float
    muon: float  # where Muon trains the matrices
    source: str


def get_usual_rates(config: JobConfig) -> UsualRates:
    """Return the usual rates of a job's training.

    Reinforcement learning of adapters starts at ten times the rate of full training for rank 1.
    The change of a matrix is scaled by alpha / rank, which makes it smaller by the root of the
    rank than a scale that keeps its size (rsLoRA, arXiv 2312.03732). So the rate grows with that
    root, to MAX_LORA_RATE.
    """
    rank = config.lora.rank
    factor = LORA_FACTOR if rank else 1.0
    what = f"adapters of rank {rank}" if rank else "full training"
    if not config.model.path:
        own = OptimizerConfig()
        source = "MeshRL's default, times ten for adapters" if rank else "MeshRL's default"
        return UsualRates(
            f"{what} of a model from scratch", factor * own.adamw_lr, own.muon_lr, source
        )
    if config.is_supervised:
        rate, source = factor * SUPERVISED_RATE, "TRL's rate for supervised training"
        return UsualRates(f"supervised {what} of a pretrained model", rate, _to_muon(rate), source)
    rate, source = factor * REINFORCEMENT_RATE, "the rate of TRL, verl and prime-rl"
    if rank:
        rate = float(f"{min(MAX_LORA_RATE, rate * math.sqrt(rank)):.2g}")
        source = 'ten times the full rate ("LoRA Without Regret"), times the root of the rank'
    return UsualRates(f"{what} of a pretrained model", rate, _to_muon(rate), source)


def describe_high_rates(config: JobConfig) -> dict[str, str]:
    """Return a warning for each rate that is at least HIGH_RATE_FACTOR times the usual, by key."""
    usual, optimizer = get_usual_rates(config), config.optimizer
    rates = [("optimizer.adamw_lr", optimizer.adamw_lr, usual.adamw, usual.source)]
    if not config.lora.rank:  # AdamW trains adapters
        source = f"{usual.source}, times ten for Muon" if config.model.path else usual.source
        rates.append(("optimizer.muon_lr", optimizer.muon_lr, usual.muon, source))
    return {
        key: f"{key} = {rate:g} is {rate / expected:,.0f} times the usual rate of "
        f"{usual.training}, {expected:g} ({source}): the model may collapse"
        for key, rate, expected, source in rates
        if config.budget.steps and rate >= expected * HIGH_RATE_FACTOR * (1 - ROUNDING)
    }


def _to_muon(adamw_rate: float) -> float:
    return MUON_FACTOR * adamw_rate
