"""Algorithms by name, a file each. Open `grpo.py` first."""

from __future__ import annotations

from meshrl.common.base.errors import ConfigError
from meshrl.common.job.config import AlgorithmConfig
from meshrl.services.trainer.algorithms import (
    cispo,
    dapo,
    distill,
    dr_grpo,
    grpo,
    gspo,
    ppo,
    reinforce_pp,
    rloo,
    sft,
)
from meshrl.services.trainer.algorithms.hooks import Algorithm

MODULES = (grpo, dr_grpo, dapo, rloo, reinforce_pp, gspo, cispo, ppo, sft, distill)
ALGORITHMS: dict[str, Algorithm] = {
    module.__name__.rpartition(".")[2]: module.ALGORITHM for module in MODULES
}


def get_algorithm(name: str) -> Algorithm:
    """The algorithm of that name; ConfigError if there is none."""
    if name not in ALGORITHMS:
        raise ConfigError(
            f"unknown algorithm {name!r}",
            where="algorithm.name",
            fix=f"use one of {', '.join(sorted(ALGORITHMS))}",
        )
    return ALGORITHMS[name]


def list_scoring_passes(config: AlgorithmConfig) -> tuple[str, ...]:
    """Extras that a step scores with its first weights, before any gradient of it.

    With one update the proximal policy is the one that is trained, and costs nothing.
    """
    values = ("values",) if get_algorithm(config.name).has_critic else ()
    decoupled = config.correction != "none" and config.updates > 1
    return (*values, "proximal") if decoupled else values


def has_refill(config: AlgorithmConfig) -> bool:
    """Whether groups that are filtered are replaced by others."""
    return config.refill_filtered or get_algorithm(config.name).always_refills
