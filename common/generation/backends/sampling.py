"""Sampling of tokens from logits, by the inverse transform of one uniform number per row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshrl.common.generation.backends.logit_adjustments import adjust_logits
from meshrl.common.generation.batch.slots import Slots
from meshrl.common.generation.batch.step_compute import SlotIndices
from meshrl.common.generation.counter_rng import draw_uniforms
from meshrl.kernels.ops import token_logprob


@dataclass(frozen=True, slots=True)
class RowSamplingParams:
    """Sampling parameters of n rows."""

    temperature: NDArray[np.float32]  # 0: greedy
    top_p: NDArray[np.float32]  # 1: all
    top_k: NDArray[np.int64]  # 0: all
    min_p: NDArray[np.float32]  # 0: all

    @property
    def has_filters(self) -> bool:
        """True if any row filters tokens out."""
        return bool((self.top_p < 1).any() or self.top_k.any() or self.min_p.any())


def sample_slots(
    state: Slots, slots: SlotIndices, logits: Tensor, experts: Tensor | None = None
) -> None:
    """Sample the next token of each of `slots` from float32 logits [n, vocab].

    `experts` [n, sparse layers, k]: routing of the preceding tokens, in a mixture of experts.
    """
    how = RowSamplingParams(
        state.temperature[slots], state.top_p[slots], state.top_k[slots], state.min_p[slots]
    )
    drawn = draw_uniforms(state.rng_key[slots], state.num_tokens[slots])
    tokens, logprobs = sample_tokens(adjust_logits(state, slots, logits), how, drawn)
    wants_raw = state.wants_raw_logprobs[slots]
    plain = logprobs
    if wants_raw.any():
        plain = np.where(wants_raw, compute_raw_logprobs(logits, tokens), np.float32(np.nan))
    if experts is None:
        return state.append_sampled(slots, tokens, logprobs, plain)
    went = experts.flatten(1).to(torch.int16).cpu().numpy()
    state.append_sampled(slots, tokens, logprobs, plain, went)


def sample_tokens(
    logits: Tensor, params: RowSamplingParams, uniforms: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Sample a token of each row of float32 logits [n, vocab], divided by the row's temperature.

    Return (tokens, log-probabilities), each [n]. The token is the first whose cumulative
    probability exceeds the row's uniform number. Rows of temperature 0 take the largest logit, with
    its log-probability at temperature 1.
    """
    temperature = params.temperature
    if (temperature == 1).all() and not params.has_filters:
        probabilities = logits.softmax(-1)
        chosen = _sample_by_inverse_transform(probabilities, uniforms)
    else:
        greedy = temperature == 0
        divisor = _to_column(np.where(greedy, np.float32(1), temperature), logits)
        probabilities = (logits / divisor).softmax(-1)
        if params.has_filters:
            keep_mask = _filter_tokens(probabilities, params) | _to_column(greedy, logits)
            probabilities = torch.where(keep_mask, probabilities, 0)
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        chosen = logits.argmax(-1, keepdim=True)
        if not greedy.all():
            likely = _sample_by_inverse_transform(probabilities, uniforms)
            chosen = torch.where(_to_column(greedy, logits), chosen, likely)
    logprobs = probabilities.gather(1, chosen).log()
    return chosen.squeeze(1).cpu().numpy(), logprobs.squeeze(1).cpu().numpy()


def compute_raw_logprobs(logits: Tensor, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return log-probabilities [n] of `tokens` at temperature 1 without filtering."""
    chosen = torch.from_numpy(tokens).to(logits.device)
    heat = torch.ones(len(tokens), device=logits.device)
    found: NDArray[np.float32] = token_logprob(logits.contiguous(), chosen, heat).cpu().numpy()
    return found


def _filter_tokens(probabilities: Tensor, params: RowSamplingParams) -> Tensor:
    """Return the mask of tokens that pass top-k, then top-p, then min-p.

    The order is that of transformers' warpers: top-p applies to the tokens left by top-k, min-p is
    relative to the likeliest token. Ties are ordered by id.
    """
    ordered, order = probabilities.double().sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    vocab = ordered.shape[1]
    most = _to_column(np.where(params.top_k > 0, params.top_k, vocab), ordered)
    ordered = torch.where(rank < most, ordered, 0)
    before = ordered.cumsum(-1) - ordered
    keep_mask = before < _to_column(params.top_p, ordered).double() * ordered.sum(-1, keepdim=True)
    keep_mask &= ordered >= _to_column(params.min_p, ordered).double() * ordered[:, :1]
    keep_mask &= ordered > 0
    keep_mask[:, 0] = True
    return torch.zeros_like(keep_mask).scatter_(1, order, keep_mask)


def _sample_by_inverse_transform(probabilities: Tensor, uniforms: NDArray[np.float64]) -> Tensor:
    # float64: over a large vocabulary, a float32 sum would give the last tokens probability 0
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    heights = _to_column(uniforms, probabilities) * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, heights, right=True)
    # NaN compares larger than all numbers: its token stays in the vocabulary, its logprob is NaN.
    return found.clamp_(max=probabilities.shape[1] - 1)


def _to_column(values: NDArray[np.generic], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device).unsqueeze(1)
