"""Expert parallelism: the experts of a layer lie on several ranks, and tokens go to them and back.

Where more ranks than that make a gang, the experts of one part are cut over those that have it, and
are whole there while they compute. (Lepikhin et al. 2020, GShard, arXiv 2006.16668; beside FSDP as
in Rajbhandari et al. 2022, DeepSpeed-MoE, arXiv 2201.05596.)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common.model.moe import Experts, is_expert
from services.trainer.sharding.owners import Owners


class Sent(torch.autograd.Function):
    """Rows [m, d] that go to other ranks: `sizes` to each; `coming` come from each, side by side.
    Gradients go back the same way.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        rows: Tensor,
        sizes: list[int],
        coming: list[int],
        group: dist.ProcessGroup,
    ) -> Tensor:
        """The rows that came."""
        ctx.sent = sizes, coming, group  # type: ignore[attr-defined]
        return exchanged(rows, sizes, coming, group)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> Any:
        """That of the rows that went."""
        sizes, coming, group = ctx.sent  # type: ignore[attr-defined]
        return exchanged(gradients[0], coming, sizes, group), None, None, None


def exchanged(
    rows: Tensor, sizes: list[int], coming: list[int], group: dist.ProcessGroup
) -> Tensor:
    """What comes of an exchange of rows [m, ..]."""
    found = rows.new_empty(sum(coming), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), coming, sizes, group=group)
    return found


class Whole(torch.autograd.Function):
    """All rows of a matrix whose ranks have some each, at most `each`; its gradient is the sum over
    these ranks, each its own rows.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, own: Tensor, total: int, each: int, group: dist.ProcessGroup
    ) -> Tensor:
        """[total, ..] of own [rows, ..]."""
        ctx.cut = len(own), total, each, group  # type: ignore[attr-defined]
        padded = own.new_zeros(each, *own.shape[1:])
        padded[: len(own)] = own
        whole = own.new_empty(each * group.size(), *own.shape[1:])
        dist.all_gather_into_tensor(whole, padded, group=group)
        return whole[:total]

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> Any:
        """Of the own rows."""
        rows, total, each, group = ctx.cut  # type: ignore[attr-defined]
        (gradient,) = gradients
        padded = gradient.new_zeros(each * group.size(), *gradient.shape[1:])
        padded[:total] = gradient
        own = gradient.new_empty(each, *gradient.shape[1:])
        dist.reduce_scatter_tensor(own, padded, group=group)
        return own[:rows], None, None, None


class ExpertParallel:
    """The way of tokens to the experts of a layer, of which each rank of one group has as many, and
    back; see `common.model.moe.Across`.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        """`mesh` [ranks that have the same experts, ranks that have others]."""
        self._alike, self._others = mesh.get_group(0), mesh.get_group(1)

    def through(self, rows: Tensor, ends: Tensor, experts: Experts) -> Tensor:
        """See `Across`."""
        group = self._others
        ranks, count = group.size(), experts.config.experts // group.size()
        counts = torch.diff(ends, prepend=ends.new_zeros(1)).view(ranks, count)
        came = torch.empty_like(counts)
        dist.all_to_all_single(came, counts, group=group)
        sizes, coming = counts.sum(1).tolist(), came.sum(1).tolist()
        here: Tensor = Sent.apply(rows, sizes, coming, group)  # type: ignore[no-untyped-call]
        whose = torch.arange(count, device=rows.device).repeat(ranks)
        order = whose.repeat_interleave(came.flatten()).argsort(stable=True)
        gate_up, down = (self._whole(p, count, rows) for p in (experts.gate_up, experts.down))
        if len(here):
            made = experts.made(here.index_select(0, order), came.sum(0).cumsum(0), gate_up, down)
            back = torch.empty_like(order)
            back[order] = torch.arange(len(order), device=rows.device)
            made = made.index_select(0, back)
        else:  # the others await its part in what is summed on the way back
            made = here + 0.0 * (gate_up.flatten()[:1].sum() + down.flatten()[:1].sum())
        found: Tensor = Sent.apply(made, coming, sizes, group)  # type: ignore[no-untyped-call]
        return found

    def _whole(self, own: Tensor, count: int, like: Tensor) -> Tensor:
        """The matrices of all `count` experts of this part, in the type that passes compute in."""
        own = own.to(like.dtype)
        if self._alike.size() == 1:
            return own
        each = -(-count // self._alike.size())
        whole: Tensor = Whole.apply(own, count, each, self._alike)  # type: ignore[no-untyped-call]
        return whole


def split_experts(
    model: nn.Module, mesh: DeviceMesh, parallel: int, owners: Owners
) -> set[nn.Parameter]:
    """Leaves of the experts of a model on the `meta` device those rows that a rank has, and sends
    tokens to the others; the parameters that are then not to be cut any further.
    """
    ranks, rank = mesh.size(), mesh.get_local_rank()
    across = ExpertParallel(init_device_mesh(mesh.device_type, (ranks // parallel, parallel)))
    own: set[nn.Parameter] = set()
    for name, parameter in list(model.named_parameters()):
        if not is_expert(name):
            continue
        place, _, kind = name.rpartition(".")
        experts = model.get_submodule(place)
        assert isinstance(experts, Experts)
        rows = owners.rows(name, len(parameter), rank)
        part = nn.Parameter(parameter.detach()[rows], parameter.requires_grad)
        setattr(experts, kind, part)
        experts.across = across
        own.add(part)
    return own
