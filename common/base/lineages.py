"""Lineages of weight versions: when a lineage is abandoned, its successor uses the same version
numbers for other weights.

A group that was under way when the lineage ended at a version keeps that as its `foreign_above`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SINGLE_LINEAGE = -1  # `foreign_above` of what was sampled in one lineage


def clamp_versions(versions: NDArray[np.int32], foreign_above: int) -> NDArray[np.int32]:
    """The versions, int32 [n], by which tokens' staleness is counted: tokens of an abandoned
    lineage count as old as the version at which it ended.
    """
    return versions if foreign_above == SINGLE_LINEAGE else np.minimum(versions, foreign_above)


def is_foreign(version: int, foreign_above: int) -> bool:
    """Whether `version` may name other weights than those that the current lineage gave that
    number.
    """
    return SINGLE_LINEAGE < foreign_above < version
