"""Sharding by FSDP2: units of sharding, and when they are gathered.

`torch.distributed.fsdp` takes a second of CPU time to import: only gangs of several ranks do.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshrl.common.model.files.tensor_storages import set_mmap_threshold

MAX_UNSHARDED_BYTES = 2 << 30  # float32 parameters that a rank may gather beside its rows
RETURN_BLOCK_BYTES = 8 << 20  # mmap threshold for a larger model: most of its tensors exceed it


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    initialize: Callable[[], None],
    presharded: Set[nn.Parameter] = frozenset(),
) -> None:
    """Shard a model on the `meta` device in place: each layer, a critic, then the rest.

    Allocate the model's rows and have `initialize` fill them. Passes are in `dtype`. Parameters of
    `presharded` are sharded already.

    Gradients are summed over ranks, not averaged: a round's gradient is the sum over its bins. A
    model of at most MAX_UNSHARDED_BYTES stays gathered on every rank from a step's first pass until
    `reshard_model`. Of a larger model only the current layer is gathered, and its memory is then
    returned to the host.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    keep = (
        4 * sum(p.numel() for p in model.parameters() if p not in presharded) <= MAX_UNSHARDED_BYTES
    )
    if not keep:
        set_mmap_threshold(RETURN_BLOCK_BYTES)
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32
    )
    about: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "ignored_params": set(presharded)}
    for name, part in model.named_children():
        for unit in part.children() if name == "layers" else [part]:
            fully_shard(unit, reshard_after_forward=not keep, **about)
    fully_shard(model, reshard_after_forward=False, **about)
    model.to_empty(device=mesh.device_type)
    initialize()
    # The root must be initialized before a part of it, such as a critic, runs alone.
    fully_shard.state(model)._lazy_init()  # type: ignore[attr-defined]
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_reshard_after_backward(not keep)


def reshard_model(model: nn.Module) -> None:
    """Free the gathered parameters: they are then rows, which may be read and changed."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
