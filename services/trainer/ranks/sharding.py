"""Sharding by FSDP2: how parameters are cut by rows, and what has to cross ranks because of it.

A rank's flat gradient is that of its rows, parameter after parameter; the whole one that a hybrid
sends is cut the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from common.model.decoder import Decoder
from common.model.lora import is_adapter
from common.model.rows import Beginning
from common.model.storages import return_blocks
from services.trainer.arithmetic import critic, lora
from services.trainer.arithmetic.cut_rows import local

KEEP_BYTES = 2 << 30  # float32 parameters that a rank may hold whole beside its rows
RETURNED_BYTES = 8 << 20  # blocks of a larger model, of which most of its tensors are


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    begin: Callable[[], None],
) -> None:
    """Cuts a model on the `meta` device in place: its layers one by one, a critic, then the rest;
    gives it memory for its rows, and has `begin` fill them. Passes are in `dtype`.

    Gradients are summed over ranks, not averaged: a round's gradient is the sum over its bins.
    A model of at most KEEP_BYTES stays whole on every rank from a step's first pass until
    `reshard`; of a larger one only the layer that computes is whole, and what it took goes back to
    the host.
    """
    keep = 4 * sum(parameter.numel() for parameter in model.parameters()) <= KEEP_BYTES
    if not keep:
        return_blocks(RETURNED_BYTES)
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32
    )
    for name, part in model.named_children():
        for unit in part.children() if name == "layers" else [part]:
            fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    model.to_empty(device=mesh.device_type)
    begin()
    # The root must be known as such before a part of it, such as a critic, runs alone.
    fully_shard.state(model)._lazy_init()  # type: ignore[attr-defined]
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_reshard_after_backward(not keep)


@torch.no_grad()
def begin(model: Decoder, mesh: DeviceMesh, beginning: Beginning, seed: int) -> None:
    """Gives a cut model the values of this rank's rows: the decoder's from `beginning`, its
    adapters' from `seed`, its critic's are the decoder's.
    """
    rank, ranks = mesh.get_local_rank(), mesh.size()
    for name, parameter in critic.published(model.named_parameters()).items():
        if not is_adapter(name):
            own = rows(parameter.shape[0], rank, ranks)
            beginning.fill(name, parameter.shape, own.start, local(parameter.detach()))
    for parameter, values in lora.drawn(model, seed):
        local(parameter.detach()).copy_(values[rows(len(values), rank, ranks)])
    for part in model.modules():
        if isinstance(part, Decoder):
            part.settle()
    critic.begin(model)


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
        spread = whole.to(piece.device)
        if shape[0] != each * ranks:
            spread = piece.new_zeros(each * ranks, *shape[1:])
            spread[: shape[0]] = whole
        parts = list(torch.split(spread, each))
    dist.scatter(padded, parts, group=group, group_src=0)
    piece.copy_(padded[: len(piece)])
