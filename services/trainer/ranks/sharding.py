"""How FSDP2 cuts parameters, by rows, and what has to cross ranks because of it.

A rank's flat gradient is that of its rows, parameter after parameter; the whole one that a hybrid
sends is cut the same way.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

KEEP_BYTES = 2 << 30  # of float32 parameters: what a rank may hold whole beside its rows


def shard(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> None:
    """Cuts a model in place: its layers one by one, a critic, then the rest. Passes are in `dtype`.

    Gradients are summed over ranks, not averaged: a round's gradient is the sum over its bins.
    A model of at most KEEP_BYTES stays whole on every rank from a step's first pass until
    `reshard`; of a larger one only the layer that computes is whole.
    """
    keep = 4 * sum(parameter.numel() for parameter in model.parameters()) <= KEEP_BYTES
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32
    )
    for name, part in model.named_children():
        for unit in part.children() if name == "layers" else [part]:
            fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    # The root must be known as such before a part of it, such as a critic, runs alone.
    fully_shard.state(model)._lazy_init()  # type: ignore[attr-defined]
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_reshard_after_backward(not keep)


def reshard(model: nn.Module) -> None:
    """Gives up what is whole: from then on parameters are rows, which may be read and changed."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def rows(total: int, rank: int, ranks: int) -> slice:
    """Which of a parameter's rows a rank has: as many as the others, the last ones fewer."""
    each = -(-total // ranks)
    return slice(min(rank * each, total), min((rank + 1) * each, total))


def cut(
    whole: NDArray[np.float32], shapes: Iterable[torch.Size], rank: int, ranks: int
) -> NDArray[np.float32]:
    """A rank's part of a flat array over all parameters."""
    pieces, offset = [], 0
    for shape in shapes:
        own, width = rows(shape[0], rank, ranks), shape[1:].numel()
        pieces.append(whole[offset + own.start * width : offset + own.stop * width])
        offset += shape.numel()
    return np.concatenate(pieces)


def gather(piece: Tensor, shape: torch.Size, group: dist.ProcessGroup) -> Tensor | None:
    """The whole tensor of `shape`, on rank 0; every rank calls it with its rows."""
    ranks = group.size()
    padded = piece.new_zeros(-(-shape[0] // ranks), *shape[1:])
    padded[: len(piece)] = piece
    first = group.rank() == 0
    parts = [torch.empty_like(padded) for _ in range(ranks)] if first else None
    dist.gather(padded, parts, group=group, group_dst=0)
    return torch.cat(parts)[: shape[0]] if parts is not None else None


def scatter(
    whole: Tensor | None, piece: Tensor, shape: torch.Size, group: dist.ProcessGroup
) -> None:
    """Fills each rank's rows from the whole tensor, which rank 0 has."""
    ranks = group.size()
    each = -(-shape[0] // ranks)
    padded = piece.new_zeros(each, *shape[1:])
    parts = None
    if group.rank() == 0:
        assert whole is not None, "rank 0 has what is scattered"
        spread = piece.new_zeros(each * ranks, *shape[1:])
        spread[: shape[0]] = whole
        parts = list(torch.split(spread, each))
    dist.scatter(padded, parts, group=group, group_src=0)
    piece.copy_(padded[: len(piece)])
