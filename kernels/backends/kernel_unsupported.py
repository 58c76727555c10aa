"""The exception by which an implementation hands over to the reference."""

from __future__ import annotations

import torch
from torch import Tensor


class KernelUnsupported(Exception):
    """This implementation does not take these tensors.

    `reason` says what this machine lacks; it is empty where only these tensors do not fit.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


def require_contiguous(*tensors: Tensor) -> None:
    """Declined for a tensor that is written in place, or too large to copy, and not contiguous."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise KernelUnsupported


def bfloat16_flag(tensor: Tensor) -> int:
    """1 of a bfloat16 tensor, 0 of a float32 one, as the libraries are told."""
    return int(tensor.dtype == torch.bfloat16)
