"""A decoder cut at its mixture layers: what attention ranks compute of it, piece by piece.

A piece begins with what the experts of one mixture layer made, and ends with what goes to those of
the next one. Autograd is cut there: the gradient of what went out comes back from the experts, that
of the routing from the piece that follows, and one backward pass of the piece takes both, so that
each weight is passed once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

from meshrl.common.model.network.decoder import Decoder, SparseLayer
from meshrl.services.trainer.models.forward import Placed


class PieceOutputs(NamedTuple):
    """What a piece ends with, of n tokens."""

    residual: Tensor  # [n, hidden_size]
    shares: Tensor  # [n, k], of what the chosen experts will make
    x: Tensor  # [n, hidden_size]: what goes to them
    balance: Tensor  # scalar, see `meshrl.common.model.network.moe.Chosen`


class PieceInputs(NamedTuple):
    """What the next piece begins with: leaves of its graph."""

    residual: Tensor
    shares: Tensor
    apart: Tensor  # [n, k, hidden_size]: what the experts made


class Pieces:
    """Those of a model, one more than it has mixture layers; the last ends with hidden states."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self.mixture = list(model.config.sparse_layers)
        self.width = model.config.hidden_size  # of a row
        self.dtype = model.final_norm.dtype  # of passes

    def first(self, given: Placed) -> tuple[PieceOutputs, Tensor]:
        """Piece 0 of a bin, and the experts [n, k] that its tokens are sent to."""
        return self._to_experts(0, given, embedding(given.tokens, self._model.embedding))

    def next(self, number: int, given: Placed, coming: PieceInputs) -> tuple[PieceOutputs, Tensor]:
        """A piece behind the first that is not the last one."""
        return self._to_experts(number, given, self._joined(number, coming))

    def last(self, given: Placed, coming: PieceInputs) -> Tensor:
        """[n, hidden_size], normalised: hidden states."""
        model = self._model
        hidden = self._joined(len(self.mixture), coming)
        hidden = self._dense(given, hidden, self.mixture[-1] + 1, model.config.layers)
        return model.pointwise.normed(hidden, model.final_norm, model.config.norm_eps)

    def _joined(self, number: int, coming: PieceInputs) -> Tensor:
        experts = self.layer(number - 1).experts
        return coming.residual + experts.joined(coming.shares, coming.apart)

    def _to_experts(
        self, number: int, given: Placed, hidden: Tensor
    ) -> tuple[PieceOutputs, Tensor]:
        index = self.mixture[number]
        begin = self.mixture[number - 1] + 1 if number else 0
        hidden = self._dense(given, hidden, begin, index)
        layer, model = self.layer(number), self._model
        cos, sin = model.rotations(given.positions)(index)
        hidden = layer.attend(hidden, cos, sin, index, given.attention)
        x = model.pointwise.normed(hidden, layer.mlp_norm, model.config.norm_eps)
        sent = given.experts[..., number, :] if given.experts is not None else None
        chosen = layer.experts.route(x, sent, given.counted)
        if model.config.shared_ffn_size:
            hidden = hidden + layer.experts.shared(x)
        return PieceOutputs(hidden, chosen.shares, x, chosen.balance), chosen.experts

    def _dense(self, given: Placed, hidden: Tensor, begin: int, end: int) -> Tensor:
        rotation = self._model.rotations(given.positions)
        for index in range(begin, end):
            cos, sin = rotation(index)
            hidden = self._model.layers[index](hidden, cos, sin, index, given.attention)
        return hidden

    def layer(self, mixture: int) -> SparseLayer:
        """The mixture layer of this number among such."""
        found = self._model.layers[self.mixture[mixture]]
        assert isinstance(found, SparseLayer)
        return found


class Cut:
    """A piece's pass over one bin: forward now, backward later, or `again` from its inputs."""

    def __init__(
        self,
        piece: Callable[[PieceInputs | None], tuple[tuple[Tensor, ...], Tensor]],
        coming: PieceInputs | None,
        again: bool,
    ) -> None:
        """`piece` returns what it ends with, which has gradients, and what has none."""
        self._piece, self._again = piece, again
        self._coming = None if coming is None else PieceInputs(*(t.detach() for t in coming))
        with torch.set_grad_enabled(not again):
            ends, self.told = self._run()
        self.ends = tuple(tensor.detach() for tensor in ends)
        self._ends: tuple[Tensor, ...] | None = None if again else ends

    def _run(self) -> tuple[tuple[Tensor, ...], Tensor]:
        if torch.is_grad_enabled():
            for tensor in self._coming or ():
                tensor.requires_grad_(True)
        return self._piece(self._coming)

    def backward(self, gradients: tuple[Tensor | None, ...]) -> PieceInputs | None:
        """The gradients of what came in, given those of `ends`."""
        ends = self._ends
        if ends is None:
            with torch.enable_grad():
                ends, _ = self._run()
        pairs = [
            (end, gradient)
            for end, gradient in zip(ends, gradients, strict=True)
            if gradient is not None and end.requires_grad
        ]
        self._ends = None
        torch.autograd.backward([end for end, _ in pairs], [gradient for _, gradient in pairs])
        if self._coming is None:
            return None
        found = (zero_where_none(tensor) for tensor in self._coming)
        return PieceInputs(*found)


def zero_where_none(tensor: Tensor) -> Tensor:
    """Its gradient, which it gives up."""
    gradient = tensor.grad
    tensor.grad = None
    return torch.zeros_like(tensor) if gradient is None else gradient
