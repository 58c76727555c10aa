"""Sums what a run has used, over all incarnations of its processes and all its sessions.

A process that dies takes its counters with it, so the last value seen of each (name, pid, start) is
kept, and the whole tally is kept in the run directory: a resumed run goes on counting.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from meshrl.launch.places import read_json, write_json

TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Tally:
    """Sums by process name; `cpu` and `tokens` map name -> {incarnation: last value seen}."""

    cpu: dict[str, dict[str, float]] = field(default_factory=dict)
    tokens: dict[str, dict[str, float]] = field(default_factory=dict)
    wall_s: float = 0.0  # wall time of earlier sessions
    warm_start_cached: bool = False
    _own_names: dict[str, str] = field(default_factory=dict)  # incarnation -> name

    @classmethod
    def read(cls, path: Path) -> Tally:
        if not path.is_file():
            return cls()
        held = read_json(path)
        return cls(held["cpu"], held["tokens"], held["wall_s"], held["warm_start_cached"])

    def write(self, path: Path, wall_s: float) -> None:
        """Keeps the tally, with the wall time of this session added."""
        content = {
            "cpu": self.cpu,
            "tokens": self.tokens,
            "wall_s": self.wall_s + wall_s,
            "warm_start_cached": self.warm_start_cached,
        }
        write_json(path, content, durable=False)  # it is written every other second

    def see_tokens(self, name: str, incarnation: str, tokens: float) -> None:
        seen = self.tokens.setdefault(name, {})
        seen[incarnation] = max(tokens, seen.get(incarnation, 0.0))

    def see_processes(self, names: dict[int, str], roots: Iterable[int]) -> None:
        """Reads the CPU time of `roots` and all below them; `names` are those with a name.

        A process without one counts for the nearest ancestor that has one. One that gets its name
        later, when it has started, takes along what it used until then, and keeps it.
        """
        holders = {key: name for name, seen in self.cpu.items() for key in seen}
        own = self._own_names
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
                own[key] = names[pid]
            name = own.get(key, name)
            before = self.cpu.get(holders.get(key, name), {}).pop(key, 0.0)
            self.cpu.setdefault(name, {})[key] = max(cpu_s, before)
            pending += [(child, names.get(child, name)) for child in children(pid)]

    def cpu_by_name(self) -> dict[str, float]:
        return {name: round(sum(seen.values()), 2) for name, seen in sorted(self.cpu.items())}

    def total_tokens(self, prefix: str) -> int:
        sums = (sum(s.values()) for name, s in self.tokens.items() if name.startswith(prefix))
        return int(sum(sums))


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
