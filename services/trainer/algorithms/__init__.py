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
    """Return the algorithm of this name; raise ConfigError if there is none."""
    if name not in ALGORITHMS:
        raise ConfigError(
            f"unknown algorithm {name!r}",
            where="algorithm.name",
            fix=f"Use one of {', '.join(sorted(ALGORITHMS))}",
        )
    return ALGORITHMS[name]


def list_scoring_passes(config: AlgorithmConfig) -> tuple[str, ...]:
    """Return the extras that a step scores with its first weights, before any gradient.

    With one update the proximal policy is the trained policy, and needs no pass.
    """
    values = ("values",) if get_algorithm(config.name).has_critic else ()
    decoupled = config.correction != "none" and config.updates > 1
    return (*values, "proximal") if decoupled else values


def has_refill(config: AlgorithmConfig) -> bool:
    """Return True if filtered groups are replaced by others."""
    return config.refill_filtered or get_algorithm(config.name).always_refills
