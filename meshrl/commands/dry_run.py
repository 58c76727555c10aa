"""`meshrl run --dry-run`: the job as it would run, its processes and their memory."""

from __future__ import annotations

import sys

from meshrl.commands import memory_table
from meshrl.job import hub_origins
from meshrl.job.checks.host.memory import explain_excess, find_room, plan_job_memory
from meshrl.job.defaults.choices import describe_choices
from meshrl.job.defaults.differences import select_differences
from meshrl.job.job_file import JobFile
from meshrl.job.toml.writer import to_toml
from meshrl.launch.services import service_plan
from meshrl.view.live import console_tables
from meshrl.view.terminal import Console


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
    memory_table.print_memory(job.config, console)


def print_choices(job: JobFile) -> None:
    """Print the chosen values, if there are any, to standard error."""
    if text := describe_choices(job.choices):
        print(f"{text} (--dry-run shows why)", file=sys.stderr)


def warn_of_excess(job: JobFile) -> None:
    """Print a warning if the job may run out of the memory of this host or its GPUs."""
    room, plan = find_room(job.config.mesh.device), plan_job_memory(job.config)
    if text := explain_excess(room, plan):
        print(f"warning: {text}", file=sys.stderr)
