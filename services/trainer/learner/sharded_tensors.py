"""Parameters with some rows on this rank, as the optimizer uses them.

FSDP2 shards a parameter into a DTensor, which this module recognizes by its methods. Importing the
class and FSDP takes three seconds of CPU, which a core of one rank and a hybrid never need.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


def get_local_rows(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter; writing to it changes the parameter."""
    rows: Tensor = parameter.to_local() if is_sharded(parameter) else parameter  # type: ignore[attr-defined]
    return rows


def get_shard_group(parameter: Tensor) -> dist.ProcessGroup | None:
    """Return the ranks that a parameter is sharded over; None if it is not sharded."""
    if not is_sharded(parameter):
        return None
    group: dist.ProcessGroup = parameter.device_mesh.get_group()  # type: ignore[attr-defined]
    return group


def is_sharded(parameter: Tensor) -> bool:
    return hasattr(parameter, "to_local")


def apply_to_full_matrices(
    matrices: Tensor, height: int, function: Callable[[Tensor], Tensor], group: dist.ProcessGroup
) -> Tensor:
    """Apply `function` to full matrices, of which each rank has rows [count, rows, columns].

    Each rank receives its rows of the results. A rank computes its share of the matrices: two
    exchanges, without repeated work.
    """
    ranks, (count, own, width) = group.size(), matrices.shape
    each, share = -(-height // ranks), -(-count // ranks)
    sent = matrices.new_zeros(ranks, share, each, width)
    sent.view(-1, each, width)[:count, :own] = matrices
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    full_matrices = received.transpose(0, 1).reshape(share, ranks * each, width)
    results = torch.zeros_like(full_matrices)
    results[:, :height] = function(full_matrices[:, :height])
    sent = results.view(share, ranks, each, width).transpose(0, 1).contiguous()
    dist.all_to_all_single(received, sent, group=group)
    return received.view(-1, each, width)[:count, :own]
