"""The rows of a model that a rank has: what they begin with, and what becomes of whole tensors.

A rank's flat gradient is that of its rows, parameter after parameter; the whole one that a hybrid
sends is cut the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from meshrl.common.model.files.rows import Beginning
from meshrl.common.model.network.decoder import Decoder
from meshrl.common.model.network.lora import is_adapter
from meshrl.services.trainer.arithmetic.cut_rows import local
from meshrl.services.trainer.models import critic, lora
from meshrl.services.trainer.sharding.owners import Owners


@torch.no_grad()
def begin(
    model: Decoder,
    rank: int,
    owners: Owners,
    shapes: Mapping[str, torch.Size],
    beginning: Beginning,
    seed: int,
) -> None:
    """Gives a cut model, whose parameters have `shapes` when they are whole, the values of a rank's
    rows: the decoder's from `beginning`, its adapters' from `seed`, its critic's are the decoder's.
    """
    for name, parameter in critic.published(model.named_parameters()).items():
        if not is_adapter(name):
            own = owners.rows(name, shapes[name][0], rank)
            beginning.fill(name, shapes[name], own.start, local(parameter.detach()))
    for name, parameter, values in lora.drawn(model, seed):
        own = owners.rows(name, len(values), rank)
        local(parameter.detach()).copy_(values[own])
    for part in model.modules():
        if isinstance(part, Decoder):
            part.settle()
    critic.begin(model)


def cut(
    whole: NDArray[np.float32], shapes: Mapping[str, torch.Size], owners: Owners, rank: int
) -> NDArray[np.float32]:
    """A rank's part of a flat array over all parameters of these shapes."""
    pieces, offset = [], 0
    for name, shape in shapes.items():
        own, width = owners.rows(name, shape[0], rank), shape[1:].numel()
        pieces.append(whole[offset + own.start * width : offset + own.stop * width])
        offset += shape.numel()
    return np.concatenate(pieces)


def scatter(
    whole: Tensor | None, piece: Tensor, own: Sequence[slice], group: dist.ProcessGroup
) -> None:
    """Fill each rank's `own` rows from the whole tensor, which rank 0 has."""
    each = max(rows.stop - rows.start for rows in own)
    padded = piece.new_zeros(each, *piece.shape[1:])
    parts = None
    if group.rank() == 0:
        assert whole is not None, "rank 0 has what is scattered"
        parts = [piece.new_zeros(each, *piece.shape[1:]) for _ in own]
        for part, rows in zip(parts, own, strict=True):
            part[: rows.stop - rows.start] = whole[rows].to(piece.device)
    dist.scatter(padded, parts, group=group, group_src=0)
    piece.copy_(padded[: len(piece)])


def gathered(
    own: Tensor, total: int, each: int, dtype: torch.dtype, group: dist.ProcessGroup
) -> Tensor:
    """[total, ..] in `dtype`: those of all ranks of a group, each of which has `each` at most."""
    padded = own.new_zeros(each, *own.shape[1:], dtype=dtype)
    padded[: len(own)] = own
    whole = padded.new_empty(each * group.size(), *own.shape[1:])
    dist.all_gather_into_tensor(whole, padded, group=group)
    return whole[:total]


def summed(whole: Tensor, each: int, dtype: torch.dtype, group: dist.ProcessGroup) -> Tensor:
    """[each, ..] in `dtype`: this rank's rows of the sum over a group's tensors [rows, ..]."""
    padded = whole.new_zeros(each * group.size(), *whole.shape[1:], dtype=dtype)
    padded[: len(whole)] = whole
    own = padded.new_empty(each, *whole.shape[1:])
    dist.reduce_scatter_tensor(own, padded, group=group)
    return own
