"""Arms with a core of two ranks, a core with a hybrid, its transfers, one that joins, checkpoints,
and a killed trainer.

All on the digits task with every step's groups there before it begins (`training.deterministic`),
no staleness and enough rounds to share, so that `train_s`, a step's time without waiting for
groups, is of training alone and engines are idle. Needs as many quiet cores as train.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
import uuid
from pathlib import Path
from statistics import median
from typing import Any

from safetensors import safe_open

from loadtests.measuring.metered import LOOK_S, run_job, started, steps_of
from loadtests.measuring.processes import cpu_s
from loadtests.trainer import digits
from loadtests.trainer.digits import Task
from meshrl.common.state import jobs, registry
from meshrl.common.state.pool.scheduling.snapshot import PoolRequest
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.workers.rows import Role
from meshrl.common.state.redis.client import StateClient

LENGTH = 128  # tokens of each completion: a step trains for a second or two
BIN_TOKENS = 1100  # 8 sequences: 8 rounds a step, 4 of two ranks each
ROUNDS = 8
LEASES = 4  # rounds of a step that a hybrid computes beside a core of one rank
WARM_STEPS = 2  # not measured
JOIN_AT = 6  # the step after which a worker joins
JOIN_STEPS = 40  # within which it has to be at work
KILL_AT = 4
DEADLINE_S = 300.0
SETTINGS = ("training.deterministic=true", f"training.bin_tokens={BIN_TOKENS}")
STAY = "planner.imbalance=1000000.0"  # the planner leaves every worker where it is
Row = dict[str, Any]


def two_ranks(folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """Measure `speedup_2_ranks`: a step's time with one rank over that with two."""
    changes = ("mesh.workers=3", "training.ranks=2")
    return speedup("2_ranks", folder, chosen, changes)


