"""The critic of PPO: a second decoder with a linear head that predicts the rewards still to come.

It is a part of the policy's module, under the name `critic`, so that one flat gradient, one
optimizer and one checkpoint hold both; engines are never given it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from meshrl.common.job.config import AlgorithmConfig
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.network.attention import AttentionFunction
from meshrl.common.model.network.decoder import Decoder
from meshrl.kernels.ops.varlen import VarlenAttention
from meshrl.services.trainer.bins.packing import Bin
from meshrl.services.trainer.losses.terms import LossTerms
from meshrl.services.trainer.models.forward import (
    enable_activation_checkpointing,
    has_activation_checkpointing,
)

CRITIC_PREFIX = "critic."  # what names of its parameters start with
CRITIC_BIAS = CRITIC_PREFIX + "bias"


class Critic(nn.Module):
    """Values of places: what a trajectory will still earn after what has been read there.

    The bias takes up the mean of the returns by Newton steps. At AdamW's rate the head would reach
    that mean first, by features that all places share, and its values would differ between places
    by what says nothing of the returns.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, max_positions: int) -> None:
        super().__init__()
        # Tied, it has no unembedding: it predicts no token.
        self.trunk = Decoder(replace(config, tie_embeddings=True), dtype, max_positions)
        self.head = nn.Parameter(torch.zeros(config.hidden_size, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self, tokens: Tensor, positions: Tensor, attention: AttentionFunction) -> Tensor:
        """[n] float32, for `tokens` [n] at `positions` [n]."""
        hidden: Tensor = self.trunk(tokens, positions, attention)
        return (hidden @ self.head + self.bias).float()


def attach_critic(policy: Decoder) -> None:
    """Give the policy a critic that begins as it is, if it has none, checkpointed as it is."""
    if hasattr(policy, "critic"):
        return
    like = policy.final_norm
    critic = Critic(policy.config, like.dtype, policy.rope.shape[0])
    if has_activation_checkpointing(policy):
        enable_activation_checkpointing(critic.trunk)
    policy.critic = critic.to(like.device)
    copy_policy_weights(policy)


@torch.no_grad()
def initialize_critic(policy: Decoder) -> None:
    """Sets the values of a critic that was attached on a `meta` device; nothing without one."""
    if hasattr(policy, "critic"):
        found = get_critic(policy)
        found.head.zero_()
        found.bias.zero_()
        copy_policy_weights(policy)


@torch.no_grad()
def copy_policy_weights(policy: Decoder) -> None:
    """The critic's trunk becomes the policy's: what it starts from before it learns anything."""
    own = dict(policy.named_parameters())
    for name, parameter in get_critic(policy).trunk.named_parameters():
        parameter.copy_(own[name])


def get_critic(policy: Decoder) -> Critic:
    critic = policy.critic
    assert isinstance(critic, Critic)
    return critic


def exclude_critic(weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in weights if not name.startswith(CRITIC_PREFIX)}


def select_critic(weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in weights if name.startswith(CRITIC_PREFIX)}


def compute_values(policy: Decoder, bin: Bin) -> Tensor:
    """[t] of the trained places of a bin, with a gradient to the critic."""
    critic = get_critic(policy)
    device = critic.head.device

    def there(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    attention = VarlenAttention(bin.starts, len(bin.tokens), device)
    every: Tensor = critic(there(bin.tokens), there(bin.positions), attention)
    return every.index_select(0, there(np.flatnonzero(bin.mask)))


def compute_value_losses(
    values: Tensor, terms: LossTerms, weight: Tensor, config: AlgorithmConfig
) -> Tensor:
    """[t] half the squared error of values, from those that the step began with at most
    `value_clip` away (Schulman et al.'s code of PPO; Huang et al. 2022, "The 37 Implementation
    Details of PPO"). Tokens without weight need no extras.
    """
    if not weight.any():
        return values * 0.0
    returns, before = terms.get_extra("returns"), terms.get_extra("values")
    near = before + (values - before).clamp(-config.value_clip, config.value_clip)
    return torch.maximum((values - returns).square(), (near - returns).square()) / 2
