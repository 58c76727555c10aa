"""`meshrl run --dry-run`: the resolved job as TOML that could be run, and the process plan."""

from __future__ import annotations

from rich.table import Table

from common.job.config import JobConfig
from meshrl.job.toml.writing import to_toml
from meshrl.launch.services import plan
from meshrl.view.terminal import Console


def show(config: JobConfig) -> None:
    """The job goes to the standard output, so that it may be redirected into a file and run; the
    plan is for the eyes.
    """
    print(to_toml(config.document()), end="")
    table = Table(title="processes", title_justify="left", box=None, pad_edge=False)
    table.add_column("process")
    table.add_column("what it does", overflow="fold")
    for name, purpose in plan.described(config):
        table.add_row(name, purpose)
    Console(stderr=True).print(table)
