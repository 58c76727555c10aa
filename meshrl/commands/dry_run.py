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


def _make_memory_table(job: JobFile) -> Table:
    """Return the estimated memory of each process with a model."""
    mesh, kv_gib = job.config.mesh, job.config.rollout.kv_memory_gib
    table = console_tables.make_table("process", "number", *COLUMNS, wraps=False)
    table.title, table.title_justify = f"estimated memory of each process ({mesh.device})", "left"
    processes = estimate_memory(job.config)
    for one in processes:
        sizes = (_format_size(read(one)) for read in COLUMNS.values())
        table.add_row(one.process, str(one.count), *sizes)
    notes = []
    if shares_core_worker(job.config):
        notes.append("Core and engine share a worker by time slices: it holds both.")
    if job.config.rollout.engine == "sglang" and not job.config.rollout.kv_tokens:
        notes.append("SGLang takes the free memory of its GPU for the KV cache.")
    if kv_gib:
        notes.append(f"rollout.kv keeps up to {kv_gib:g} GiB in host memory.")
    if mesh.device == "cuda":
        gpu_sizes = sorted({device.memory_bytes for device in list_devices()})
        notes.append(f"This host's GPUs have {', '.join(map(_format_size, gpu_sizes))}.")
    else:
        total = sum(one.count * one.total_bytes for one in processes)
        own = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        notes.append(f"All take {_format_size(total)}; this host has {_format_size(own)}.")
    table.caption, table.caption_justify = " ".join(notes), "left"
    return table


def _format_size(size_bytes: float) -> str:
    """Return a size in GiB, or in MiB below one GiB; `-` for 0."""
    if not size_bytes:
        return "-"
    return f"{size_bytes / GIB:.1f} GiB" if size_bytes >= GIB else f"{size_bytes / MIB:.1f} MiB"
