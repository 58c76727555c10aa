"""Algorithms by name: a module with two hooks, `advantages` and `token_loss`."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from common.config import AlgorithmConfig
from common.errors import ConfigError
from services.trainer.algorithms import grpo


class Algorithm(Protocol):
    """What a module in this package offers."""

    def advantages(
        self, rewards: NDArray[np.floating], config: AlgorithmConfig
    ) -> NDArray[np.float64] | None:
        """One per trajectory of a group, or None if the group has nothing to teach."""

    def token_loss(
        self, logprobs: Tensor, behaviour: Tensor, advantage: Tensor, config: AlgorithmConfig
    ) -> Tensor:
        """Loss of each token, to be summed; all arguments have one shape."""


ALGORITHMS: dict[str, Algorithm] = {"grpo": grpo}


def algorithm(name: str) -> Algorithm:
    """The module of that name; ConfigError if there is none."""
    if name not in ALGORITHMS:
        raise ConfigError(
            f"unknown algorithm {name!r}",
            where="algorithm.name",
            fix=f"use one of {', '.join(sorted(ALGORITHMS))}",
        )
    return ALGORITHMS[name]
