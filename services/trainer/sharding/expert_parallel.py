"""Expert parallelism: a layer's experts are on several ranks, and tokens travel to them and back.

If a gang has more ranks, the experts of one part are sharded over the ranks of that part, and
gathered while they compute. (Lepikhin et al. 2020, GShard, arXiv 2006.16668; beside FSDP as in
Rajbhandari et al. 2022, DeepSpeed-MoE, arXiv 2201.05596.)
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from meshrl.common.model.network.moe import (
    MixtureOfExperts,
    invert_permutation,
    is_expert_matrix,
    order_by_expert,
)
from meshrl.services.trainer.sharding.fsdp import MAX_UNSHARDED_BYTES
from meshrl.services.trainer.sharding.row_operations import gather_rows, reduce_scatter_rows
from meshrl.services.trainer.sharding.row_ownership import RowOwnership


class AllToAll(torch.autograd.Function):
    """Exchange of rows [m, d]: `sizes` go to each rank, `coming` arrive; backward, the reverse."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        rows: Tensor,
        sizes: list[int],
        coming: list[int],
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.sent = sizes, coming, group  # type: ignore[attr-defined]
        return exchange_rows(rows, sizes, coming, group)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> Any:
        sizes, received_sizes, group = ctx.sent  # type: ignore[attr-defined]
        return exchange_rows(gradients[0], received_sizes, sizes, group), None, None, None


def exchange_rows(
    rows: Tensor, send_sizes: list[int], receive_sizes: list[int], group: dist.ProcessGroup
) -> Tensor:
    found = rows.new_empty(sum(receive_sizes), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), receive_sizes, send_sizes, group=group)
    return found


class GatherRows(torch.autograd.Function):
    """Gather of a matrix's rows, at most `each` per rank; its gradient is summed over the ranks."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        own: Tensor,
        total: int,
        each: int,
        dtype: torch.dtype,
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.cut = len(own), each, own.dtype, group  # type: ignore[attr-defined]
        return gather_rows(own, total, each, dtype, group)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> Any:
        rows, each, dtype, group = ctx.cut  # type: ignore[attr-defined]
        (gradient,) = gradients
        return reduce_scatter_rows(gradient, each, dtype, group)[:rows], None, None, None, None


class ExpertParallel:
    """Transport of tokens to a layer's experts, equally many on each rank, and back."""

    def __init__(
        self, replica_group: dist.ProcessGroup, expert_group: dist.ProcessGroup, recompute: bool
    ) -> None:
        """Create the transport over two groups.

        Args:
            replica_group: Ranks with the same experts.
            expert_group: Ranks with all experts between them.
            recompute: Gather the replicas' matrices again in the backward pass.
        """
        self._replica_group, self._expert_group, self._recompute = (
            replica_group,
            expert_group,
            recompute,
        )

    def compute_experts(
        self, rows: Tensor, expert_ends: Tensor, experts: MixtureOfExperts
    ) -> Tensor:
        group = self._expert_group
        ranks, count = group.size(), experts.config.num_experts // group.size()
        counts = torch.diff(expert_ends, prepend=expert_ends.new_zeros(1)).view(ranks, count)
        received_counts = torch.zeros_like(counts)  # sizes also if NCCL's transfer is aborted
        dist.all_to_all_single(received_counts, counts, group=group)
        sizes, received_sizes = counts.sum(1).tolist(), received_counts.sum(1).tolist()
        received_rows: Tensor = AllToAll.apply(rows, sizes, received_sizes, group)  # type: ignore[no-untyped-call]
        about = received_rows, experts.gate_up, experts.down, received_counts, experts
        if self._recompute:
            outputs = checkpoint(
                self._compute_experts, *about, use_reentrant=False, preserve_rng_state=False
            )
        else:
            outputs = self._compute_experts(*about)
        found: Tensor = AllToAll.apply(outputs, received_sizes, sizes, group)  # type: ignore[no-untyped-call]
        return found

    def _compute_experts(
        self,
        rows: Tensor,
        gate_up: Tensor,
        down: Tensor,
        received_counts: Tensor,
        experts: MixtureOfExperts,
    ) -> Tensor:
        """Return the outputs of this part's experts for received rows.

        `received_counts`: [ranks, experts].
        """
        count = received_counts.shape[1]
        wide, narrow = (self._gather_matrices(own, count, rows.dtype) for own in (gate_up, down))
        if not len(rows):  # other ranks wait for this rank's part of a sum in the backward pass
            return rows + 0.0 * (wide.flatten()[:1] * narrow.flatten()[:1]).sum()
        order = order_by_expert(received_counts)
        outputs = experts.compute_experts(
            rows.index_select(0, order), received_counts.sum(0).cumsum(0), wide, narrow
        )
        return outputs.index_select(0, invert_permutation(order))

    def _gather_matrices(self, own: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return the matrices of all `count` experts of this part in the dtype of passes."""
        if self._replica_group.size() == 1:
            return own.to(dtype)
        each = -(-count // self._replica_group.size())
        matrices: Tensor = GatherRows.apply(own, count, each, dtype, self._replica_group)  # type: ignore[no-untyped-call]
        return matrices


def split_experts(
    model: nn.Module,
    mesh: DeviceMesh,
    expert_parallel: int,
    ownership: RowOwnership,
    deadline_s: float,
) -> set[nn.Parameter]:
    """Shard the experts of a model on the `meta` device in place, and route tokens to other ranks.

    Return the parameters that must not be sharded further. `deadline_s`: of the exchanges.
    """
    rank = mesh.get_local_rank()
    experts = {name: p for name, p in model.named_parameters() if is_expert_matrix(name)}
    ranks, within = mesh.size(), timedelta(seconds=deadline_s)
    replica_groups = [list(range(part, ranks, expert_parallel)) for part in range(expert_parallel)]
    expert_groups = [
        list(range(first, first + expert_parallel)) for first in range(0, ranks, expert_parallel)
    ]
    groups = [
        (some, dist.new_group(some, timeout=within)) for some in (*replica_groups, *expert_groups)
    ]
    replica_group, expert_group = (group for some, group in groups if rank in some)
    large = 4 * sum(p.numel() for p in experts.values()) // expert_parallel > MAX_UNSHARDED_BYTES
    across = ExpertParallel(
        replica_group, expert_group, recompute=large and replica_group.size() > 1
    )
    own: set[nn.Parameter] = set()
    for name, parameter in experts.items():
        place, _, kind = name.rpartition(".")
        module = model.get_submodule(place)
        assert isinstance(module, MixtureOfExperts)
        rows = ownership.get_rows(name, len(parameter), rank)
        part = nn.Parameter(parameter.detach()[rows], parameter.requires_grad)
        setattr(module, kind, part)
        module.token_dispatcher = across
        own.add(part)
    return own
