"""The forward pass over a bin: log-probabilities of its targets, and what goes with them."""

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
from meshrl.common.model.network.pointwise import PLAIN
from meshrl.kernels.ops.linear_logprob import linear_logprob
from meshrl.kernels.ops.pointwise import Fused
from meshrl.kernels.ops.varlen import VarlenAttention
from meshrl.kernels.packing import padded_places
from meshrl.services.trainer.bins.packing import UNKNOWN, Bin


@dataclass(slots=True)
class Outputs:
    """The outcome of a forward pass for the t trained places of a bin, on its device."""

    places: Tensor  # int64 [t], of the bin
    sequence: Tensor  # int64 [t], that each belongs to
    hidden: Tensor  # [t, hidden_size], normalised
    logprobs: Tensor  # [t] float32, of the targets, with a gradient
    entropy: Tensor  # [t] float32, of the distribution, without
    aux_loss: Tensor | None  # balance loss of a mixture of experts, summed over the trained places


@dataclass(slots=True)
class Placed:
    """The inputs of a pass over a bin's n places on a device; padded to few sizes on a GPU."""

    tokens: Tensor  # int32 [n]
    positions: Tensor  # int32 [n]
    attention: VarlenAttention
    counted: Tensor  # bool [n]: places that are trained
    experts: Tensor | None  # int16 [n, layers, k]: where they are sent, if that is known
    places: Tensor  # int64 [t]: those that are trained
    targets: Tensor  # int64 [t]
    sequence: Tensor  # int64 [t], that each belongs to


def placed(bin: Bin, device: torch.device) -> Placed:
    size = len(bin.tokens)
    padding = padded_places(size) - size if device.type == "cuda" else 0

    def there(array: NDArray[Any], behind: int = 0, value: int = 0) -> Tensor:
        if behind:
            pad = [(0, behind)] + [(0, 0)] * (array.ndim - 1)
            array = np.pad(array, pad, constant_values=value)
        return torch.from_numpy(array).to(device, non_blocking=True)

    trained = np.flatnonzero(bin.mask)
    return Placed(
        tokens=there(bin.tokens, padding),
        positions=there(bin.positions, padding),
        attention=VarlenAttention(bin.starts, size + padding, device),
        counted=there(bin.mask, padding),
        experts=there(bin.experts, padding, UNKNOWN) if bin.experts is not None else None,
        places=there(trained),
        targets=there(bin.targets[trained].astype(np.int64)),
        sequence=there(np.searchsorted(bin.starts[1:], trained, side="right")),
    )


def forward(model: Decoder, bin: Bin, temperature: float = 1.0) -> Outputs:
    """One pass over the bin; log-probabilities are those of logits divided by `temperature`."""
    given = placed(bin, model.final_norm.device)
    routing, experts = None, None
    if model.config.sparse_layers:
        routing, experts = Routing(counted=given.counted), given.experts
    hidden = model(given.tokens, given.positions, given.attention, experts, routing)
    aux_loss = routing.balance if routing is not None else None
    return outputs(model, given, hidden, temperature, aux_loss)


def outputs(
    model: Decoder, given: Placed, hidden: Tensor, temperature: float, aux_loss: Tensor | None
) -> Outputs:
    """What follows from hidden states [n, hidden_size], normalised."""
    hidden = hidden.index_select(0, given.places)
    unembedding = model.embedding if model.config.tie_embeddings else model.unembedding
    logprobs, entropy = linear_logprob(
        hidden, unembedding, given.targets, temperature, absent=model.config.absent_ids
    )
    return Outputs(given.places, given.sequence, hidden, logprobs, entropy, aux_loss)


def fuse(model: Decoder) -> None:
    """What lies between the model's products is fused where that can be: float32 on a CPU."""
    model.use(Fused(PLAIN))


def checkpoint_layers(model: Decoder) -> None:
    """Keeps of each layer only what goes in; the backward pass computes the rest again.

    Memory of activations falls to a tenth or less, a step takes about a third longer, and gradients
    are the same to the last bit. A layer is changed once, in place, and may then be sharded.
    """
    for layer in model.layers:
        again = partial(
            checkpoint,
            layer.forward,
            use_reentrant=False,
            preserve_rng_state=False,  # nothing is drawn at random
        )
        layer.forward = again


def checkpoints_layers(model: Decoder) -> bool:
    return any("forward" in vars(layer) for layer in model.layers)
