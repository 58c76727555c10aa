"""A small mesh that trains for half an hour as fast as it can: what of it grows.

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
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from loadtests.measuring.entry import flat, options, report
from loadtests.measuring.metered import started
from loadtests.soak import growing
from loadtests.soak.slopes import Samples, rise, second_half, share, slope
from meshrl.common.base.errors import MeshError
from meshrl.common.state.redis.client import State

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
UP_S = 180.0
FLAT = 0.02  # of its median, by which a process's memory may rise over the second half
KEYS = 20  # keys of Redis that come and go with what is under way

Series = dict[str, list[tuple[float, float]]]


class Soak:
    """One run and its samples."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.series: Series = {}
        self.steps: list[tuple[float, float]] = []

    async def watch(self, state: State, launcher: int, seconds: float) -> None:
        """Sample every few seconds, from the first step on; RuntimeError when the run ends."""
        until = time.monotonic() + UP_S
        while growing.steps_done(self.run_dir) < 1:
            if not psutil.pid_exists(launcher) or time.monotonic() > until:
                raise RuntimeError("training did not begin")
            await asyncio.sleep(0.5)
        begun = time.monotonic()
        every_s = min(LOOK_S, seconds / LEAST_LOOKS)
        while (at := time.monotonic() - begun) < seconds or len(self.steps) < LEAST_LOOKS:
            if not psutil.pid_exists(launcher):
                raise RuntimeError("the run ended")
            with contextlib.suppress(MeshError, TimeoutError):  # a sample that fails is one less
                await self._sample(at, state, launcher)
            await asyncio.sleep(every_s)

    async def _sample(self, at: float, state: State, launcher: int) -> None:
        async with asyncio.timeout(60.0):
            found = await growing.processes(state, launcher)
            told = {f"redis {name}": value for name, value in (await growing.redis(state)).items()}
        told |= {f"{who}: {what}": v for who, row in found.items() for what, v in row.items()}
        told |= {f"file {n}": v for n, v in growing.files(self.run_dir).items()}
        for name, value in told.items():
            self.series.setdefault(name, []).append((at, value))
        self.steps.append((at, float(growing.steps_done(self.run_dir))))

    def judged(self) -> dict[str, Any]:
        """Return the figures of every quantity that was there throughout; `exceeds` lists those
        that are not flat, each with its rise.
        """
        end = self.steps[-1][0]
        steps_s = slope(second_half(self.steps, end))
        exceeds: list[str] = []
        figures: dict[str, Any] = {}
        for name, samples in sorted(self.series.items()):
            half = second_half(samples, end)
            if len(half) < 3 or half[0][0] > 0.6 * end or half[-1][0] < 0.9 * end:
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
        """Why a rise over the second half is too much; empty if it is not."""
        by, as_share = rise(half), share(half)
        who, _, what = name.rpartition(": ")
        if what == "rss":
            # Resident pages are shared with the nursery's other forks: a share of its own is meant.
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
    """Return a quantity's name as one word: the parts of it joined by `_`."""
    return "_".join(re.findall(r"[^\s:{}/]+", name))


async def soaked(out: Path, seconds: float, settings: dict[str, Any]) -> dict[str, Any]:
    """Run the job for so long and judge it."""
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
