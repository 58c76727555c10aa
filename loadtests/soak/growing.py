"""Reads what a running mesh holds: memory, descriptors and threads of its processes, keys and bytes
of Redis, bytes of the run's files.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from loadtests.measuring.meter import kind_of
from meshrl.common.state import registry
from meshrl.common.state.redis.client import State

SCAN = 1000  # keys that Redis looks at in one go

Reading = dict[str, float]  # quantity -> value


async def processes(state: State, launcher: int) -> dict[str, Reading]:
    """`name pid` of each process below the launcher -> `rss`, `pss` (bytes), `fds`, `threads`.

    What a sandbox starts for its work is one reading, `sandbox workers`, since it comes and goes.
    """
    names = await _names(state)
    try:
        root = psutil.Process(launcher)
        family = [root, *root.children(recursive=True)]
    except psutil.Error:
        return {}
    found: dict[str, Reading] = {}
    for process in family:
        try:
            name, reading = _name(process, names, launcher), _reading(process)
        except (psutil.Error, OSError):
            continue  # it has ended meanwhile
        key = name if name == WORKERS else f"{name} {process.pid}"
        told = found.setdefault(key, dict.fromkeys(reading, 0.0))
        for quantity, value in reading.items():
            told[quantity] += value
    return found


WORKERS = "sandbox workers"


async def _names(state: State) -> dict[int, str]:
    alive = [entry for entry in await registry.entries(state) if entry.alive]
    served = {p: n for e in alive for n, p in e.stats.get("environments", {}).items()}
    return served | {entry.pid: entry.name for entry in alive}


def _name(process: psutil.Process, names: dict[int, str], launcher: int) -> str:
    if process.pid == launcher:
        return "meshrl"
    if process.pid in names:
        return names[process.pid]
    kind = kind_of(process)
    return WORKERS if kind in ("sandbox", "launcher") else kind


def _reading(process: psutil.Process) -> Reading:
    rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    sizes = {name: float(kb) * 1024 for name, kb in re.findall(r"(\w+):\s+(\d+) kB", rollup)}
    with process.oneshot():
        return {
            "rss": sizes["Rss"],
            "pss": sizes["Pss"],
            "private": sizes["Private_Dirty"] + sizes["Private_Clean"],
            "fds": float(process.num_fds()),
            "threads": float(process.num_threads()),
        }


async def redis(state: State) -> Reading:
    """`keys`, `keys <pattern>`, `memory`, `aof`, `events` (entries of the stream)."""
    found: Counter[str] = Counter()
    cursor: Any = 0
    while True:
        cursor, keys = await state.command("SCAN", cursor, "COUNT", SCAN)
        found.update(map(_pattern, keys))
        if int(cursor) == 0:
            break
    memory = await state.command("INFO", "memory")
    persistence = await state.command("INFO", "persistence")
    told = {f"keys {pattern}": float(n) for pattern, n in found.items()}
    return told | {
        "keys": float(sum(found.values())),
        "memory": float(memory["used_memory"]),
        "aof": float(persistence.get("aof_current_size", 0)),
        "events": float(await state.command("XLEN", "{mesh}:events")),
    }


def _pattern(key: str) -> str:
    """A key without its job, numbers and names: `{job}:op:admit`."""
    parts = re.sub(r"^\{(?!mesh\})[^}]*\}", "{job}", key).split(":")
    keep = 3 if parts[1] == "op" else 2
    return ":".join(parts[:keep])


def files(run_dir: Path) -> Reading:
    """Bytes of each file or folder of a run; logs as one."""
    found: Counter[str] = Counter()
    for directory, _, names in os.walk(run_dir):  # passes over what goes meanwhile
        for name in names:
            path = Path(directory, name)
            with contextlib.suppress(FileNotFoundError):
                size = path.lstat().st_size
                parts = path.relative_to(run_dir).parts
                found["/".join(parts[:2]) if parts[0] == "mesh" else parts[0]] += size
    return {name: float(size) for name, size in found.items()}


def steps_done(run_dir: Path) -> int:
    """Of the record of a run."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 65536))
        lines = file.read().split(b"\n")[:-1]
    return int(json.loads(lines[-1])["step"]) if lines else 0
