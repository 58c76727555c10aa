"""Resources of processes before and after a flood: memory, descriptors, threads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import psutil

MIB = 1 << 20


@dataclass(frozen=True)
class Reading:
    name: str
    rss: int  # bytes
    descriptors: int
    threads: int


Readings = dict[int, Reading]  # by pid


def read(processes: Iterable[psutil.Process]) -> Readings:
    found: Readings = {}
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess), process.oneshot():
            found[process.pid] = Reading(
                named(process),
                process.memory_info().rss,
                process.num_fds(),
                process.num_threads(),
            )
    return found


def named(process: psutil.Process) -> str:
    """Return a short name of a process's program."""
    words: list[str] = process.cmdline()
    for word in words:
        if word.startswith("meshrl."):
            return word
    return " ".join(words)[-60:].strip() or str(process.name())


@dataclass(frozen=True)
class Growth:
    """Growth of the process that grew most between two readings; `gone`: processes that have
    exited.
    """

    rss_mib: float
    rss_of: str
    descriptors: int
    descriptors_of: str
    threads: int
    gone: tuple[str, ...]

    def figures(self) -> dict[str, Any]:
        return {
            "grew_mib": self.rss_mib,
            "grew_mib_of": self.rss_of,
            "grew_descriptors": self.descriptors,
            "grew_descriptors_of": self.descriptors_of,
            "grew_threads": self.threads,
            "gone": list(self.gone),
        }


def between(before: Readings, after: Readings) -> Growth:
    """Return the growth of processes in both readings; ValueError if there is none."""
    both = [(before[pid], after[pid]) for pid in before if pid in after]
    memory = max(both, key=lambda pair: pair[1].rss - pair[0].rss)
    opened = max(both, key=lambda pair: pair[1].descriptors - pair[0].descriptors)
    return Growth(
        round((memory[1].rss - memory[0].rss) / MIB, 1),
        memory[0].name,
        opened[1].descriptors - opened[0].descriptors,
        opened[0].name,
        max(new.threads - old.threads for old, new in both),
        tuple(sorted(before[pid].name for pid in before if pid not in after)),
    )
