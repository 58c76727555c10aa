"""The tiers of isolation for code that the model wrote; each contains more than the one before."""

from __future__ import annotations

from collections.abc import Sequence

RUNNER = "runner"
TIER_ORDER = ("none", "landlock", "bwrap", "cgroup", RUNNER)
PROBING = "trying"  # in place of its tiers, of a host that still finds out
TIER_DESCRIPTIONS = {
    "none": "none",
    "landlock": "Landlock + seccomp",
    "bwrap": "bwrap + seccomp + rlimits",
    "cgroup": "bwrap + seccomp + cgroup",
    "runner": "a container for each call",
}


def is_sufficient(tier: str, required: str) -> bool:
    """Whether `tier` contains at least as much as tier `required`; ValueError for an unknown
    tier.
    """
    return TIER_ORDER.index(tier) >= TIER_ORDER.index(required)


def has_sufficient_tier(tiers: Sequence[str], required: str) -> bool:
    """Whether a host with these tiers contains as much as a job demands. It has the best of its
    own, and `runner` where gVisor's works: that one for jobs which name it alone.
    """
    if required == RUNNER:
        return RUNNER in tiers
    own = [tier for tier in tiers if tier in TIER_ORDER and tier != RUNNER]
    return any(is_sufficient(tier, required) for tier in own)
