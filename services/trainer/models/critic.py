"""Critic of PPO: a second decoder with a linear head that predicts the future reward.

It is part of the policy's module, under the name `critic`, so that one flat gradient, one optimizer
and one checkpoint cover both. Engines never receive it.
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

CRITIC_PREFIX = "critic."  # prefix of its parameters' names
CRITIC_BIAS = CRITIC_PREFIX + "bias"


class Critic(nn.Module):
    """Value model of positions: the future reward of a trajectory after each position's token.

    The bias fits the mean of the returns by Newton steps. At AdamW's rate the head would first fit
    that mean by features that all positions share. Its values would then differ between positions
    for reasons unrelated to the returns.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, max_positions: int) -> None:
        super().__init__()
        # Tied embeddings avoid an unembedding: it predicts no token.
        self.trunk = Decoder(replace(config, tie_embeddings=True), dtype, max_positions)
        self.head = nn.Parameter(torch.zeros(config.hidden_size, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self, tokens: Tensor, positions: Tensor, attention: AttentionFunction) -> Tensor:
        """Return the values, float32 [n], for `tokens` [n] at `positions` [n]."""
        hidden: Tensor = self.trunk(tokens, positions, attention)
        return (hidden @ self.head + self.bias).float()


def attach_critic(policy: Decoder) -> None:
    """Attach a critic with the policy's weights and checkpointing, unless it has one."""
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
    """Set the values of a critic that was attached on the `meta` device, if there is one."""
    if hasattr(policy, "critic"):
        found = get_critic(policy)
        found.head.zero_()
        found.bias.zero_()
        copy_policy_weights(policy)


@torch.no_grad()
def copy_policy_weights(policy: Decoder) -> None:
    """Copy the policy's weights into the critic's trunk, as its initial state."""
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
    """Return the values [t] of a bin's trained positions, with a gradient to the critic."""
    critic = get_critic(policy)
    device = critic.head.device

    def there(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    attention = VarlenAttention(bin.cu_seqlens, len(bin.tokens), device)
    every: Tensor = critic(there(bin.tokens), there(bin.positions), attention)
    return every.index_select(0, there(np.flatnonzero(bin.loss_mask)))


def compute_value_losses(
    values: Tensor, terms: LossTerms, weight: Tensor, config: AlgorithmConfig
) -> Tensor:
    """Return half the squared errors [t] of values, clipped around those that the step began with.

    The clip is `value_clip` (Schulman et al.'s code of PPO; Huang et al. 2022, "The 37
    Implementation Details of PPO"). Tokens without weight need no extras.
    """
    if not weight.any():
        return values * 0.0
    returns, before = terms.get_extra("returns"), terms.get_extra("values")
    clipped_values = before + (values - before).clamp(-config.value_clip, config.value_clip)
    return torch.maximum((values - returns).square(), (clipped_values - returns).square()) / 2
