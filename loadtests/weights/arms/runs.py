"""Arms with a real run: the share of elements that a step changes, and the peak memory.

The peak is that of the largest process while a large model is trained on two ranks and published.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil
import torch

from loadtests.measuring.metered import HostMeter, all_events, kind_of, started
from loadtests.measuring.rounds import Arm, spread
from loadtests.weights.scene import Plan
from meshrl.common.state import jobs
from meshrl.common.weights.chunks.chunk_store import ChunkStore
from meshrl.common.weights.layout.version_image import open_verified_image

ROOT = Path(__file__).parents[3]
DIGITS = ROOT / "tests/mesh/jobs/digits.toml"
RUN_S = 1200.0
LOOK_S = 0.1  # between two polls of the memory of all processes
LAYER_BYTES = 4 * (4 * 1024 * 1024 + 3 * 1024 * 4096)  # of MODEL, in float32
RANKS, STEPS = 2, 2
APART = ("engine", "hybrid", "fork-server")  # who hold a version whole by what they are


async def changed(plan: Plan) -> Arm:
    """Measure `real_changed_share` of bfloat16 elements in a step at a learning rate of 1e-6."""
    honest, found = HostMeter(), []
    with tempfile.TemporaryDirectory(
        prefix="meshrl-changed-", dir=plan.directory or None
    ) as scratch:
        out = Path(scratch) / "run"
        changes = (
            f"out={out}",
            "optimizer.muon_lr=0",
            "optimizer.adamw_lr=1e-6",
            f"budget.steps={plan.steps + 1}",
            "weights.keep=1000",
            "evaluation.before=false",
            "evaluation.after=false",
        )
        async with started(DIGITS, out, *changes) as (state, _), asyncio.timeout(RUN_S):
            while (row := next(iter(await jobs.read_jobs(state)), None)) is None or (
                row.version < plan.steps
            ):
                await asyncio.sleep(LOOK_S)
            events = await all_events(state, out)
            manifests = [e.fields["manifest"] for e in events if e.kind in ("initial", "step")]
            store = ChunkStore(out / "store")
            images = [open_verified_image(store, digest) for digest in manifests[: plan.steps + 1]]
            for before, after in itertools.pairwise(images):
                found.append(share(before.tensors, after.tensors))
    return spread("real_changed_share", found, 6) | honest.get_validity()


def share(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> float:
    differ = sum(
        int((_bits(before[name]) != _bits(tensor)).sum()) for name, tensor in after.items()
    )
    return differ / sum(tensor.numel() for tensor in after.values())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16).view(torch.int16)


async def memory(plan: Plan) -> Arm:
    """Measure `peak_over_share`: peak memory of non-engines over a rank's share; `peaks_mib`."""
    honest = HostMeter()
    peaks: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="meshrl-memory-", dir=plan.directory or None) as made:
        job, out = large_job(Path(made), plan.memory), Path(made) / "run"
        changes: tuple[str, ...] = (f"out={out}", f"training.ranks={RANKS}")
        changes += (
            f"mesh.workers={RANKS + 1}",
            "rollout.max_tokens=8",
            "budget.steps=3",
            "training.checkpoint_every=1",
            # Beside the model, whose rows are asked about, activations of a bin are to be little.
            "training.bin_tokens=256",
            "training.activation_checkpointing=true",
        )
        async with started(job, out, *changes) as (state, meter), asyncio.timeout(RUN_S):
            while (
                row := next(iter(await jobs.read_jobs(state)), None)
            ) is None or row.version < STEPS:
                if row is not None and row.phase == jobs.Phase.FAILED:
                    raise RuntimeError(f"the job failed: {row.error}")
                for name, size in resident(meter.launcher).items():
                    peaks[name] = max(size, peaks.get(name, 0))
                await asyncio.sleep(LOOK_S)
    largest = max(size for name, size in peaks.items() if not name.startswith(APART))
    answer: Arm = {"memory_mib": plan.memory >> 20, "ranks": RANKS}
    answer["peak_over_share"] = round(largest / (plan.memory / RANKS), 3)
    answer["peaks_mib"] = {name: size >> 20 for name, size in sorted(peaks.items())}
    return answer | honest.get_validity()


def large_job(directory: Path, size: int) -> Path:
    text = DIGITS.read_text()
    shape = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": max(1, size // LAYER_BYTES),
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 64,
    }
    for key, value in shape.items():
        text = re.sub(rf"^{key} = \d+$", f"{key} = {value}", text, flags=re.MULTILINE)
    for name in ("digits.jsonl", "digits.py"):
        shutil.copy(DIGITS.parent / name, directory)
    text = text.replace("../../../examples", str(ROOT / "examples"))
    (path := directory / "large.toml").write_text(text)
    return path


def resident(pid: int) -> dict[str, int]:
    """Return the private bytes of each process below this one, by its kind and number."""
    found: dict[str, int] = {}
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError, StopIteration):
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            size = next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
            found[f"{kind_of(process)}/{process.pid}"] = size << 10
    return found
