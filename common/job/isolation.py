"""The tiers of isolation for code that the model wrote; each contains more than the one before."""

from __future__ import annotations

ORDER = ("none", "landlock", "bwrap", "cgroup", "runner")
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
