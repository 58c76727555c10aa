"""CPU usage of the processes of a mesh, read once for all readers."""

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
    """CPU time of one process alone, with the name that it counts under."""

    key: str  # pid and start: one process, even after the pid was reused
    name: str
    cpu_s: float


def parse_job(name: str) -> str:
    """Return the job in a process's name; empty for one that serves several, or an instance."""
    kind, _, rest = name.partition("/")
    if kind in KINDS_BY_JOB:
        return rest
    if kind in KINDS_BY_NUMBER and "/" in rest:
        return rest.rpartition("/")[0]
    return ""


def find_owner_job(entry: RegistryEntry) -> str:
    """Return the job that a process works for alone; empty for one that serves several."""
    if entry.kind in KINDS_BY_INSTANCE:
        return str(entry.stats.get("job", ""))
    return parse_job(entry.name)


def map_process_names(entries: Sequence[RegistryEntry]) -> dict[int, str]:
    """Return names by pid: processes of the mesh; environment processes get their shard's name."""
    alive = [entry for entry in entries if entry.alive]
    served = {pid: e.name for e in alive for pid in e.stats.get("environments", {}).values()}
    return served | {entry.pid: entry.name for entry in alive}


class CpuMeter:
    """Meter of the CPU time of processes. A process keeps its name when its lease has lapsed."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # by key, for processes with a name of their own

    def read(self, names: Mapping[int, str], roots: Iterable[int]) -> list[ProcessCpuTime]:
        """Return the CPU time of `roots` and all their descendants.

        A process without a name counts for the nearest ancestor that has one.
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
    """Return (start in clock ticks since boot, CPU seconds without children); None if it has
    exited.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return int(fields[19]), (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def list_children(pid: int) -> list[int]:
    """Return pids of the children that any thread of a process has started."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    except OSError:  # the process ended during the read
        return found
    return found
