"""The tiers of isolation for code that the model wrote; each contains more than the one before."""

from __future__ import annotations

from collections.abc import Sequence

RUNNER = "runner"
ORDER = ("none", "landlock", "bwrap", "cgroup", RUNNER)
TRYING = "trying"  # in place of its tiers, of a host that still finds out
MEANING = {
    "none": "none",
    "landlock": "Landlock + seccomp",
    "bwrap": "bwrap + seccomp + rlimits",
    "cgroup": "bwrap + seccomp + cgroup",
    "runner": "a container for each call",
}


def suffices(found: str, demanded: str) -> bool:
    """Whether tier `found` contains at least as much as tier `demanded`; ValueError for an unknown
    tier.
    """
    return ORDER.index(found) >= ORDER.index(demanded)


def contains(tiers: Sequence[str], demanded: str) -> bool:
    """Whether a host with these tiers contains as much as a job demands. It has the best of its
    own, and `runner` where gVisor's works: that one for jobs which name it alone.
    """
    if demanded == RUNNER:
        return RUNNER in tiers
    own = [tier for tier in tiers if tier in ORDER and tier != RUNNER]
    return any(suffices(tier, demanded) for tier in own)
