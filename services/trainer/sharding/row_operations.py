"""Operations on a rank's rows of a model: initial values, scatter, gather, reduction.

A rank's flat gradient is that of its rows, parameter after parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from meshrl.common.model.files.initial_parameters import ParameterSource
from meshrl.common.model.network.decoder import Decoder
from meshrl.common.model.network.lora import is_adapter_tensor
from meshrl.services.trainer.learner.sharded_tensors import get_local_rows
from meshrl.services.trainer.models import critic, lora
from meshrl.services.trainer.sharding.row_ownership import RowOwnership


@torch.no_grad()
def initialize_rows(
    model: Decoder,
    rank: int,
    ownership: RowOwnership,
    shapes: Mapping[str, torch.Size],
    initial_parameters: ParameterSource,
    seed: int,
) -> None:
    """Fill a sharded model with the values of a rank's rows.

    `shapes` are those of the full parameters. The decoder's values are from `initial_parameters`,
    its adapters' from `seed`, and its critic's are the decoder's.
    """
    for name, parameter in critic.exclude_critic(model.named_parameters()).items():
        if not is_adapter_tensor(name):
            own = ownership.get_rows(name, shapes[name][0], rank)
            initial_parameters.fill_rows(
                name, shapes[name], own.start, get_local_rows(parameter.detach())
            )
    for name, parameter, values in lora.draw_adapter_values(model, seed):
        own = ownership.get_rows(name, len(values), rank)
        get_local_rows(parameter.detach()).copy_(values[own])
    for part in model.modules():
        if isinstance(part, Decoder):
            part.reset_buffers()
    critic.initialize_critic(model)


def list_owned_ranges(
    shapes: Mapping[str, torch.Size], ownership: RowOwnership, rank: int
) -> NDArray[np.int64]:
    """Return a rank's ranges [count, 2] of a flat array over all parameters of these shapes."""
    found, offset = [], 0
    for name, shape in shapes.items():
        own, width = ownership.get_rows(name, shape[0], rank), shape[1:].numel()
        found.append((offset + own.start * width, offset + own.stop * width))
        offset += shape.numel()
    return np.array(found, np.int64)


def scatter_rows(
    full_tensor: Tensor | None,
    piece: Tensor,
    rows_by_rank: Sequence[slice],
    group: dist.ProcessGroup,
) -> None:
    """Fill each rank's `piece` from the full tensor, which rank 0 has."""
    each = max(rows.stop - rows.start for rows in rows_by_rank)
    padded = piece.new_zeros(each, *piece.shape[1:])
    parts = None
    if group.rank() == 0:
        assert full_tensor is not None, "rank 0 must have the tensor to scatter"
        parts = [piece.new_zeros(each, *piece.shape[1:]) for _ in rows_by_rank]
        for part, rows in zip(parts, rows_by_rank, strict=True):
            part[: rows.stop - rows.start] = full_tensor[rows].to(piece.device)
    dist.scatter(padded, parts, group=group, group_src=0)
    piece.copy_(padded[: len(piece)])


def gather_rows(
    own: Tensor, total: int, max_rows: int, dtype: torch.dtype, group: dist.ProcessGroup
) -> Tensor:
    """Return the rows [total, ..] of a group's ranks in `dtype`, at most `max_rows` from each."""
    padded = own.new_zeros(max_rows, *own.shape[1:], dtype=dtype)
    padded[: len(own)] = own
    gathered = padded.new_empty(max_rows * group.size(), *own.shape[1:])
    dist.all_gather_into_tensor(gathered, padded, group=group)
    return gathered[:total]


def reduce_scatter_rows(
    full_tensor: Tensor, max_rows: int, dtype: torch.dtype, group: dist.ProcessGroup
) -> Tensor:
    """Return this rank's rows [max_rows, ..] in `dtype` of the sum over a group's tensors."""
    padded = full_tensor.new_zeros(max_rows * group.size(), *full_tensor.shape[1:], dtype=dtype)
    padded[: len(full_tensor)] = full_tensor
    own = padded.new_empty(max_rows, *full_tensor.shape[1:])
    dist.reduce_scatter_tensor(own, padded, group=group)
    return own
