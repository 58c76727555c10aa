"""From logits to tokens: inverse transform of one uniform number a row."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def sample(
    logits: Tensor, temperature: NDArray[np.float32], uniforms: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """(tokens, log-probabilities) [n] of logits [n, vocab] divided by their rows' temperatures.

    The token is the first whose cumulative probability exceeds the row's uniform number; rows of
    temperature 0 take the largest logit instead, with its log-probability at temperature 1.
    """
    logits = logits.float()
    if (temperature == 1).all():
        probabilities = logits.softmax(-1)
        chosen = _inverse_transform(probabilities, uniforms)
    else:
        greedy = temperature == 0
        divisor = _column(np.where(greedy, np.float32(1), temperature), logits)
        probabilities = (logits / divisor).softmax(-1)
        chosen = logits.argmax(-1, keepdim=True)
        if not greedy.all():
            drawn = _inverse_transform(probabilities, uniforms)
            chosen = torch.where(_column(greedy, logits), chosen, drawn)
    logprobs = probabilities.gather(1, chosen).log()
    return chosen.squeeze(1).cpu().numpy(), logprobs.squeeze(1).cpu().numpy()


def _inverse_transform(probabilities: Tensor, uniforms: NDArray[np.float64]) -> Tensor:
    # float64: over a large vocabulary a float32 sum would give its last tokens nothing
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    heights = _column(uniforms, probabilities) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, heights, right=True)


def _column(values: NDArray[np.generic], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device).unsqueeze(1)
