"""Mixture of experts as a layer's feed-forward part, as in Qwen and Mixtral.

It differs from the textbook in one way: callers can set the experts of a token. Training so repeats
the routing with which an engine sampled, although the router has changed since, or rounds
differently. The experts' weights still come from the current router, so that it learns (rollout
routing replay, arXiv 2510.11370).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, linear

from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.network.pointwise import TORCH_POINTWISE, PointwiseOps

_ROW_ALIGNMENT_BYTES = 16  # alignment in bytes of the rows of a grouped product


class Routing:
    """Routing of a forward pass: its options and its results.

    It is no dataclass: FSDP copies such an argument when it casts tensors, and the results would be
    those of the copy.
    """

    def __init__(self, balance_mask: Tensor | None = None) -> None:
        """Create a routing; `balance_mask`, bool [..], selects the tokens of the balance loss."""
        self.balance_mask = balance_mask
        self.experts: Tensor | None = None  # [.., sparse layers, k]: experts of each token
        self.balance_loss: Tensor | None = (
            None  # scalar, a sum over the masked tokens; see `compute_balance_loss`
        )


class LayerRouting(NamedTuple):
    """One layer's share of a `Routing`; a tuple, because FSDP and checkpoints traverse those."""

    experts: Tensor  # [.., k]
    balance_loss: Tensor  # scalar; 0 if no token is in the mask


class RouterOutput(NamedTuple):
    """Decision of a router about n tokens."""

    experts: Tensor  # int64 [n, k]: experts of each token
    expert_weights: (
        Tensor  # [n, k] float32 weights of the experts' outputs, with a gradient to the router
    )
    balance_loss: Tensor  # scalar; 0 if no token is in the mask


class TokenDispatcher(Protocol):
    """Transport of tokens to experts on several ranks."""

    def compute_experts(
        self, rows: Tensor, expert_ends: Tensor, experts: MixtureOfExperts
    ) -> Tensor:
        """Compute the experts of a layer on rows [m, hidden_size], sorted by expert.

        The rows of an expert end at its entry of `expert_ends`, int64 [experts]. `experts` has the
        matrices of this rank's experts.
        """


def order_by_expert(counts: Tensor) -> Tensor:
    """Return the order, int64 [rows], that sorts rows of several sources by expert.

    The rows of each source are sorted already, with `counts`, int64 [sources, experts].
    """
    whose = torch.arange(counts.shape[1], device=counts.device).repeat(len(counts))
    return whose.repeat_interleave(counts.flatten()).argsort(stable=True)


def invert_permutation(order: Tensor) -> Tensor:
    """Return the inverse, int64 [n], of a permutation."""
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return back


def is_expert_matrix(name: str) -> bool:
    """Return True if the parameter of this name has a matrix for each expert."""
    return name.endswith((".experts.gate_up", ".experts.down"))


