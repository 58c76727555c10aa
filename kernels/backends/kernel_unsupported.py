"""Exception by which an implementation falls back to the reference."""

from __future__ import annotations

import torch
from torch import Tensor


class KernelUnsupported(Exception):
    """Error of an implementation that does not support these tensors.

    `reason` describes what this machine lacks; it is empty if only these tensors do not fit.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


def require_contiguous(*tensors: Tensor) -> None:
    """Raise KernelUnsupported if a tensor is not contiguous.

    It applies to tensors that are written in place or too large to copy.
    """
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise KernelUnsupported


def bfloat16_flag(tensor: Tensor) -> int:
    """Return 1 for a bfloat16 tensor and 0 for a float32 one, the libraries' flag."""
    return int(tensor.dtype == torch.bfloat16)
