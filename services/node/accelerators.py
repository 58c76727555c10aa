"""Detects what this host can compute on: its NVIDIA GPUs, or a number of CPU slots."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import ConfigError
from common.process.host import Host

QUERY = ["--query-gpu=index,name", "--format=csv,noheader"]
ANSWER_S = 20.0  # nvidia-smi initialises the driver on its first call


@dataclass(frozen=True)
class Accelerator:
    name: str  # "cpu:0", "cuda:0 NVIDIA H200"
    env: Mapping[str, str] = field(default_factory=dict)  # what lets a process see only this one


def cpu_slots(count: int) -> list[Accelerator]:
    """Slots of one thread each: two would fight for the cores of a small machine."""
    return [Accelerator(f"cpu:{i}", {"OMP_NUM_THREADS": "1"}) for i in range(count)]


def shared(gpus: list[tuple[str, str]], count: int) -> list[Accelerator]:
    """`count` slots on (index, name) GPUs, taken in turn; one slot for each GPU if `count` is 0."""
    slots = []
    for i in range(count or len(gpus)):
        index, name = gpus[i % len(gpus)]
        slots.append(Accelerator(f"cuda:{index} {name}", {"CUDA_VISIBLE_DEVICES": index}))
    return slots


def parsed(listing: str) -> list[tuple[str, str]]:
    """(index, name) of each line that nvidia-smi printed."""
    rows = (line.partition(",") for line in listing.splitlines() if "," in line)
    return [(index.strip(), name.strip()) for index, _, name in rows]


async def discover(host: Host, device: str, workers: int, scratch: Path) -> list[Accelerator]:
    """The accelerators of `device` ("cpu" or "cuda"); ConfigError if there is none."""
    if device == "cpu":
        return cpu_slots(workers)
    program = shutil.which("nvidia-smi")
    listing = scratch / "gpus.csv"
    listing.parent.mkdir(parents=True, exist_ok=True)
    listing.unlink(missing_ok=True)
    if program is not None:
        child = host.spawn([program, *QUERY], name="nvidia-smi", log=listing)
        if await child.wait(ANSWER_S) is None:
            child.kill()
    gpus = parsed(listing.read_text()) if listing.exists() else []
    if not gpus:
        raise ConfigError(
            "no NVIDIA GPU answers nvidia-smi",
            where="node agent",
            fix='set mesh.device = "cpu", or repair the driver',
        )
    return shared(gpus, workers)
