"""Pointwise operators of a decoder (norms, SwiGLU, heads), by PyTorch's own operators.

The protocol and fused operators for a CPU are in `kernels/ops/pointwise.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from meshrl.kernels.ops.pointwise import NormWeights, PointwiseOps

__all__ = ["TORCH_POINTWISE", "PointwiseOps", "TorchPointwise"]


class TorchPointwise:
    """PyTorch's operators, which run on every device and in every dtype."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return RMSNorm of x [.., n] over its last dimension."""
        return torch.rms_norm(x, weight.shape, weight, eps)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up [.., n] of [.., 2 n], the gate first."""
        gate, up = gate_up.chunk(2, -1)
        return silu(gate) * up

    def split_norm_rotate_heads(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        head_counts: tuple[int, int],
        norms: NormWeights,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split projections into queries, keys and values, with norms and rotation.

        Shapes are as in `PointwiseOps.split_norm_rotate_heads`.
        """
        queries, keys = head_counts
        each = torch.unflatten(qkv, -1, (queries + 2 * keys, cos.shape[-1]))
        qk, v = each.split_with_sizes((queries + keys, keys), -2)
        if norms is not None:
            parts = zip(qk.split_with_sizes(head_counts, -2), norms, strict=True)
            qk = torch.cat([self.rms_norm(part, weight, eps) for part, weight in parts], -2)
        # Of halves (a, b): (a cos - b sin, b cos + a sin); `sin` is signed.
        turned = torch.addcmul(qk * cos, qk.roll(qk.shape[-1] // 2, -1), sin)
        q, k = turned.split_with_sizes(head_counts, -2)
        return q, k, v


TORCH_POINTWISE = TorchPointwise()
