"""Expert routing: where a mixture of experts sent each token, as arrays [tokens, sparse layers x
experts per token], one layer after the other in a row.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

UNKNOWN_EXPERT = -1  # in place of an expert's number: nobody noted it
NO_EXPERTS: NDArray[np.int16] = np.zeros((0, 0), np.int16)  # for tokens of a dense model


def concatenate_experts(parts: Iterable[tuple[NDArray[np.int16], int]]) -> NDArray[np.int16]:
    """The parts' (experts, number of tokens) as one array, in their order: UNKNOWN where a part has
    none, NO_EXPERTS if no part has any. ValueError if models of different shapes made them.
    """
    every = list(parts)
    width = max((experts.shape[1] for experts, _ in every), default=0)
    if not width:
        return NO_EXPERTS
    return np.concatenate(
        [e if e.shape[1] else np.full((n, width), UNKNOWN_EXPERT, np.int16) for e, n in every]
    )
