"""Decoder split at its MoE layers into the pieces that attention ranks compute.

A piece begins with the expert outputs of one MoE layer and ends with the expert inputs of the next.
Autograd is cut there. The experts return the gradient of their inputs, and the following piece that
of the routing. One backward pass of the piece takes both, so that each weight is traversed once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

from meshrl.common.model.network.decoder import Decoder, MoeDecoderLayer
from meshrl.services.trainer.models.forward import DeviceBin


class PieceOutputs(NamedTuple):
    """Outputs of a piece, for n tokens."""

    residual: Tensor  # [n, hidden_size]
    routing_weights: Tensor  # [n, k], weights of the chosen experts' outputs
    expert_inputs: Tensor  # [n, hidden_size]
    balance_loss: Tensor  # scalar, see `meshrl.common.model.network.moe.RouterOutput`


class PieceInputs(NamedTuple):
    """Inputs of the next piece: leaves of its autograd graph."""

    residual: Tensor
    routing_weights: Tensor
    expert_outputs: Tensor  # [n, k, hidden_size]


class DecoderPieces:
    """Pieces of a model, one more than its MoE layers; the last returns hidden states."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self.moe_layers = list(model.config.sparse_layers)
        self.hidden_size = model.config.hidden_size  # of a row
        self.dtype = model.final_norm.dtype  # of passes

    def run_first(self, device_bin: DeviceBin) -> tuple[PieceOutputs, Tensor]:
        """Run piece 0 of a bin; return its outputs and the experts [n, k] of its tokens."""
        return self._run_to_experts(
            0, device_bin, embedding(device_bin.tokens, self._model.embedding)
        )

    def run_next(
        self, number: int, device_bin: DeviceBin, inputs: PieceInputs
    ) -> tuple[PieceOutputs, Tensor]:
        """Run a piece that is neither the first nor the last."""
        return self._run_to_experts(number, device_bin, self._combine_experts(number, inputs))

    def run_last(self, device_bin: DeviceBin, inputs: PieceInputs) -> Tensor:
        """Run the last piece; return normalised hidden states [n, hidden_size]."""
        model = self._model
        hidden = self._combine_experts(len(self.moe_layers), inputs)
        hidden = self._run_dense_layers(
            device_bin, hidden, self.moe_layers[-1] + 1, model.config.num_layers
        )
        return model.pointwise.rms_norm(hidden, model.final_norm, model.config.norm_eps)

    def _combine_experts(self, number: int, inputs: PieceInputs) -> Tensor:
        experts = self.get_moe_layer(number - 1).experts
        return inputs.residual + experts.combine(inputs.routing_weights, inputs.expert_outputs)

    def _run_to_experts(
        self, number: int, device_bin: DeviceBin, hidden: Tensor
    ) -> tuple[PieceOutputs, Tensor]:
        index = self.moe_layers[number]
        begin = self.moe_layers[number - 1] + 1 if number else 0
        hidden = self._run_dense_layers(device_bin, hidden, begin, index)
        layer, model = self.get_moe_layer(number), self._model
        cos, sin = model.lookup_rotations(device_bin.positions)(index)
        hidden = layer.attend(hidden, cos, sin, index, device_bin.attention)
        x = model.pointwise.rms_norm(hidden, layer.mlp_norm, model.config.norm_eps)
        sent = device_bin.expert_ids[..., number, :] if device_bin.expert_ids is not None else None
        chosen = layer.experts.route(x, sent, device_bin.loss_mask)
        if model.config.shared_expert_ffn_size:
            hidden = hidden + layer.experts.compute_shared_expert(x)
        return PieceOutputs(hidden, chosen.expert_weights, x, chosen.balance_loss), chosen.experts

    def _run_dense_layers(
        self, device_bin: DeviceBin, hidden: Tensor, begin: int, end: int
    ) -> Tensor:
        rotation = self._model.lookup_rotations(device_bin.positions)
        for index in range(begin, end):
            cos, sin = rotation(index)
            hidden = self._model.layers[index](hidden, cos, sin, index, device_bin.attention)
        return hidden

    def get_moe_layer(self, moe_layer: int) -> MoeDecoderLayer:
        """Return the layer at this index among the MoE layers."""
        found = self._model.layers[self.moe_layers[moe_layer]]
        assert isinstance(found, MoeDecoderLayer)
        return found


class PiecePass:
    """Pass of a piece over one bin: forward now, backward later, or recomputed from its inputs."""

    def __init__(
        self,
        piece: Callable[[PieceInputs | None], tuple[tuple[Tensor, ...], Tensor]],
        inputs: PieceInputs | None,
        recompute: bool,
    ) -> None:
        """Run the forward pass; `piece` returns differentiable outputs, and one without
        gradient.
        """
        self._piece, self._recompute = piece, recompute
        self._inputs = None if inputs is None else PieceInputs(*(t.detach() for t in inputs))
        with torch.set_grad_enabled(not recompute):
            ends, self.expert_ids = self._run()
        self.outputs = tuple(tensor.detach() for tensor in ends)
        self._graph_outputs: tuple[Tensor, ...] | None = None if recompute else ends

    def _run(self) -> tuple[tuple[Tensor, ...], Tensor]:
        if torch.is_grad_enabled():
            for tensor in self._inputs or ():
                tensor.requires_grad_(True)
        return self._piece(self._inputs)

    def backward(self, gradients: tuple[Tensor | None, ...]) -> PieceInputs | None:
        """Return the gradients of the piece's inputs, given those of `outputs`."""
        ends = self._graph_outputs
        if ends is None:
            with torch.enable_grad():
                ends, _ = self._run()
        pairs = [
            (end, gradient)
            for end, gradient in zip(ends, gradients, strict=True)
            if gradient is not None and end.requires_grad
        ]
        self._graph_outputs = None
        torch.autograd.backward([end for end, _ in pairs], [gradient for _, gradient in pairs])
        if self._inputs is None:
            return None
        found = (take_gradient(tensor) for tensor in self._inputs)
        return PieceInputs(*found)


def take_gradient(tensor: Tensor) -> Tensor:
    """Return the gradient of a tensor and clear it."""
    gradient = tensor.grad
    tensor.grad = None
    return torch.zeros_like(tensor) if gradient is None else gradient
