"""`meshrl run --dry-run`: the job as it would run, its processes and their memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from rich.table import Table

from meshrl.common.state.pool.demand.requirements import shares_core_worker
from meshrl.job import hub_origins
from meshrl.job.checks.host.devices import list_devices
from meshrl.job.defaults.choices import describe_choices
from meshrl.job.defaults.differences import select_differences
from meshrl.job.defaults.memory import GIB, ProcessMemory, estimate_memory
from meshrl.job.job_file import JobFile
from meshrl.job.toml.writer import to_toml
from meshrl.launch.services import service_plan
from meshrl.view.live import console_tables
from meshrl.view.terminal import Console

MIB = 1 << 20
COLUMNS: dict[str, Callable[[ProcessMemory], int]] = {
    "weights": lambda one: one.weights,
    "optimizer": lambda one: one.optimizer,
    "gradients": lambda one: one.gradients,
    "activations": lambda one: one.activations,
    "KV cache": lambda one: one.kv_cache,
    "total": lambda one: one.total_bytes,
}


def print_dry_run(job: JobFile, everything: bool) -> None:
    """Print the job to standard output, as TOML that runs, and the plan to standard error.

    `everything`: with the keys that have their defaults.
    """
    reasons = {choice.key: f"chosen: {choice.reason}" for choice in job.choices}
    portable = job.with_config(hub_origins.restore_ids(job.config))
    document = portable.config.to_document() if everything else select_differences(portable)
    print(to_toml(document, reasons), end="")
    console = Console(stderr=True)
    table = console_tables.make_table("process", "what it does")
    table.title, table.title_justify = "processes", "left"
    for row in service_plan.describe_processes(job.config):
        table.add_row(*row)
    console.print(table)
    memory = _make_memory_table(job)
    needed = console_tables.measure_width(memory, console.width)
    Console(stderr=True, width=max(console.width, needed)).print(memory)


def print_choices(job: JobFile) -> None:
    """Print the chosen values, if there are any, to standard error."""
    if text := describe_choices(job.choices):
        print(f"{text} (--dry-run shows why)", file=sys.stderr)


def warn_of_excess(job: JobFile) -> None:
    """Print a warning if the estimate exceeds the memory of this host or its GPUs."""
    if text := _describe_excess(job, estimate_memory(job.config)):
        print(f"warning: {text}", file=sys.stderr)


def _describe_excess(job: JobFile, processes: list[ProcessMemory]) -> str:
    room_bytes = _read_room_bytes(job.config.mesh.device)
    if job.config.mesh.device == "cpu":
        needed, where = sum(one.count * one.total_bytes for one in processes), "this host"
    else:
        sizes = [one.total_bytes for one in processes]
        needed = sizes[0] + sizes[1] if shares_core_worker(job.config) else max(sizes)
        where = "a GPU"
    if needed <= room_bytes:
        return ""
    return (
        f"the job needs about {_format_size(needed)} of {where}, which has "
        f"{_format_size(room_bytes)}. Lower rollout.slots, rollout.max_tokens or "
        "training.bin_tokens, or set rollout.kv_tokens, training.activation_checkpointing or "
        "lora.rank"
    )


def _read_room_bytes(device: str) -> int:
    """Return the memory of the smallest GPU, or of this host."""
    if device == "cuda" and any(sizes := [one.memory_bytes for one in list_devices()]):
        return min(size for size in sizes if size)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _make_memory_table(job: JobFile) -> Table:
    """Return the estimated memory of each process with a model."""
    rollout, device = job.config.rollout, job.config.mesh.device
    table = console_tables.make_table("process", "number", *COLUMNS, wraps=False)
    table.title, table.title_justify = f"estimated memory of each process ({device})", "left"
    processes = estimate_memory(job.config)
    for one in processes:
        sizes = (_format_size(read(one)) for read in COLUMNS.values())
        table.add_row(one.process, str(one.count), *sizes)
    where = "This host" if device == "cpu" else "The smallest GPU"
    notes = [f"{where} has {_format_size(_read_room_bytes(device))}."]
    if shares_core_worker(job.config):
        notes.append("Core and engine share a worker by time slices: it holds both.")
    if rollout.engine == "sglang" and not rollout.kv_tokens:
        notes.append("SGLang takes the free memory of its GPU for the KV cache.")
    if rollout.kv_tier_gib:
        notes.append(f"rollout.kv keeps up to {rollout.kv_tier_gib:g} GiB in host memory.")
    if excess := _describe_excess(job, processes):
        notes.append(f"Warning: {excess}.")
    table.caption, table.caption_justify = " ".join(notes), "left"
    return table


def _format_size(size_bytes: float) -> str:
    """Return a size in GiB, or in MiB below one GiB; `-` for 0."""
    if not size_bytes:
        return "-"
    return f"{size_bytes / GIB:.1f} GiB" if size_bytes >= GIB else f"{size_bytes / MIB:.1f} MiB"
