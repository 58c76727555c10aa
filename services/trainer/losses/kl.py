"""KL terms: estimates of the policy's divergence from a reference, after Schulman
(joschu.net/blog/kl-approx.html).

Of one sampled token, with d = log-probability under the policy - under the reference: k1 = d, k2 =
d^2 / 2, k3 = exp(-d) - 1 + d. In the reward all of them estimate the divergence. In the loss only
k2 has the gradient of the divergence in expectation; k3's is that of the forward divergence, and
k1's is zero, so that k1 belongs in the reward (Tang and Munos 2025, arXiv 2506.09477).

Beyond a reference probability of exp(20) times the policy's, k3 continues as its tangent there. So
it stays finite, and its gradient still points back to the reference.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshrl.services.trainer.losses.terms import MAX_LOG_RATIO

MAX_K3_SLOPE = math.exp(MAX_LOG_RATIO)  # k3's largest slope


def estimate_kl(kind: str, logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return the estimates [t], with a gradient to `logprobs`."""
    difference = logprobs - reference
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    near = torch.exp(-difference.clamp(min=-MAX_LOG_RATIO))
    beyond = torch.relu(-difference - MAX_LOG_RATIO)
    return near + MAX_K3_SLOPE * beyond - 1 + difference


def estimate_kl_numpy(
    kind: str, logprobs: NDArray[np.floating], reference: NDArray[np.floating]
) -> NDArray[np.float64]:
    """Return the estimates of `estimate_kl` for numpy arrays."""
    difference = np.asarray(logprobs, np.float64) - reference
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference**2 / 2
    near = np.exp(-np.maximum(difference, -MAX_LOG_RATIO))
    beyond = np.maximum(-difference - MAX_LOG_RATIO, 0.0)
    found: NDArray[np.float64] = near + MAX_K3_SLOPE * beyond - 1 + difference
    return found
