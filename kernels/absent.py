"""Logits of ids without a token: minus infinity."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Ranges = Sequence[tuple[int, int]]  # [first, end) of ids, ascending, apart


def hide(logits: Tensor, absent: Ranges, first: int = 0) -> Tensor:
    """Set the logits of `absent` ids to minus infinity, in place, and return them.

    logits [.., n] are those of the ids [first, first + n).
    """
    end = first + logits.shape[-1]
    for begin, behind in absent:
        if begin < end and behind > first:
            logits[..., max(begin - first, 0) : behind - first] = -torch.inf
    return logits