class MixtureOfExperts(nn.Module):
    """Sum of `num_experts_per_token` SwiGLUs per token, weighted by the router's probabilities."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.pointwise: PointwiseOps = TORCH_POINTWISE
        self.token_dispatcher: TokenDispatcher | None = None  # None: this rank has all experts
        count, d, width = config.num_experts, config.hidden_size, config.expert_ffn_size
        self.router = nn.Parameter(torch.empty(count, d, dtype=dtype))
        self.gate_up = nn.Parameter(torch.empty(count, 2 * width, d, dtype=dtype))
        self.down = nn.Parameter(torch.empty(count, d, width, dtype=dtype))
        if wide := config.shared_expert_ffn_size:
            self.shared_gate = nn.Parameter(torch.empty(1, d, dtype=dtype))
            self.shared_gate_up = nn.Parameter(torch.empty(2 * wide, d, dtype=dtype))
            self.shared_down = nn.Parameter(torch.empty(d, wide, dtype=dtype))

    def forward(
        self, x: Tensor, experts: Tensor | None = None, balance_mask: Tensor | None = None
    ) -> tuple[Tensor, LayerRouting]:
        """Return the experts' output for tokens x [.., hidden_size], and each token's routing.

        `experts` [.., k] sets the routing; a token with an entry of
        `meshrl.common.base.expert_routing.UNKNOWN_EXPERT` is routed by the router.
        """
        flat = x.reshape(-1, x.shape[-1])
        chosen = self.route(flat, experts, balance_mask)
        y = self.combine(chosen.expert_weights, self._dispatch(flat, chosen.experts))
        if self.config.shared_expert_ffn_size:
            y = y + self.compute_shared_expert(flat)
        k = self.config.num_experts_per_token
        return y.view(x.shape), LayerRouting(
            chosen.experts.view(*x.shape[:-1], k), chosen.balance_loss
        )

    def route(self, x: Tensor, experts: Tensor | None, balance_mask: Tensor | None) -> RouterOutput:
        """Route tokens x [n, hidden_size]; see `forward`."""
        c = self.config
        probabilities = linear(x, self.router).softmax(-1, dtype=torch.float32)
        chosen = probabilities.detach().topk(c.num_experts_per_token).indices
        if experts is not None:
            given = experts.reshape(chosen.shape).to(chosen.dtype)
            chosen = torch.where((given < 0).any(-1, keepdim=True), chosen, given)
        shares = probabilities.gather(-1, chosen)
        if c.normalise_routing:
            shares = shares / shares.sum(-1, keepdim=True)
        loss = x.new_zeros(())
        if balance_mask is not None:
            loss = compute_balance_loss(probabilities, chosen, balance_mask.reshape(-1))
        return RouterOutput(chosen, shares, loss)

    def combine(self, expert_weights: Tensor, expert_outputs: Tensor) -> Tensor:
        """Return the weighted sum [n, hidden_size] of the outputs of k experts.

        `expert_outputs` is [n, k, hidden_size], `expert_weights` [n, k].
        """
        return torch.bmm(
            expert_weights.to(expert_outputs.dtype).unsqueeze(1), expert_outputs
        ).squeeze(1)

    def _dispatch(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Return the outputs [n, k, hidden_size] of the chosen experts [n, k] for x [n,
        hidden_size].
        """
        n, k = chosen.shape
        ordered, order = chosen.flatten().sort(stable=True)  # sorts tokens by expert
        numbers = torch.arange(self.config.num_experts, device=x.device)
        ends = torch.searchsorted(ordered, numbers, right=True)
        rows = x.index_select(0, order // k)
        if self.token_dispatcher is None:
            outputs = self.compute_experts(rows, ends, self.gate_up, self.down)
        else:
            outputs = self.token_dispatcher.compute_experts(rows, ends, self)
        return outputs.index_select(0, invert_permutation(order)).view(n, k, -1)

    def compute_shared_expert(self, x: Tensor) -> Tensor:
        """Return the gated output of the shared expert for x [n, hidden_size]."""
        output = linear(self.pointwise.swiglu(linear(x, self.shared_gate_up)), self.shared_down)
        return linear(x, self.shared_gate).sigmoid() * output

    def compute_experts(
        self, rows: Tensor, expert_ends: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        """Compute experts of these matrices, [e, ..], on rows [m, hidden_size].

        See `TokenDispatcher`.
        """
        grouped = can_group_experts(self.config, rows)
        return (self._compute_grouped if grouped else self._compute_sequentially)(
            rows, expert_ends, gate_up, down
        )

    def _compute_sequentially(
        self, rows: Tensor, ends: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        stops = ends.tolist()
        parts = []
        # unbind: its gradient is one stack; that of an index would be a matrix of zeros for each
        # expert
        weights = zip(gate_up.unbind(), down.unbind(), strict=True)
        for start, stop, (wide, narrow) in zip([0, *stops], stops, weights, strict=False):
            if stop > start:
                x = self.pointwise.swiglu(linear(rows[start:stop], wide))
                parts.append(linear(x, narrow))
        return torch.cat(parts) if parts else rows

    def _compute_grouped(self, rows: Tensor, ends: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """Compute all experts in one call.

        On a CPU the call is a loop inside, without gradients to gather: that saves a third of the
        time of a training step with 32 experts of width 256.
        """
        stops = ends.to(torch.int32)
        x = self.pointwise.swiglu(grouped_mm(rows, gate_up.mT, offs=stops))
        return grouped_mm(x, down.mT, offs=stops)


def compute_balance_loss(probabilities: Tensor, chosen: Tensor, balance_mask: Tensor) -> Tensor:
    """Return the load-balancing loss, summed over the masked tokens.

    For each token it is the number of experts times the sum over experts of (choices of the expert
    per token) x (its mean probability). With equal load it has its minimum, k a token. Source:
    equations 4 to 6 of the Switch Transformer (arXiv 2101.03961), times the number of tokens, so
    that losses of several bins can be added. `probabilities` [n, experts], `chosen` [n, k].
    """
    count, k = probabilities.shape[-1], chosen.shape[-1]
    weight = balance_mask.to(probabilities.dtype)
    fell = torch.zeros(count, dtype=probabilities.dtype, device=chosen.device)
    fell = fell.scatter_add(0, chosen.flatten(), weight.repeat_interleave(k))
    return count * fell @ (weight @ probabilities) / weight.sum().clamp(min=1)


def can_group_experts(config: ModelConfig, like: Tensor) -> bool:
    """Return True if all experts are one grouped product for tensors such as `like`.

    Otherwise the host reads the token count of each expert, which no CUDA graph can capture.
    """
    widths = config.hidden_size, config.expert_ffn_size
    is_aligned = not any(width * like.dtype.itemsize % _ROW_ALIGNMENT_BYTES for width in widths)
    kernel = like.dtype == torch.bfloat16 or (like.dtype == torch.float32 and not like.is_cuda)
    return is_aligned and kernel