def hybrid(folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """Measure `speedup_hybrid`: a step's time of the core alone over that with one hybrid."""
    changes = ("mesh.workers=3", "planner.training=2", STAY)
    return speedup("hybrid", folder, chosen, changes)


def speedup(
    name: str, folder: Path, chosen: argparse.Namespace, changes: tuple[str, ...]
) -> dict[str, Any]:
    """Return medians over the steps of runs of each kind, which alternate."""
    task = digits.write(folder / "task", (LENGTH,))
    alone: list[float] = []
    together: list[float] = []
    last = WARM_STEPS + chosen.steps
    for repeat in range(chosen.repeats):
        rows = run(task, last, folder / f"alone-{repeat}")
        alone += [row["train_s"] for row in rows[WARM_STEPS:]]
        rows = run(task, last, folder / f"together-{repeat}", *changes)
        together += [row["train_s"] for row in helped(rows[WARM_STEPS:], name)]
    return {f"speedup_{name}": median(alone) / median(together)}


def run(task: Task, last: int, out: Path, *changes: str) -> list[Row]:
    job = task.job_file(out, steps=last + 1, staleness=0)
    return asyncio.run(run_job(job, out, last, *SETTINGS, *changes)).rows


def helped(rows: list[Row], name: str) -> list[Row]:
    """Return the steps in which a hybrid took part, because processes start at different times."""
    found = [row for row in rows if name != "hybrid" or len(row["workers"]) > 1]
    if not found:
        raise RuntimeError("the hybrid had a part in no step")
    return found


# -- bytes that a hybrid sends ---------------------------------------------------------------------


def transfer(folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """Measure `sent_shares_*`: bytes that a hybrid sends for LEASES rounds of a step, over those of
    the trained parameters in float32. A block has one round, LEASES, or LEASES in bfloat16.
    """
    task = digits.write(folder / "task", (LENGTH,))
    figures = {}
    for name, block_rounds, dtype in (
        ("round", 1, "float32"),
        ("block", LEASES, "float32"),
        ("narrow_block", LEASES, "bfloat16"),
    ):
        keys = f"training.block_rounds={block_rounds}", f"training.gradient_dtype={dtype}"
        sent = asyncio.run(measure_sent(task, folder / name, chosen.steps, *keys))
        figures[f"sent_shares_{name}"] = sent
    return figures


async def measure_sent(task: Task, out: Path, steps: int, *changes: str) -> float:
    last = WARM_STEPS + steps
    job = task.job_file(out, steps=last + 1, staleness=0, workers=3)
    helped = "planner.training=2", STAY
    async with started(job, out, *SETTINGS, *helped, *changes) as (state, _):
        async with asyncio.timeout(DEADLINE_S):
            await committed(state, last)
            while not (sent := await hybrid_stats(state)).get("rounds"):
                await asyncio.sleep(LOOK_S)
    [weights] = task.model.glob("*.safetensors")
    with safe_open(weights, "pt") as file:
        numbers = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    return float(LEASES * sent["sent_bytes"] / sent["rounds"] / (4 * numbers))


async def hybrid_stats(state: StateClient) -> dict[str, Any]:
    entries = await registry.list_entries(state, "hybrid")
    return next((entry.stats for entry in entries if entry.alive), {})


# -- a hybrid that joins ---------------------------------------------------------------------------


def join(folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """Measure `join_pause_share`: the core's wait for a joining hybrid, as a share of a step."""
    task = digits.write(folder / "task", (LENGTH,))
    rows, moved = asyncio.run(joined(task, folder / "run"))
    before = rows[WARM_STEPS:moved]
    core = next(iter(before[-1]["workers"]))
    first = next((i for i, row in enumerate(rows) if len(row["workers"]) > 1), None)
    if first is None:
        raise RuntimeError("nobody joined")
    usual_s = median(idle_s(row, core) for row in before)
    worst_s = max((idle_s(row, core) for row in rows[moved:first]), default=usual_s)
    pause_s, step_s = max(0.0, worst_s - usual_s), median(row["train_s"] for row in before)
    return {"join_pause_share": pause_s / step_s}


def idle_s(row: Row, core: str) -> float:
    """Return the part of a step's time that the core did not spend on gradients."""
    return float(row["train_s"] - row["workers"][core])


async def joined(task: Task, out: Path) -> tuple[list[Row], int]:
    """Return the steps of a run in which a worker moves to training, and the step of the move."""
    job = task.job_file(out, steps=JOIN_AT + JOIN_STEPS + 1, staleness=0, workers=3)
    async with started(job, out, *SETTINGS, STAY) as (state, _), asyncio.timeout(DEADLINE_S):
        await committed(state, JOIN_AT)
        worker = next(
            gang.workers[resident.ranks[0]]
            for gang in await pool.read_gangs(state)
            for resident in gang.instances
            if resident.role == Role.ROLLOUT
        )
        moved = (await row_of(state)).version
        asked = PoolRequest(uuid.uuid4().hex, "move", worker=worker, role=Role.TRAINING)
        await pool.submit_request(state, asked)
        while True:
            rows = await steps_of(state, out)
            if len(rows) >= JOIN_AT + JOIN_STEPS or (rows and len(rows[-1]["workers"]) > 1):
                return rows, moved
            await asyncio.sleep(LOOK_S)


# -- checkpoints and recovery ----------------------------------------------------------------------


def checkpoint(folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """Measure `checkpoint_pause_s`: the delay of a step's commit by a checkpoint."""
    task = digits.write(folder / "task", (LENGTH,))
    last = WARM_STEPS + chosen.steps
    rows = run(task, last, folder / "run", "training.checkpoint_every=2")
    pauses = [row["checkpoint_pause_s"] for row in rows[WARM_STEPS:] if "checkpoint_pause_s" in row]
    return {"checkpoint_pause_s": median(pauses)}


def recovery(folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """`recovery_s`: from a trainer's SIGKILL in mid-step to its successor's first commit, steps
    since the last checkpoint included. `recovery_cpu_s` is what
    the successor used by then, `recovery_steps_s` what the same steps took when they were trained.
    """
    task = digits.write(folder / "task", (LENGTH,))
    found = [asyncio.run(recovered(task, folder / f"run-{i}")) for i in range(chosen.repeats)]
    took, used, steps = zip(*found, strict=True)
    return {
        "recovery_s": median(took),
        "recovery_cpu_s": median(used),
        "recovery_steps_s": median(steps),
    }


async def recovered(task: Task, out: Path) -> tuple[float, float, float]:
    job = task.job_file(out, steps=KILL_AT + 4, staleness=0)
    async with started(job, out, *SETTINGS) as (state, _), asyncio.timeout(DEADLINE_S):
        await committed(state, KILL_AT)
        os.kill(await trainer_pid(state), signal.SIGKILL)
        killed = time.perf_counter()
        await committed(state, KILL_AT + 1)
        took = time.perf_counter() - killed
        used = cpu_s(await trainer_pid(state))
        rows = await steps_of(state, out)
        return took, used, sum(row["train_s"] for row in rows[: KILL_AT + 1])


async def trainer_pid(state: StateClient) -> int:
    return next(entry.pid for entry in await registry.list_entries(state, "trainer") if entry.alive)


async def committed(state: StateClient, version: int) -> None:
    while (row := await row_of(state)).version < version:
        if row.phase == jobs.Phase.FAILED:
            raise RuntimeError(f"the job failed: {row.error}")
        await asyncio.sleep(LOOK_S)


async def row_of(state: StateClient) -> jobs.JobRow:
    while not (rows := await jobs.read_jobs(state)):
        await asyncio.sleep(LOOK_S)
    return rows[0]
