"""Lineages of weight versions: the successor of an abandoned lineage reuses its version numbers for
other weights.

A group in progress when the lineage ended at a version keeps that version as its `foreign_above`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SINGLE_LINEAGE = -1  # `foreign_above` of tokens from one lineage


def clamp_versions(versions: NDArray[np.int32], foreign_above: int) -> NDArray[np.int32]:
    """Return the versions, int32 [n], for tokens' staleness.

    Tokens of an abandoned lineage count as old as the version at which it ended.
    """
    return versions if foreign_above == SINGLE_LINEAGE else np.minimum(versions, foreign_above)


def is_foreign(version: int, foreign_above: int) -> bool:
    """Return True if `version` may have other weights than in the current lineage."""
    return SINGLE_LINEAGE < foreign_above < version
