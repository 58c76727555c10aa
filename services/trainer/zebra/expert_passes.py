"""Passes of a rank's experts, of one layer and micro-batch, for all tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from meshrl.common.model.network.moe import MixtureOfExperts, order_by_expert


@dataclass
class ExpertPass:
    """Forward pass of a layer's experts, with its backward pass still to come."""

    experts: MixtureOfExperts
    sizes: dict[int, int]  # rows from each attention rank
    order: Tensor  # int64 [m]: rows in order of arrival, sorted by expert
    expert_ends: Tensor  # int64 [experts here]
    rows: Tensor  # [m, hidden_size], sorted by expert; a leaf of the graph
    outputs: Tensor | None  # [m, hidden_size] with its graph; None: to be recomputed


def run_forward(
    experts: MixtureOfExperts,
    counts: Mapping[int, Tensor],
    rows: Mapping[int, Tensor],
    keep_graph: bool,
    recompute: bool,
) -> tuple[dict[int, Tensor], ExpertPass]:
    """Run the experts on ranks' sorted rows; return outputs by rank, and the pass.

    The pass keeps its graph if `keep_graph`, or is computed again in the backward pass if
    `recompute`.
    """
    sources = sorted(rows)
    # [attention ranks, experts here]
    received_counts = torch.stack([counts[rank] for rank in sources]).to(rows[sources[0]].device)
    order = order_by_expert(received_counts)
    inputs = torch.cat([rows[rank] for rank in sources]).index_select(0, order)
    graph = keep_graph and not recompute
    expert_pass = ExpertPass(
        experts,
        {rank: len(rows[rank]) for rank in sources},
        order,
        received_counts.sum(0).cumsum(0),
        inputs.requires_grad_(keep_graph and len(inputs) > 0),
        None,
    )
    with torch.set_grad_enabled(graph):
        found = _compute_experts(expert_pass)
    if graph:
        expert_pass.outputs = found
    return _split_by_rank(expert_pass, found.detach()), expert_pass


def run_backward(expert_pass: ExpertPass, gradients: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return the gradients of each attention rank's rows, given those of the outputs."""
    sources = sorted(expert_pass.sizes)
    slope = torch.cat([gradients[rank] for rank in sources]).index_select(0, expert_pass.order)
    if not len(slope):
        return {rank: gradients[rank] for rank in sources}
    found = expert_pass.outputs
    if found is None:
        with torch.enable_grad():
            found = _compute_experts(expert_pass)
    expert_pass.outputs = None
    torch.autograd.backward(found, slope)
    assert expert_pass.rows.grad is not None
    return _split_by_rank(expert_pass, expert_pass.rows.grad)


def _compute_experts(expert_pass: ExpertPass) -> Tensor:
    if not len(expert_pass.rows):
        return expert_pass.rows
    experts = expert_pass.experts
    return experts.compute_experts(
        expert_pass.rows, expert_pass.expert_ends, experts.gate_up, experts.down
    )


def _split_by_rank(expert_pass: ExpertPass, ordered: Tensor) -> dict[int, Tensor]:
    """Return rows in the order of arrival, by attention rank."""
    back = torch.empty_like(ordered)
    back[expert_pass.order] = ordered
    sources = sorted(expert_pass.sizes)
    parts = torch.split(back, [expert_pass.sizes[rank] for rank in sources])
    return dict(zip(sources, parts, strict=True))
