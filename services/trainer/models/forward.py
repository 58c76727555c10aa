"""Forward pass over a bin: log-probabilities of its targets, entropy and balance loss."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from meshrl.common.model.network.decoder import Decoder
from meshrl.common.model.network.moe import Routing
from meshrl.common.model.network.pointwise import TORCH_POINTWISE
from meshrl.kernels.ops.linear_logprob import linear_logprob
from meshrl.kernels.ops.pointwise import FusedPointwise
from meshrl.kernels.ops.varlen import VarlenAttention
from meshrl.kernels.packing import get_padded_size
from meshrl.services.trainer.bins.packing import UNKNOWN, Bin


@dataclass(slots=True)
class ForwardOutputs:
    """Outputs of a forward pass for the t trained positions of a bin, on its device."""

    loss_positions: Tensor  # int64 [t], positions in the bin
    sequence_ids: Tensor  # int64 [t]
    hidden: Tensor  # [t, hidden_size], normalised
    logprobs: Tensor  # [t] float32, of the targets, with a gradient
    entropy: Tensor  # [t] float32, of the distribution, with a gradient
    aux_loss: Tensor | None  # balance loss of an MoE model, summed over the trained positions


@dataclass(slots=True)
class DeviceBin:
    """Inputs of a pass over a bin's n positions on a device; padded to few sizes on a GPU."""

    tokens: Tensor  # int32 [n]
    positions: Tensor  # int32 [n]
    attention: VarlenAttention
    loss_mask: Tensor  # bool [n]: trained positions
    expert_ids: Tensor | None  # int16 [n, layers, k]: recorded routing, if any
    loss_positions: Tensor  # int64 [t]: the trained positions
    targets: Tensor  # int64 [t]
    sequence_ids: Tensor  # int64 [t]


def move_bin_to_device(bin: Bin, device: torch.device) -> DeviceBin:
    size = len(bin.tokens)
    padding = get_padded_size(size) - size if device.type == "cuda" else 0

    def there(array: NDArray[Any], behind: int = 0, value: int = 0) -> Tensor:
        if behind:
            pad = [(0, behind)] + [(0, 0)] * (array.ndim - 1)
            array = np.pad(array, pad, constant_values=value)
        return torch.from_numpy(array).to(device, non_blocking=True)

    trained = np.flatnonzero(bin.loss_mask)
    return DeviceBin(
        tokens=there(bin.tokens, padding),
        positions=there(bin.positions, padding),
        attention=VarlenAttention(bin.cu_seqlens, size + padding, device),
        loss_mask=there(bin.loss_mask, padding),
        expert_ids=there(bin.expert_ids, padding, UNKNOWN) if bin.expert_ids is not None else None,
        loss_positions=there(trained),
        targets=there(bin.targets[trained].astype(np.int64)),
        sequence_ids=there(np.searchsorted(bin.cu_seqlens[1:], trained, side="right")),
    )


def run_forward(model: Decoder, bin: Bin, temperature: float = 1.0) -> ForwardOutputs:
    """Run one pass over the bin; logits are divided by `temperature`."""
    given = move_bin_to_device(bin, model.final_norm.device)
    routing, experts = None, None
    if model.config.sparse_layers:
        routing, experts = Routing(balance_mask=given.loss_mask), given.expert_ids
    hidden = model(given.tokens, given.positions, given.attention, experts, routing)
    aux_loss = routing.balance_loss if routing is not None else None
    return compute_outputs(model, given, hidden, temperature, aux_loss)


def compute_outputs(
    model: Decoder,
    device_bin: DeviceBin,
    hidden: Tensor,
    temperature: float,
    aux_loss: Tensor | None,
) -> ForwardOutputs:
    """Return the outputs for normalised hidden states [n, hidden_size]."""
    hidden = hidden.index_select(0, device_bin.loss_positions)
    unembedding = model.embedding if model.config.tie_embeddings else model.unembedding
    logprobs, entropy = linear_logprob(
        hidden, unembedding, device_bin.targets, temperature, absent_ids=model.config.absent_ids
    )
    return ForwardOutputs(
        device_bin.loss_positions, device_bin.sequence_ids, hidden, logprobs, entropy, aux_loss
    )


def fuse_pointwise(model: Decoder) -> None:
    """Fuse pointwise operations between the model's products where supported: float32 on a CPU."""
    model.set_pointwise(FusedPointwise(TORCH_POINTWISE))


def enable_activation_checkpointing(model: Decoder) -> None:
    """Retain only the inputs of each layer; the backward pass recomputes the rest.

    Activation memory falls to a tenth or less. A step takes about a third longer. Gradients are
    equal to the last bit. A layer is changed once, in place, and may then be sharded.
    """
    for layer in model.layers:
        again = partial(
            checkpoint,
            layer.forward,
            use_reentrant=False,
            preserve_rng_state=False,  # no random numbers are drawn
        )
        layer.forward = again


def has_activation_checkpointing(model: Decoder) -> bool:
    return any("forward" in vars(layer) for layer in model.layers)
