"""Lineages of weight versions: the successor of an abandoned lineage reuses its version numbers for
other weights.

A group in progress when the lineage ended at a version keeps that version as its `foreign_above`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SINGLE_LINEAGE = -1  # `foreign_above` of tokens from one lineage


def compute_ages(
    versions: NDArray[np.int32], foreign_above: int, trained_version: int
) -> NDArray[np.int32]:
    """Return by how many versions tokens are older than the trained version, int32 [n].

    Tokens of an abandoned lineage count as old as the version at which it ended, and at least as
    one version old: no later step has the weights that sampled them.
    """
    ages = trained_version - versions
    if foreign_above == SINGLE_LINEAGE:
        return ages
    foreign_age = np.int32(max(trained_version - foreign_above, 1))
    return np.where(versions > foreign_above, foreign_age, ages)


def is_foreign(version: int, foreign_above: int) -> bool:
    """Return True if `version` may have other weights than in the current lineage."""
    return SINGLE_LINEAGE < foreign_above < version
