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
        "network": "a name for a pair's end|out of band|a filter of its own on a socket",
        "kernel": "requests to disks|handle of the keeper|handle of itself|pages in the cache"
        "|calls that are younger than the list",
        "memory": "large pages in files|timers and waiting signals",
        "identity": "priority of others|scheduler of others|cores of others"
        "|disk priority of others|handles of others",
        "channels": "datagrams to a name of no file|datagrams to a name that the kernel gave"
        "|locks of shared files|locks of parts of a shared file|locks of a shared file's openings"
        "|watches of shared files|signals from shared directories|room in pipes"
        "|signals that wait|watches that are left|requests to disks that are left"
        "|descriptors on their way",
        "cpu": "a thread|children|daemons|a relay|a timer|a command|the next frame early"
        "|all next frames early|a child that answers for its parent|frames early by a child",
    },
    WITHOUT_GROUPS: {
        "memory": "many files in memory|shared maps that children keep"
        "|children that hold some each",
    },
    ("landlock",): {
        "files": "attributes of the user's files|watch a file of the host"
        "|what is hard to clear away",
        "channels": "numbers of processes and what they are set to",
    },
}


def is_open(tier: str, family: str, name: str) -> bool:
    """Whether it is known that a program escapes in that tier."""
    return any(
        tier in tiers and name in families.get(family, "").split("|")
        for tiers, families in _OPEN.items()
    )
