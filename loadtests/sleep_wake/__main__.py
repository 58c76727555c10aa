"""Benchmark of a training core's sleep and wake, with a check that it continues bit for bit.

Usage:

    python -m loadtests.sleep_wake [--medium-rounds 7] [--large-rounds 3] [--no-speed] [--no-run]

`speed`: learners of 0.3M, 18M (0.2 GB) and 148M parameters (1.8 GB: weights and both moments,
float32) go to `memory` and to `disk` and back, by Settle, beside copying as many bytes (`memcpy`:
between pages that are there; `memcpy_fresh`: into a new segment, whose pages the kernel clears
first) and beside `dd` on the same file system. What is read from the disk is dropped from the page
cache before. Arms take turns in an order that rotates, after one turn that does not count; seconds
are medians. `*_over_memcpy` and `*_over_dd` are speeds over those of the peers: `memcpy` has one
thread, and `dd` is the faster of `conv=fsync` with and without `oflag=direct` (`iflag=direct`).
`*_cpu_over_memcpy` compares CPU-seconds of all threads, which other load on the host affects less.

`run`: the job of loadtests.replay (deterministic, no staleness, no helpers) undisturbed, and with a
core that sleeps in memory and on disk, and moves between the two, after each step; and one whose
core is killed while it sleeps, in memory and on disk, and goes on from what it kept, and once when
it is absent, from a checkpoint of that very step.

Prints one flat JSON object, in which figures of `speed` begin with the size of their model, such
as `148M_disk_wake_s`; exit status 1 unless the manifests of all steps are equal.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from loadtests.measuring.entry import options, report
from loadtests.measuring.meshed import knows, unrenewed
from loadtests.measuring.processes import drop_caches
from loadtests.measuring.rounds import turns
from loadtests.measuring.shapes import shape
from loadtests.replay import runs as replay
from meshrl.common.api.calls.interface import Interface
from meshrl.common.api.calls.role import SetTier
from meshrl.common.api.node import Worker
from meshrl.common.base.files.offload_media import MemorySegment
from meshrl.common.job.config import AlgorithmConfig, OptimizerConfig
from meshrl.common.mesh.instances.tiers import TierController
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.network.decoder import Decoder
from meshrl.common.state.pool.workers.rows import Tier
from meshrl.services.node.instances.segments import MemorySegments, SegmentCallsMixin
from meshrl.services.trainer.gang.gang_compute import GangCompute
from meshrl.services.trainer.learner.learner import Learner
from meshrl.services.trainer.ranks.rank import Rank

WORKER = "worker/w0"
SLEEPING = "loadtests.sleep_wake.sleeping_rank"
DD_BYTES = 1 << 20  # of its blocks
DEATHS = ("memory@3", "absent@5", "disk@6")
LLAMA: dict[str, Any] = {"architecture": "llama", "tie_embeddings": True, "max_positions": 512}
SMALL = shape(96, 3, 224, 64, (4, 4), **LLAMA)
MEDIUM = shape(512, 5, 1408, 4096, (8, 8), **LLAMA)
LARGE = shape(1024, 9, 2816, 32000, (16, 16), **LLAMA)
# speeds of the first over that of the fastest of the others
RATIOS = (
    ("memory_sleep", "memcpy"),
    ("memory_wake", "memcpy"),
    ("disk_sleep", "dd_write", "dd_direct_write"),
    ("disk_wake", "dd_read", "dd_direct_read"),
)


class SegmentCalls(Interface):
    """Calls of a worker's interface about segments."""


SegmentCalls.methods = {
    name: method for name, method in Worker.methods.items() if name.endswith("_segment")
}


class Keeper(SegmentCallsMixin):
    """A worker that does nothing else."""

    interface = SegmentCalls

    def __init__(self, segments: MemorySegments, mesh: Mesh) -> None:
        self.segments, self._mesh = segments, mesh

    async def is_process(self, name: str, incarnation: str, owner: str | bytes) -> bool:
        return True


