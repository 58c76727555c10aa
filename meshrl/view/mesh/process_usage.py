"""Reads what the processes of a mesh have used, once for all who want to know."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshrl.common.state.registry import RegistryEntry

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
KINDS_BY_JOB = ("trainer", "scoring")  # KIND/JOB
KINDS_BY_NUMBER = ("rank", "rollout", "sandbox")  # KIND/JOB/NUMBER
KINDS_BY_INSTANCE = ("engine", "hybrid")  # KIND/RESIDENT


@dataclass(frozen=True, slots=True)
class ProcessCpuTime:
    """A process, by the name that it counts under, and the CPU time of it alone."""

    key: str  # pid and start: one process, even after the pid was reused
    name: str
    cpu_s: float


def parse_job(name: str) -> str:
    """The job that a process's name tells; empty for one that serves several, or a resident."""
    kind, _, rest = name.partition("/")
    if kind in KINDS_BY_JOB:
        return rest
    if kind in KINDS_BY_NUMBER and "/" in rest:
        return rest.rpartition("/")[0]
    return ""


def find_owner_job(entry: RegistryEntry) -> str:
    """The job that a process works for alone; empty for one that serves several."""
    if entry.kind in KINDS_BY_INSTANCE:
        return str(entry.stats.get("job", ""))
    return parse_job(entry.name)


def map_process_names(entries: Sequence[RegistryEntry]) -> dict[int, str]:
    """By pid: processes of the mesh, and environment processes as the shard that they are of."""
    alive = [entry for entry in entries if entry.alive]
    served = {pid: e.name for e in alive for pid in e.stats.get("environments", {}).values()}
    return served | {entry.pid: entry.name for entry in alive}


class CpuMeter:
    """Reads the CPU time of processes. One that had a name keeps it when its lease has lapsed."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # by key, of those that had one of their own

    def read(self, names: Mapping[int, str], roots: Iterable[int]) -> list[ProcessCpuTime]:
        """What `roots` and all below them have used; a process without a name counts for the
        nearest ancestor that has one.
        """
        found: list[ProcessCpuTime] = []
        pending = [(pid, names.get(pid, "meshrl")) for pid in roots]
        visited: set[int] = set()
        while pending:
            pid, name = pending.pop()
            if pid in visited or (stat := read_process_stat(pid)) is None:
                continue
            visited.add(pid)
            start, cpu_s = stat
            key = f"{pid}-{start}"
            if pid in names:
                self._names[key] = names[pid]
            name = self._names.get(key, name)
            found.append(ProcessCpuTime(key, name, cpu_s))
            pending += [(child, names.get(child, name)) for child in list_children(pid)]
        return found


def read_process_stat(pid: int) -> tuple[int, float] | None:
    """(start in clock ticks since boot, CPU seconds without children); None when it has gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return int(fields[19]), (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def list_children(pid: int) -> list[int]:
    """Pids of the children that any thread of a process has started."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    except OSError:  # it ended while we looked
        return found
    return found
