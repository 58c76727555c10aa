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
    greedy = temperature == 0
    if (temperature != 1).any():
        divisor = torch.from_numpy(np.where(greedy, np.float32(1), temperature))
        logits = logits / divisor.to(logits.device).unsqueeze(1)
    probabilities = logits.softmax(-1)
    if greedy.all():
        chosen = logits.argmax(-1, keepdim=True)
    else:
        # float64: over a large vocabulary a float32 sum would give its last tokens nothing
        cumulative = probabilities.cumsum(-1, dtype=torch.float64)
        heights = torch.from_numpy(uniforms).to(logits.device).unsqueeze(1) * cumulative[:, -1:]
        chosen = torch.searchsorted(cumulative, heights, right=True)
        if greedy.any():
            largest = logits.argmax(-1, keepdim=True)
            rows = torch.from_numpy(greedy).to(logits.device).unsqueeze(1)
            chosen = torch.where(rows, largest, chosen)
    logprobs = probabilities.gather(1, chosen).log()
    return chosen.squeeze(1).cpu().numpy(), logprobs.squeeze(1).cpu().numpy()
