"""What a rank computes with its experts, of one layer and micro-batch, for all tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from meshrl.common.model.network.moe import Experts, by_expert


@dataclass
class Made:
    """A forward pass of the experts of a layer, whose backward is still to come."""

    experts: Experts
    sizes: dict[int, int]  # rows of each attention rank
    order: Tensor  # int64 [m]: rows as they came, those of an expert side by side
    ends: Tensor  # int64 [experts here]
    rows: Tensor  # [m, hidden_size], in that order; a leaf of the graph
    found: Tensor | None  # [m, hidden_size] with its graph; None: it is computed again


def forward(
    experts: Experts,
    counts: Mapping[int, Tensor],
    rows: Mapping[int, Tensor],
    keeps: bool,
    again: bool,
) -> tuple[dict[int, Tensor], Made]:
    """Return what experts make of ranks' sorted rows; `keeps` its graph, or makes it `again`."""
    sources = sorted(rows)
    came = torch.stack([counts[rank] for rank in sources])  # [attention ranks, experts here]
    order = by_expert(came)
    whole = torch.cat([rows[rank] for rank in sources]).index_select(0, order)
    graph = keeps and not again
    made = Made(
        experts,
        {rank: len(rows[rank]) for rank in sources},
        order,
        came.sum(0).cumsum(0),
        whole.requires_grad_(keeps and len(whole) > 0),
        None,
    )
    with torch.set_grad_enabled(graph):
        found = _through(made)
    if graph:
        made.found = found
    return _parted(made, found.detach()), made


def backward(made: Made, gradients: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """The gradients of the rows of each attention rank, given those of what was made of them."""
    sources = sorted(made.sizes)
    slope = torch.cat([gradients[rank] for rank in sources]).index_select(0, made.order)
    if not len(slope):
        return {rank: gradients[rank] for rank in sources}
    found = made.found
    if found is None:
        with torch.enable_grad():
            found = _through(made)
    made.found = None
    torch.autograd.backward(found, slope)
    assert made.rows.grad is not None
    return _parted(made, made.rows.grad)


def _through(made: Made) -> Tensor:
    if not len(made.rows):
        return made.rows
    experts = made.experts
    return experts.made(made.rows, made.ends, experts.gate_up, experts.down)


def _parted(made: Made, ordered: Tensor) -> dict[int, Tensor]:
    """Rows in the order in which they came, by attention rank."""
    back = torch.empty_like(ordered)
    back[made.order] = ordered
    sources = sorted(made.sizes)
    parts = torch.split(back, [made.sizes[rank] for rank in sources])
    return dict(zip(sources, parts, strict=True))
