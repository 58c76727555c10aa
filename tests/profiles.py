"""Profiles of one kind of instance, as tests write them."""

from __future__ import annotations

from meshrl.common.state.pool.demand.profiles import (
    FunctionProfile,
    Profile,
    ProfileKey,
    TimeStatistics,
)

KEY = ProfileKey("engine", "llama 2x64 100", "grpo", "abcdef0123456789", 320, "cpu", 1)


def make_profile(*seconds: float, function: str = "generate", **bytes_by_kind: int) -> Profile:
    """Return the profile of pieces of one function that took so many seconds each."""
    durations = TimeStatistics()
    for one in seconds:
        durations.add(one)
    return {function: FunctionProfile(durations, bytes_by_kind=bytes_by_kind)}
