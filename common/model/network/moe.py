"""A mixture of experts in place of a layer's feed-forward part, as Qwen's and Mixtral have it.

It differs from the textbook in one way: which experts a token is sent to may be given. What an
engine sampled with one routing is then trained with the same, although the router has changed by
then, or rounds otherwise; the experts' weights still come from the router as it is, so that it
learns (rollout routing replay, arXiv 2510.11370).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, linear

from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.network.pointwise import TORCH_POINTWISE, PointwiseOps

_ROW_ALIGNMENT_BYTES = 16  # bytes, of which a grouped product wants rows to be a multiple


class Routing:
    """The routing of a forward pass: what it is asked about it, and its answers. (No dataclass: of
    such an argument FSDP makes a copy when it casts tensors, and the answers would be the copy's.)
    """

    def __init__(self, balance_mask: Tensor | None = None) -> None:
        """`counted` bool [..]: tokens that `balance` is measured over."""
        self.balance_mask = balance_mask
        self.experts: Tensor | None = None  # [.., sparse layers, k]: where each token was sent
        self.balance_loss: Tensor | None = (
            None  # scalar, a sum over the counted tokens; see `balance`
        )


class LayerRouting(NamedTuple):
    """One layer's share of a `Routing`. (A tuple: FSDP and checkpoints look into those.)"""

    experts: Tensor  # [.., k]
    balance_loss: Tensor  # scalar; 0 where no token is counted


class RouterOutput(NamedTuple):
    """What a router has decided about n tokens."""

    experts: Tensor  # int64 [n, k]: where each is sent
    expert_weights: (
        Tensor  # [n, k] float32, of what these make of it; with a gradient to the router
    )
    balance_loss: Tensor  # scalar; 0 where no token is counted


class TokenDispatcher(Protocol):
    """How tokens come to experts that lie on several ranks."""

    def compute_experts(
        self, rows: Tensor, expert_ends: Tensor, experts: MixtureOfExperts
    ) -> Tensor:
        """What the experts of a layer make of rows [m, hidden_size], those of an expert side by
        side: an expert's end at its one of `ends` int64 [experts]. `experts` has the matrices of
        those that lie here.
        """


def order_by_expert(counts: Tensor) -> Tensor:
    """The order, int64 [rows], in which the rows of several sources lie side by side by expert:
    those of each come so already, `counts` int64 [sources, experts] of each expert.
    """
    whose = torch.arange(counts.shape[1], device=counts.device).repeat(len(counts))
    return whose.repeat_interleave(counts.flatten()).argsort(stable=True)


def invert_permutation(order: Tensor) -> Tensor:
    """The order, int64 [n], that undoes another."""
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return back


def is_expert_matrix(name: str) -> bool:
    """Whether a parameter of this name has a matrix for each expert."""
    return name.endswith((".experts.gate_up", ".experts.down"))


class MixtureOfExperts(nn.Module):
    """`experts_per_token` SwiGLUs of many for each token, added by the router's probabilities."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.pointwise: PointwiseOps = TORCH_POINTWISE
        self.token_dispatcher: TokenDispatcher | None = None  # None: all of them lie here
        count, d, width = config.experts, config.hidden_size, config.expert_ffn_size
        self.router = nn.Parameter(torch.empty(count, d, dtype=dtype))
        self.gate_up = nn.Parameter(torch.empty(count, 2 * width, d, dtype=dtype))
        self.down = nn.Parameter(torch.empty(count, d, width, dtype=dtype))
        if wide := config.shared_ffn_size:
            self.shared_gate = nn.Parameter(torch.empty(1, d, dtype=dtype))
            self.shared_gate_up = nn.Parameter(torch.empty(2 * wide, d, dtype=dtype))
            self.shared_down = nn.Parameter(torch.empty(d, wide, dtype=dtype))

    def forward(
        self, x: Tensor, experts: Tensor | None = None, balance_mask: Tensor | None = None
    ) -> tuple[Tensor, LayerRouting]:
        """What the experts add to tokens x [.., hidden_size], and where each token was sent.

        `experts` [.., k] says where to; a token for which one of them is
        `meshrl.common.base.expert_routing.UNKNOWN_EXPERT` goes where the router sends it.
        """
        flat = x.reshape(-1, x.shape[-1])
        chosen = self.route(flat, experts, balance_mask)
        y = self.combine(chosen.expert_weights, self._dispatch(flat, chosen.experts))
        if self.config.shared_ffn_size:
            y = y + self.compute_shared_expert(flat)
        k = self.config.experts_per_token
        return y.view(x.shape), LayerRouting(
            chosen.experts.view(*x.shape[:-1], k), chosen.balance_loss
        )

    def route(self, x: Tensor, experts: Tensor | None, balance_mask: Tensor | None) -> RouterOutput:
        """Where tokens x [n, hidden_size] are sent; see `forward`."""
        c = self.config
        probabilities = linear(x, self.router).softmax(-1, dtype=torch.float32)
        chosen = probabilities.detach().topk(c.experts_per_token).indices
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
        """[n, hidden_size]: the sum of what k experts made of each token, `apart`
        [n, k, hidden_size], by their shares [n, k]."""
        return torch.bmm(
            expert_weights.to(expert_outputs.dtype).unsqueeze(1), expert_outputs
        ).squeeze(1)

    def _dispatch(self, x: Tensor, chosen: Tensor) -> Tensor:
        """[n, k, hidden_size]: what the chosen experts [n, k] make of x [n, hidden_size]."""
        n, k = chosen.shape
        ordered, order = chosen.flatten().sort(stable=True)  # tokens of an expert, side by side
        numbers = torch.arange(self.config.experts, device=x.device)
        ends = torch.searchsorted(ordered, numbers, right=True)
        rows = x.index_select(0, order // k)
        if self.token_dispatcher is None:
            made = self.compute_experts(rows, ends, self.gate_up, self.down)
        else:
            made = self.token_dispatcher.compute_experts(rows, ends, self)
        return made.index_select(0, invert_permutation(order)).view(n, k, -1)

    def compute_shared_expert(self, x: Tensor) -> Tensor:
        """What the expert that every token goes to makes of x [n, hidden_size], as far as its gate
        lets it through."""
        made = linear(self.pointwise.swiglu(linear(x, self.shared_gate_up)), self.shared_down)
        return linear(x, self.shared_gate).sigmoid() * made

    def compute_experts(
        self, rows: Tensor, expert_ends: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        """What experts of these matrices, [e, ..], make of rows [m, hidden_size]; see
        `TokenDispatcher`.
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
        # unbind: its gradient is one stack, that of an index would be a matrix of zeros for each
        weights = zip(gate_up.unbind(), down.unbind(), strict=True)
        for start, stop, (wide, narrow) in zip([0, *stops], stops, weights, strict=False):
            if stop > start:
                x = self.pointwise.swiglu(linear(rows[start:stop], wide))
                parts.append(linear(x, narrow))
        return torch.cat(parts) if parts else rows

    def _compute_grouped(self, rows: Tensor, ends: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """All experts in one call. On a CPU it is a loop inside, which has no gradients to gather:
        a third off the time of a training step with 32 experts of width 256."""
        stops = ends.to(torch.int32)
        x = self.pointwise.swiglu(grouped_mm(rows, gate_up.mT, offs=stops))
        return grouped_mm(x, down.mT, offs=stops)


def compute_balance_loss(probabilities: Tensor, chosen: Tensor, balance_mask: Tensor) -> Tensor:
    """The sum, over the counted tokens, of: experts x the sum over experts of (choices that fell on
    one, a token) x (its mean probability). Where all are equally busy it is k a token, and least.

    Equations 4 to 6 of the Switch Transformer (arXiv 2101.03961), times the number of tokens, so
    that what several bins give may be added. `probabilities` [n, experts], `chosen` [n, k].
    """
    count, k = probabilities.shape[-1], chosen.shape[-1]
    weight = balance_mask.to(probabilities.dtype)
    fell = torch.zeros(count, dtype=probabilities.dtype, device=chosen.device)
    fell = fell.scatter_add(0, chosen.flatten(), weight.repeat_interleave(k))
    return count * fell @ (weight @ probabilities) / weight.sum().clamp(min=1)


def can_group_experts(config: ModelConfig, like: Tensor) -> bool:
    """Whether all experts are one grouped product for tensors such as `like`. If not, the host
    learns how many tokens each has, which no CUDA graph can hold."""
    widths = config.hidden_size, config.expert_ffn_size
    whole = not any(width * like.dtype.itemsize % _ROW_ALIGNMENT_BYTES for width in widths)
    kernel = like.dtype == torch.bfloat16 or (like.dtype == torch.float32 and not like.is_cuda)
    return whole and kernel
