"""Adjustments of logits before sampling: biases, penalties, and bans of stop tokens.

They depend on the known tokens alone, so a request that continues elsewhere has the same
distribution. The native backend has the same in `kernels/csrc/sampling.h`. As in vLLM, biases come
first, and a repetition penalty (Keskar et al. 2019, arXiv 1909.05858) counts the prompt too.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshrl.common.generation.batch.slots import Slots
from meshrl.common.generation.batch.step_compute import SlotIndices


def adjust_logits(state: Slots, slots: SlotIndices, logits: Tensor) -> Tensor:
    """Return logits [n, vocab] with the adjustments of each slot; `logits` if no slot has any."""
    rows = np.flatnonzero(state.is_adjusted[slots])
    if not len(rows):
        return logits
    own, vocab, device = slots[rows], logits.shape[1], logits.device
    chosen = torch.from_numpy(rows).to(device)
    known = state.num_tokens[own]
    # The further column receives what padding writes.
    wide = torch.nn.functional.pad(logits[chosen], (0, 1))
    biases = torch.from_numpy(state.biases[own]).to(device)
    wide.scatter_add_(1, _to_columns(state.biased_ids[own], vocab, device), biases)
    repetition = torch.from_numpy(state.repetition_penalty[own, None]).to(device)
    if (repetition != 1).any():
        seen = _mark_tokens(state, own, np.zeros_like(known), vocab, device)
        penalized = torch.where(wide > 0, wide / repetition, wide * repetition)
        wide = torch.where(seen, penalized, wide)
    presence = torch.from_numpy(state.presence_penalty[own, None]).to(device)
    if presence.any():
        wide -= _mark_tokens(state, own, state.output_start[own], vocab, device) * presence
    is_too_early = known < state.stop_start[own]
    banned = np.where(is_too_early[:, None], state.stop_ids[own], -1)
    wide.scatter_(1, _to_columns(banned, vocab, device), -torch.inf)
    return logits.index_copy(0, chosen, wide[:, :vocab])


def _mark_tokens(
    state: Slots, slots: SlotIndices, starts: NDArray[np.int64], vocab: int, device: torch.device
) -> Tensor:
    """Return which ids [n, vocab + 1] are among the slots' known tokens from `starts` [n] on."""
    tokens = state.tokens[slots, : int(state.num_tokens[slots].max())]
    columns = np.arange(tokens.shape[1])
    inside = (columns >= starts[:, None]) & (columns < state.num_tokens[slots, None])
    ids = _to_columns(np.where(inside, tokens, -1), vocab, device)
    nothing = torch.zeros(len(slots), vocab + 1, dtype=torch.bool, device=device)
    return nothing.scatter_(1, ids, True)


def _to_columns(ids: NDArray[np.int64], vocab: int, device: torch.device) -> Tensor:
    """Return ids, with column `vocab` for those that the vocabulary lacks."""
    is_token = (ids >= 0) & (ids < vocab)
    return torch.from_numpy(np.where(is_token, ids, vocab)).to(device)
