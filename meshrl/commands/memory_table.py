"""Table of the memory of a job's processes, which `--dry-run` and `meshrl doctor` print."""

from __future__ import annotations

from dataclasses import replace

from rich.table import Table

from meshrl.common.job.config import JobConfig
from meshrl.common.job.memory.plan import MemoryPlan
from meshrl.common.job.memory.process_memory import MemoryKinds, describe_bytes
from meshrl.common.state.pool.demand.requirements import shares_scoring_worker
from meshrl.job.checks.host.memory import (
    Room,
    explain_excess,
    find_room,
    limit_cache,
    plan_job_memory,
)
from meshrl.view.live import console_tables
from meshrl.view.terminal import Console

TITLES = {"cache": "KV cache", "context": "CUDA"}


def print_memory(config: JobConfig, console: Console, accelerator: str = "") -> None:
    """Print the estimate of each process with a model.

    `accelerator`: a declared kind, or GiB, in place of this host's accelerators.
    """
    if accelerator:
        config = replace(config, mesh=replace(config.mesh, device="cuda"))
    room = find_room(config.mesh.device, accelerator)
    plan = limit_cache(config, plan_job_memory(config), room)
    table = make_memory_table(config, room, plan)
    needed = console_tables.measure_width(table, console.width)
    Console(stderr=console.stderr, width=max(console.width, needed)).print(table)


def make_memory_table(config: JobConfig, room: Room | None, plan: MemoryPlan) -> Table:
    """Return the estimate of each process by kind, with notes on what is not in it."""
    kinds = list(MemoryKinds().bytes_by_kind)
    titles = [TITLES.get(kind, kind) for kind in kinds]
    table = console_tables.make_table("process", "number", *titles, "total", wraps=False)
    table.title = f"estimated memory of each process ({config.mesh.device})"
    table.title_justify = table.caption_justify = "left"
    for one in plan.processes:
        sizes = [*one.bytes_by_kind.values(), one.total_bytes]
        cells = (describe_bytes(size) if size else "-" for size in sizes)
        table.add_row(one.process, str(one.count), *cells)
    notes = []
    if room is not None:
        owner = room.owner[0].upper() + room.owner[1:]
        notes.append(f"{owner} has {describe_bytes(room.size_bytes)}.")
    if plan.shares_core_worker:
        notes.append("Core and engine share a worker by time slices: it holds both.")
    if plan.frozen and shares_scoring_worker(config):
        notes.append("Frozen models take time slices on one of the core's workers.")
    elif plan.frozen:
        notes.append("Frozen models have a worker of their own.")
    if config.rollout.engine == "sglang" and not config.rollout.kv_tokens:
        notes.append("SGLang takes the free memory of its GPU for the KV cache.")
    elif not config.rollout.kv_tokens:
        notes.append("An engine's cache has at most the memory that is free (rollout.kv_memory).")
    if config.rollout.kv_tier_gib:
        gib = f"{config.rollout.kv_tier_gib:g}"
        notes.append(f"rollout.kv keeps up to {gib} GiB in host memory.")
    if excess := explain_excess(room, plan):
        notes.append(f"Warning: {excess}.")
    table.caption = " ".join(notes)
    return table
