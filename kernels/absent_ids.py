"""Masking of the logits of ids without a token: minus infinity."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

IdRanges = Sequence[tuple[int, int]]  # ranges [first, end) of ids, ascending, disjoint


def mask_absent_logits(logits: Tensor, absent_ids: IdRanges, first_id: int = 0) -> Tensor:
    """Set the logits of `absent_ids` to minus infinity, in place, and return them.

    The logits [.., n] are those of the ids [first_id, first_id + n).
    """
    end = first_id + logits.shape[-1]
    for begin, behind in absent_ids:
        if begin < end and behind > first_id:
            logits[..., max(begin - first_id, 0) : behind - first_id] = -torch.inf
    return logits
