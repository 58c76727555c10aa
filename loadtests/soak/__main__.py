"""Soak test: a small mesh that trains for half an hour at full speed, to find resource growth.

Usage:

    python -m loadtests.soak [--minutes 30] [--out DIR]

The job is the calculator's with a tiny model, so that steps are short and what is kept for each of
them adds up; tools and rewards run in the sandbox, evaluations and checkpoints are among it. Every
process is judged over the second half: its resident memory must not rise by more than 2 % of what
is its own, nor Redis' keys and memory, and descriptors and threads must not rise at all. The file
of Redis goes up and down as it is rewritten, and files of the run grow by design: they are told in
bytes per thousand steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import psutil

from loadtests.measuring.entry import flat, options, report
from loadtests.measuring.metered import family, kind_of, started
from meshrl.common.base.errors import MeshError
from meshrl.common.state import registry
from meshrl.common.state.redis.client import StateClient

WORKERS = "sandbox workers"
SCAN = 1000  # keys that Redis scans in one step

Reading = dict[str, float]  # quantity -> value
Samples = Sequence[tuple[float, float]]  # (seconds, value), in order of time
PAIRS = 20_000  # a fixed sample of more pairs has the same result to within a percent


def slope(samples: Samples) -> float:
    """Return units per second: the median slope of all pairs (Theil 1950, Sen 1968)."""
    pairs = [(a, b) for a, b in combinations(samples, 2) if b[0] > a[0]]
    if len(pairs) > PAIRS:
        pairs = random.Random(0).sample(pairs, PAIRS)
    return statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs) if pairs else 0.0


def second_half(samples: Samples, end: float) -> Samples:
    """Return the samples of the second half of the time from 0 to `end`."""
    return [sample for sample in samples if sample[0] >= end / 2]


def rise(samples: Samples) -> float:
    """Return the rise from the first to the last sample by their slope, in the samples' unit."""
    return slope(samples) * (samples[-1][0] - samples[0][0]) if samples else 0.0


def share(samples: Samples) -> float:
    """Return `rise` as a share of the median; 0 if that is 0."""
    middle = statistics.median(value for _, value in samples) if samples else 0.0
    return rise(samples) / middle if middle else 0.0


async def processes(state: StateClient, launcher: int) -> dict[str, Reading]:
    """`name pid` of each process below the launcher -> `rss`, `pss` (bytes), `fds`, `threads`.

    What a sandbox starts for its work is one reading, `sandbox workers`, since it comes and goes.
    """
    alive = [entry for entry in await registry.list_entries(state) if entry.alive]
    served = {p: n for e in alive for n, p in e.stats.get("environments", {}).items()}
    names = served | {entry.pid: entry.name for entry in alive} | {launcher: "meshrl"}
    found: dict[str, Reading] = {}
    for process in family(launcher):
        try:
            name, reading = names.get(process.pid) or kind_of(process), _reading(process)
        except (psutil.Error, OSError):
            continue  # the process has exited since it was listed
        key = WORKERS if name in ("sandbox", "launcher") else f"{name} {process.pid}"
        told = found.setdefault(key, dict.fromkeys(reading, 0.0))
        for quantity, value in reading.items():
            told[quantity] += value
    return found


def _reading(process: psutil.Process) -> Reading:
    rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    sizes = {name: float(kb) * 1024 for name, kb in re.findall(r"(\w+):\s+(\d+) kB", rollup)}
    with process.oneshot():
        return {
            "rss": sizes["Rss"],
            "pss": sizes["Pss"],
            "fds": float(process.num_fds()),
            "threads": float(process.num_threads()),
        }


async def redis(state: StateClient) -> Reading:
    """Return `keys`, `keys <pattern>`, `memory`, `aof`, `events` (entries of the stream)."""
    found: Counter[str] = Counter()
    cursor: Any = 0
    while True:
        cursor, keys = await state.run_command("SCAN", cursor, "COUNT", SCAN)
        found.update(map(_pattern, keys))
        if int(cursor) == 0:
            break
    memory = await state.run_command("INFO", "memory")
    persistence = await state.run_command("INFO", "persistence")
    told = {f"keys {pattern}": float(n) for pattern, n in found.items()}
    return told | {
        "keys": float(sum(found.values())),
        "memory": float(memory["used_memory"]),
        "aof": float(persistence.get("aof_current_size", 0)),
        "events": float(await state.run_command("XLEN", "{mesh}:events")),
    }


def _pattern(key: str) -> str:
    """Return a key without its job, numbers and names: `{job}:op:admit`."""
    parts = re.sub(r"^\{(?!mesh\})[^}]*\}", "{job}", key).split(":")
    keep = 3 if parts[1] == "op" else 2
    return ":".join(parts[:keep])


def files(run_dir: Path) -> Reading:
    found: Counter[str] = Counter()
    for directory, _, names in os.walk(run_dir):  # skips files that disappear during the walk
        for name in names:
            path = Path(directory, name)
            with contextlib.suppress(FileNotFoundError):
                size = path.lstat().st_size
                parts = path.relative_to(run_dir).parts
                found["/".join(parts[:2]) if parts[0] == "mesh" else parts[0]] += size
    return {name: float(size) for name, size in found.items()}


def steps_done(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 65536))
        lines = file.read().split(b"\n")[:-1]
    return int(json.loads(lines[-1])["step"]) if lines else 0