class CoreAlone:
    """Training core reduced to its arithmetic."""

    is_removable = True

    def __init__(self, compute: GangCompute) -> None:
        self._compute = compute

    async def sleep(self, tier: Tier) -> None:
        await self._compute.sleep(lambda: {"tier": tier}, tier)

    async def wake(self) -> None:
        await self._compute.wake()

    async def move(self, tier: Tier) -> None:
        """Do nothing: no other process retains state."""

    async def cancel_removal(self) -> None:
        """Do nothing: no removal is pending."""

    async def prepare_removal(self) -> None:
        """Do nothing: not called here."""


class Sleepy:
    def __init__(self, tiers: TierController, directory: Path) -> None:
        self._tiers, self._directory, self._epoch = tiers, directory, 0

    async def to(self, tier: Tier) -> None:
        self._epoch += 1
        wish = SetTier(tier, self._epoch, False, WORKER, str(self._directory))
        await self._tiers.set_tier(wish)


@contextmanager
def noted(took: dict[str, list[float]], name: str) -> Iterator[None]:
    started_s, used_s = time.monotonic(), time.process_time()
    yield
    took.setdefault(name, []).append(time.monotonic() - started_s)
    took.setdefault(f"{name}_cpu", []).append(time.process_time() - used_s)


def used_bytes() -> int:
    """Return the bytes of private memory, without those that the kernel may take at any time."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    sizes = {line.split()[0]: line.split()[1] for line in lines}
    return 1024 * (int(sizes["Anonymous:"]) - int(sizes["LazyFree:"]))


def dd(*words: str) -> None:
    subprocess.run(["dd", f"bs={DD_BYTES}", *words], check=True, stderr=subprocess.DEVNULL)


async def speed(model: ModelConfig, rounds: int, directory: Path) -> dict[str, Any]:
    worker, process = unrenewed(WORKER), unrenewed("trainer/j")
    host, found = process.host, {}
    async with MemorySegments(lambda: host.measure_free_space(directory).memory_bytes) as segments:
        await worker.join(Keeper(segments, worker))
        await process.join(None)
        await knows(process, WORKER, worker.transport.address, worker.incarnation)
        decoder = Decoder(model)
        decoder.initialise(torch.Generator().manual_seed(0))
        learner = Learner(decoder, OptimizerConfig(muon_lr=0.0), AlgorithmConfig())
        compute = GangCompute(process, "j", Rank.for_single_rank(learner))
        tiers = TierController(process, CoreAlone(compute), compute.kinds)
        sleepy, size = Sleepy(tiers, directory), learner.size_bytes
        found = await arms(sleepy, size, rounds, directory)
        before = used_bytes()
        await sleepy.to(Tier.DISK)
        released = before - used_bytes()
        await sleepy.to(Tier.ACCELERATOR)
        found |= {"parameters": learner.parameter_count, "bytes": size, "released": released}
        await process.leave()
        await worker.leave()
    return found


async def arms(sleepy: Sleepy, size: int, rounds: int, directory: Path) -> dict[str, Any]:
    took: dict[str, list[float]] = {}
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    scratch, blocks = directory / "dd", max(1, size // DD_BYTES)
    cold: list[bool] = []

    async def memory() -> None:
        with noted(took, "memory_sleep"):
            await sleepy.to(Tier.MEMORY)
        with noted(took, "memory_wake"):
            await sleepy.to(Tier.ACCELERATOR)

    async def disk() -> None:
        with noted(took, "disk_sleep"):
            await sleepy.to(Tier.DISK)
        cold.append(drop_caches())
        with noted(took, "disk_wake"):
            await sleepy.to(Tier.ACCELERATOR)

    async def memcpy() -> None:
        with noted(took, "memcpy"):
            np.copyto(target, source)
        descriptor = os.memfd_create("fresh")
        os.ftruncate(descriptor, size)
        medium = MemorySegment(f"/proc/self/fd/{descriptor}")
        with noted(took, "memcpy_fresh"):  # no page of it is there
            medium.open_chunk(0, size)[:] = source
        medium.close()
        os.close(descriptor)

    async def disk_dump(name: str = "dd", flags: str = "") -> None:
        with noted(took, f"{name}_write"):
            options = [f"oflag={flags}"] if flags else []
            dd("if=/dev/zero", f"of={scratch}", f"count={blocks}", "conv=fsync", *options)
        cold.append(drop_caches())
        with noted(took, f"{name}_read"):
            dd(f"if={scratch}", "of=/dev/null", *([f"iflag={flags}"] if flags else []))
        scratch.unlink()

    direct_dump = partial(disk_dump, "dd_direct", "direct")
    every: list[Callable[[], Awaitable[None]]] = [memory, memcpy, disk, disk_dump, direct_dump]
    for arm in every:
        await arm()
    took.clear()
    for arm in turns(every, rounds):
        await arm()
    found: dict[str, Any] = {"cold": all(cold)}
    median_s = {name: statistics.median(seconds) for name, seconds in took.items()}
    for arm_name, peer, *others in RATIOS:
        fastest_s = min(median_s[name] for name in (peer, *others))
        label = peer.partition("_")[0]
        found[f"{arm_name}_over_{label}"] = round(fastest_s / median_s[arm_name], 3)
    for arm_name in ("memory_sleep", "memory_wake"):
        ratio = median_s["memcpy_cpu"] / median_s[f"{arm_name}_cpu"]
        found[f"{arm_name}_cpu_over_memcpy"] = round(ratio, 3)
    for name, median in median_s.items():
        if not (name.startswith("dd") and name.endswith("_cpu")):  # of this process, not of dd
            found[f"{name}_s"] = round(median, 5)
        if not name.endswith("_cpu"):
            found[f"{name}_gb_s"] = round(size / median / 1e9, 3)
    return found


def slept_run(job: Path, directory: Path, deaths: Sequence[str], steps: int) -> dict[str, Any]:
    """Run the job of `loadtests.replay` with a core that sleeps after each step, and may die."""
    words = replay.SETTINGS | {"out": directory / "run", "budget.steps": steps}
    with replay.started(["run", str(job)], words, directory, deaths, SLEEPING) as program:
        replay.await_exit(program, directory)
    return replay.found_in(directory)


def run(job: Path, scratch: Path, steps: int, deaths: Sequence[str]) -> dict[str, Any]:
    plain = replay.one_run(job, scratch / "plain", steps=steps)
    slept = slept_run(job, scratch / "slept", (), steps)
    died = slept_run(job, scratch / "died", deaths, steps)
    same = [one["manifests"] == plain["manifests"] for one in (slept, died)]
    return {
        "steps": len(plain["manifests"]),
        "bit_identical": int(same[0]),
        "bit_identical_after_death": int(same[1]),
        "marks": [name for name in died["deaths"] if not name.startswith("slept-")],
        "lost": slept["lost"] + died["lost"],
        "trained_twice": slept["trained_twice"] + died["trained_twice"],
    }


def main() -> int:
    parser = options(
        __doc__,
        rounds=7,
        medium_rounds=7,
        large_rounds=3,
        no_speed=False,
        no_run=False,
        steps=(replay.STEPS, "of the run"),
        directory=(Path, "on the file system to measure"),
    )
    parser.add_argument("job", type=Path, nargs="?", default=replay.JOB)
    parser.add_argument("--die", nargs="+", default=DEATHS, metavar="TIER@STEP", help="of the run")
    a = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"load": os.getloadavg()[0], "steal_s": -psutil.cpu_times().steal}
    with tempfile.TemporaryDirectory(prefix="meshrl-", dir=a.directory) as scratch:
        if not a.no_speed:
            sizes = {
                "0.3M": (SMALL, a.rounds),
                "18M": (MEDIUM, a.medium_rounds),
                "148M": (LARGE, a.large_rounds),
            }
            with redirect_stdout(sys.stderr):  # the log
                for name, (model, rounds) in sizes.items():
                    if rounds:
                        result[name] = asyncio.run(speed(model, rounds, Path(scratch)))
        if not a.no_run:
            result |= run(a.job.resolve(), Path(scratch), a.steps, a.die)
    result["steal_s"] = round(result["steal_s"] + psutil.cpu_times().steal, 1)
    report(result)
    good = a.no_run or (
        result["bit_identical"] and result["bit_identical_after_death"] and not result["lost"]
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
