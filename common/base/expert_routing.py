"""Expert routing: the experts of each token in an MoE model.

Arrays are [tokens, sparse layers x experts per token], with consecutive layers in each row.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

UNKNOWN_EXPERT = -1  # expert that was not recorded
NO_EXPERTS: NDArray[np.int16] = np.zeros((0, 0), np.int16)  # for tokens of a dense model


def concatenate_experts(parts: Iterable[tuple[NDArray[np.int16], int]]) -> NDArray[np.int16]:
    """Concatenate the parts' (experts, number of tokens) in order.

    Parts without experts are UNKNOWN_EXPERT; the result is NO_EXPERTS if no part has any. Raises
    ValueError for models of different shapes.
    """
    every = list(parts)
    width = max((experts.shape[1] for experts, _ in every), default=0)
    if not width:
        return NO_EXPERTS
    return np.concatenate(
        [e if e.shape[1] else np.full((n, width), UNKNOWN_EXPERT, np.int16) for e, n in every]
    )