JOB = Path("examples/calculator.toml")
SETTINGS = {
    "model.config.hidden_size": 32,
    "model.config.intermediate_size": 64,
    "model.config.num_hidden_layers": 1,
    "model.config.num_attention_heads": 1,
    "cache": "",
    "rollout.max_tokens": 64,
    "rollout.max_turns": 4,
    "rollout.slots": 16,
    "algorithm.groups_per_step": 2,
    "algorithm.group_size": 4,
    "algorithm.filter_zero_variance": "false",  # so early a model earns nothing
    "warm_start.steps": 2,
    "evaluation.every": 100,
    "evaluation.problems": 16,
    "budget.steps": 1_000_000,
}
LOOK_S = 5.0
LEAST_LOOKS = 8  # however short it is to take
LEAST_IN_HALF = 3  # samples of the second half, however long each takes on a busy host
UP_S = 180.0
FLAT = 0.02  # of its median, by which a process's memory may rise over the second half
KEYS = 20  # temporary keys of Redis

Series = dict[str, list[tuple[float, float]]]


class Soak:
    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.series: Series = {}
        self.steps: list[tuple[float, float]] = []

    async def watch(self, state: StateClient, launcher: int, seconds: float) -> None:
        """Sample every few seconds, from the first step on; RuntimeError when the run ends."""
        until = time.monotonic() + UP_S
        while steps_done(self.run_dir) < 1:
            if not psutil.pid_exists(launcher) or time.monotonic() > until:
                raise RuntimeError("training did not begin")
            await asyncio.sleep(0.5)
        begun = time.monotonic()
        every_s = min(LOOK_S, seconds / LEAST_LOOKS)
        while (
            (at := time.monotonic() - begun) < seconds
            or len(self.steps) < LEAST_LOOKS
            or len(second_half(self.steps, at)) < LEAST_IN_HALF
        ):
            if not psutil.pid_exists(launcher):
                raise RuntimeError("the run ended")
            with contextlib.suppress(MeshError, TimeoutError):  # a sample that fails is one less
                async with asyncio.timeout(60.0):
                    found = await processes(state, launcher)
                    told = {f"redis {name}": value for name, value in (await redis(state)).items()}
                told |= {
                    f"{who}: {what}": v for who, row in found.items() for what, v in row.items()
                }
                told |= {f"file {n}": v for n, v in files(self.run_dir).items()}
                for name, value in told.items():
                    self.series.setdefault(name, []).append((at, value))
                self.steps.append((at, float(steps_done(self.run_dir))))
            await asyncio.sleep(every_s)

    def judged(self) -> dict[str, Any]:
        """Return figures of processes that ran throughout; `exceeds` lists the growing ones."""
        end = self.steps[-1][0]
        looks = len(second_half(self.steps, end))
        steps_s = slope(second_half(self.steps, end))
        exceeds: list[str] = []
        figures: dict[str, Any] = {}
        for name, samples in sorted(self.series.items()):
            half = second_half(samples, end)
            if len(half) < max(LEAST_IN_HALF, 0.9 * looks):
                continue  # a process that came or went
            told = {
                "first": samples[0][1],
                "middle": half[0][1],
                "last": half[-1][1],
                "per_min": round(60 * slope(half), 1),
                "share": round(share(half), 4),
            }
            if steps_s > 0:
                told["per_1000_steps"] = round(1000 * slope(half) / steps_s)
            figures[key_of(name)] = told
            if why := self._exceeds(name, half, end):
                exceeds.append(f"{name}: {why}")
        return flat(figures) | {
            "minutes": round(end / 60, 1),
            "steps": int(self.steps[-1][1]),
            "steps_per_s": round(steps_s, 2),
            "exceeds": exceeds,
        }

    def _exceeds(self, name: str, half: Samples, end: float) -> str:
        """Return the reason why a rise over the second half is too large; empty if it is not."""
        by, as_share = rise(half), share(half)
        who, _, what = name.rpartition(": ")
        if what == "rss":
            # Forks share resident pages with the fork server: count only the own share.
            own = [value for _, value in second_half(self.series[f"{who}: pss"], end)]
            as_share = by / statistics.median(own)
        if what == "rss" or name == "redis memory":
            return f"+{by / 2**20:.1f} MiB, {100 * as_share:.1f} %" if as_share > FLAT else ""
        if what in ("fds", "threads"):
            return f"+{by:.0f}" if by >= 2 else ""
        if name.startswith("redis keys") and by > KEYS and as_share > FLAT:
            return f"+{by:.0f} keys"
        return ""


def key_of(name: str) -> str:
    return "_".join(re.findall(r"[^\s:{}/]+", name))


async def soaked(out: Path, seconds: float, settings: dict[str, Any]) -> dict[str, Any]:
    soak = Soak(out / "run")
    words = [f"out={soak.run_dir}", *(f"{key}={value}" for key, value in settings.items())]
    async with started(JOB, soak.run_dir, *words) as (state, meter):
        await soak.watch(state, meter.launcher, seconds)
    samples = {"steps": soak.steps, "series": soak.series}
    (out / "samples.json").write_text(json.dumps(samples))
    return soak.judged()


def main() -> None:
    parser = options(__doc__, minutes=30.0, out=(Path, "keeps the run and all samples there"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    a = parser.parse_args()
    settings = SETTINGS | dict(one.split("=", 1) for one in a.set)
    with tempfile.TemporaryDirectory(prefix="meshrl-soak-") as scratch:
        out = a.out or Path(scratch)
        out.mkdir(parents=True, exist_ok=True)
        report(asyncio.run(soaked(out, 60 * a.minutes, settings)))


if __name__ == "__main__":
    main()
