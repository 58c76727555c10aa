"""Tiers of isolation for the model's code, in ascending strength."""

from __future__ import annotations

from collections.abc import Sequence

RUNNER = "runner"
TIER_ORDER = ("none", "landlock", "bwrap", "cgroup", RUNNER)
PROBING = "trying"  # reported instead of its tiers by a host that is still probing
TIER_DESCRIPTIONS = {
    "none": "none",
    "landlock": "Landlock + seccomp",
    "bwrap": "bwrap + seccomp + rlimits",
    "cgroup": "bwrap + seccomp + cgroup",
    "runner": "a container for each call",
}


def is_sufficient(tier: str, required: str) -> bool:
    """Return True if `tier` isolates at least as well as `required`; ValueError if unknown."""
    return TIER_ORDER.index(tier) >= TIER_ORDER.index(required)


def has_sufficient_tier(tiers: Sequence[str], required: str) -> bool:
    """Return True if a host with these tiers isolates as well as a job requires.

    A host has its best own tier, and `runner` if gVisor's works, which counts only for jobs that
    name it.
    """
    if required == RUNNER:
        return RUNNER in tiers
    own = [tier for tier in tiers if tier in TIER_ORDER and tier != RUNNER]
    return any(is_sufficient(tier, required) for tier in own)
