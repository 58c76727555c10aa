"""Reads what the processes of a mesh have used, once for all who want to know."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshrl.common.state.registry import Entry

TICKS = os.sysconf("SC_CLK_TCK")
BY_JOB = ("trainer", "scoring")  # KIND/JOB
BY_NUMBER = ("rank", "rollout", "sandbox")  # KIND/JOB/NUMBER
BY_RESIDENT = ("engine", "hybrid")  # KIND/RESIDENT


@dataclass(frozen=True, slots=True)
class Used:
    """A process, by the name that it counts under, and the CPU time of it alone."""

    key: str  # pid and start: one process, even after the pid was reused
    name: str
    cpu_s: float


def job_in(name: str) -> str:
    """The job that a process's name tells; empty for one that serves several, or a resident."""
    kind, _, rest = name.partition("/")
    if kind in BY_JOB:
        return rest
    if kind in BY_NUMBER and "/" in rest:
        return rest.rpartition("/")[0]
    return ""


def owner(entry: Entry) -> str:
    """The job that a process works for alone; empty for one that serves several."""
    if entry.kind in BY_RESIDENT:
        return str(entry.stats.get("job", ""))
    return job_in(entry.name)


def names_of(entries: Sequence[Entry]) -> dict[int, str]:
    """By pid: processes of the mesh, and environment processes as the shard that they are of."""
    alive = [entry for entry in entries if entry.alive]
    served = {pid: e.name for e in alive for pid in e.stats.get("environments", {}).values()}
    return served | {entry.pid: entry.name for entry in alive}


class Meter:
    """Reads the CPU time of processes. One that had a name keeps it when its lease has lapsed."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # by key, of those that had one of their own

    def read(self, names: Mapping[int, str], roots: Iterable[int]) -> list[Used]:
        """What `roots` and all below them have used; a process without a name counts for the
        nearest ancestor that has one.
        """
        found: list[Used] = []
        pending = [(pid, names.get(pid, "meshrl")) for pid in roots]
        visited: set[int] = set()
        while pending:
            pid, name = pending.pop()
            if pid in visited or (stat := process_stat(pid)) is None:
                continue
            visited.add(pid)
            start, cpu_s = stat
            key = f"{pid}-{start}"
            if pid in names:
                self._names[key] = names[pid]
            name = self._names.get(key, name)
            found.append(Used(key, name, cpu_s))
            pending += [(child, names.get(child, name)) for child in children(pid)]
        return found


def process_stat(pid: int) -> tuple[int, float] | None:
    """(start in clock ticks since boot, CPU seconds without children); None when it has gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return int(fields[19]), (int(fields[11]) + int(fields[12])) / TICKS


def children(pid: int) -> list[int]:
    """Pids of the children that any thread of a process has started."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    except OSError:  # it ended while we looked
        return found
    return found
