"""A mixture of experts in place of a layer's feed-forward part, as Qwen's and Mixtral have it.

It differs from the textbook in one way: which experts a token is sent to may be given. What an
engine sampled with one routing is then trained with the same, although the router has changed by
then, or rounds otherwise; the experts' weights still come from the router as it is, so that it
learns (rollout routing replay, arXiv 2510.11370).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, linear

from common.model.config import ModelConfig
from common.model.pointwise import PLAIN, Pointwise

_ALIGNED = 16  # bytes, of which a grouped product wants rows to be a multiple


@dataclass(slots=True)
class Routing:
    """The routing of a forward pass: what it is asked about it, and its answers."""

    counted: Tensor | None = None  # bool [..]: tokens that `balance` is measured over
    experts: Tensor | None = None  # [.., sparse layers, k]: where each token was sent
    balance: Tensor | None = None  # scalar loss, a sum over the counted tokens; see `balance`


class Routed(NamedTuple):
    """One layer's share of a `Routing`. (A tuple: FSDP and checkpoints look into those.)"""

    experts: Tensor  # [.., k]
    balance: Tensor  # scalar; 0 where no token is counted


class Experts(nn.Module):
    """`experts_per_token` SwiGLUs of many for each token, added by the router's probabilities."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.pointwise: Pointwise = PLAIN
        count, d, width = config.experts, config.hidden_size, config.expert_ffn_size
        self.router = nn.Parameter(torch.empty(count, d, dtype=dtype))
        self.gate_up = nn.Parameter(torch.empty(count, 2 * width, d, dtype=dtype))
        self.down = nn.Parameter(torch.empty(count, d, width, dtype=dtype))
        if wide := config.shared_ffn_size:
            self.shared_gate = nn.Parameter(torch.empty(1, d, dtype=dtype))
            self.shared_gate_up = nn.Parameter(torch.empty(2 * wide, d, dtype=dtype))
            self.shared_down = nn.Parameter(torch.empty(d, wide, dtype=dtype))

    def forward(
        self, x: Tensor, experts: Tensor | None = None, counted: Tensor | None = None
    ) -> tuple[Tensor, Routed]:
        """What the experts add to tokens x [.., hidden_size], and where each token was sent.

        `experts` [.., k] says where to; a token for which one of them is
        `common.records.experts.UNKNOWN` goes where the router sends it.
        """
        c, shape = self.config, x.shape
        x = x.reshape(-1, shape[-1])
        probabilities = linear(x, self.router).softmax(-1, dtype=torch.float32)
        chosen = probabilities.detach().topk(c.experts_per_token).indices
        if experts is not None:
            given = experts.reshape(chosen.shape).to(chosen.dtype)
            chosen = torch.where((given < 0).any(-1, keepdim=True), chosen, given)
        shares = probabilities.gather(-1, chosen)
        if c.normalise_routing:
            shares = shares / shares.sum(-1, keepdim=True)
        apart = self._through(x, chosen)
        y = torch.bmm(shares.to(x.dtype).unsqueeze(1), apart).squeeze(1)
        if c.shared_ffn_size:
            y = y + self._shared(x)
        y = y.view(shape)
        loss = x.new_zeros(())
        if counted is not None:
            loss = balance(probabilities, chosen, counted.reshape(-1))
        return y, Routed(chosen.view(*shape[:-1], c.experts_per_token), loss)

    def _through(self, x: Tensor, chosen: Tensor) -> Tensor:
        """[n, k, hidden_size]: what the chosen experts [n, k] make of x [n, hidden_size]."""
        n, k = chosen.shape
        ordered, order = chosen.flatten().sort(stable=True)  # tokens of an expert, side by side
        numbers = torch.arange(self.config.experts, device=x.device)
        ends = torch.searchsorted(ordered, numbers, right=True)
        rows = x.index_select(0, order // k)
        grouped = groups_here(self.config, x)
        made = self._grouped(rows, ends) if grouped else self._one_by_one(rows, ends)
        back = torch.empty_like(order)
        back[order] = torch.arange(n * k, device=x.device)
        return made.index_select(0, back).view(n, k, -1)

    def _shared(self, x: Tensor) -> Tensor:
        """What the expert that every token goes to makes of x [n, hidden_size], as far as its gate
        lets it through."""
        made = linear(self.pointwise.swiglu(linear(x, self.shared_gate_up)), self.shared_down)
        return linear(x, self.shared_gate).sigmoid() * made

    def _one_by_one(self, rows: Tensor, ends: Tensor) -> Tensor:
        """An expert after the other, those with tokens."""
        stops = ends.tolist()
        parts = []
        # unbind: its gradient is one stack, that of an index would be a matrix of zeros for each
        weights = zip(self.gate_up.unbind(), self.down.unbind(), strict=True)
        for start, stop, (gate_up, down) in zip([0, *stops], stops, weights, strict=False):
            if stop > start:
                x = self.pointwise.swiglu(linear(rows[start:stop], gate_up))
                parts.append(linear(x, down))
        return torch.cat(parts) if parts else rows

    def _grouped(self, rows: Tensor, ends: Tensor) -> Tensor:
        """All experts in one call. On a CPU it is a loop inside, which has no gradients to gather:
        a third off the time of a training step with 32 experts of width 256."""
        stops = ends.to(torch.int32)
        x = self.pointwise.swiglu(grouped_mm(rows, self.gate_up.mT, offs=stops))
        return grouped_mm(x, self.down.mT, offs=stops)


def balance(probabilities: Tensor, chosen: Tensor, counted: Tensor) -> Tensor:
    """The sum, over the counted tokens, of: experts x the sum over experts of (choices that fell on
    one, a token) x (its mean probability). Where all are equally busy it is k a token, and least.

    Equations 4 to 6 of the Switch Transformer (arXiv 2101.03961), times the number of tokens, so
    that what several bins give may be added. `probabilities` [n, experts], `chosen` [n, k].
    """
    count, k = probabilities.shape[-1], chosen.shape[-1]
    weight = counted.to(probabilities.dtype)
    fell = torch.zeros(count, dtype=probabilities.dtype, device=chosen.device)
    fell = fell.scatter_add(0, chosen.flatten(), weight.repeat_interleave(k))
    return count * fell @ (weight @ probabilities) / weight.sum().clamp(min=1)


def groups_here(config: ModelConfig, like: Tensor) -> bool:
    """Whether all experts are one grouped product for tensors such as `like`. If not, the host
    learns how many tokens each has, which no CUDA graph can hold."""
    widths = config.hidden_size, config.expert_ffn_size
    whole = not any(width * like.dtype.itemsize % _ALIGNED for width in widths)
    kernel = like.dtype == torch.bfloat16 or (like.dtype == torch.float32 and not like.is_cuda)
    return whole and kernel
