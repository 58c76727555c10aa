"""What the model makes of a bin: log-probabilities of its targets, and what goes with them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from common.model.attention import Attention
from common.model.decoder import Decoder
from services.trainer.batching import Bin


@dataclass(slots=True)
class Outputs:
    """Of the t trained places of a bin, in their order."""

    places: Tensor  # int64 [t], of the bin
    sequence: Tensor  # int64 [t], that each belongs to
    hidden: Tensor  # [t, hidden_size], normalised
    logprobs: Tensor  # [t], of the targets, with a gradient
    entropy: Tensor  # [t], of the distribution, without
    aux_loss: Tensor | None  # summed over places, of a mixture of experts


def forward(model: Decoder, bin: Bin, temperature: float = 1.0) -> Outputs:
    """One pass over the bin; log-probabilities are those of logits divided by `temperature`."""
    places = torch.from_numpy(np.flatnonzero(bin.mask))
    tokens, positions = torch.from_numpy(bin.tokens), torch.from_numpy(bin.positions)
    hidden = model(tokens, positions, packed(bin)).index_select(0, places)
    logits = model.logits(hidden) / temperature
    targets = torch.from_numpy(bin.targets).index_select(0, places).long()
    logprobs = -cross_entropy(logits, targets, reduction="none")
    with torch.no_grad():
        normal = logits.log_softmax(-1)
        entropy = -(normal.exp() * normal).sum(-1)
    ends = torch.from_numpy(bin.starts[1:]).long()
    sequence = torch.searchsorted(ends, places, right=True)
    return Outputs(places, sequence, hidden, logprobs, entropy, None)


def packed(bin: Bin) -> Attention:
    """Causal attention within each sequence of the bin."""
    lengths = bin.lengths
    widest = int(lengths.max(initial=1))
    rows = np.repeat(np.arange(len(lengths)), lengths)
    at = torch.from_numpy(rows * widest + bin.positions[: len(rows)])

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def spread(x: Tensor) -> Tensor:
            wide = x.new_zeros(len(lengths) * widest, *x.shape[1:])
            wide = wide.index_copy(0, at, x[: len(at)])
            return wide.view(len(lengths), widest, *x.shape[1:]).transpose(1, 2)

        out = scaled_dot_product_attention(
            spread(q), spread(k), spread(v), is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2).flatten(0, 1).index_select(0, at)

    return attend
