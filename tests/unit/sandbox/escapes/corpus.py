"""The corpus by family, and what of it is not contained yet."""

from __future__ import annotations

from tests.unit.sandbox.escapes import (
    channels,
    cpu,
    files,
    identity,
    kernel,
    memory,
    network,
    output,
    processes,
)
from tests.unit.sandbox.escapes.program import Escape, Left, Pair

FAMILIES: dict[str, list[Escape | Pair | Left]] = {
    "network": [*network.NETWORK],
    "files": [*files.FILESYSTEM, *files.PROC],
    "processes": [*processes.PROCESSES, *processes.SIGNALS],
    "memory": [*memory.MEMORY],
    "output": [*output.OUTPUT],
    "kernel": [*kernel.NAMESPACES, *kernel.KERNEL],
    "cpu": [*cpu.TIME, *cpu.LEFT],
    "identity": [*identity.IDENTITY],
    "channels": [*channels.CHANNELS],
}

EVERYWHERE = ("cgroup", "bwrap", "landlock")
WITHOUT_GROUPS = ("bwrap", "landlock")
_OPEN: dict[tuple[str, ...], dict[str, str]] = {
    EVERYWHERE: {
        "tests forging": "lies by methods (python)",
    },
    WITHOUT_GROUPS: {
        "memory": "shared maps that children keep",
    },
}


def is_open(tier: str, family: str, name: str) -> bool:
    """Whether it is known that a program escapes in that tier."""
    return any(
        tier in tiers and name in families.get(family, "").split("|")
        for tiers, families in _OPEN.items()
    )
