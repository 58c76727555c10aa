"""`meshrl samples`: prints the trajectories that a run has stored."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.text import Text

from meshrl.common.base.errors import NotFound
from meshrl.common.base.host.terminal import escape_controls
from meshrl.directory.directory_paths import read_json_or_empty
from meshrl.directory.job_file import JOB_FILE_NAME
from meshrl.view.history.sample_files import (
    Sample,
    describe_row,
    find_file_ends,
    format_heading,
    list_corrupt,
    matches_order,
    read_new,
    read_samples,
    select_samples,
    split_parts,
)
from meshrl.view.terminal import Console

POLL_S = 0.5  # between two polls for new samples
STYLES = {"prompt": "dim", "model": "cyan", "tool": "yellow", "environment": "green"}


def print_samples(
    run_dir: Path, step: int | None, order: str, limit: int, follow: bool, as_json: bool
) -> None:
    """Print samples of a run. Raises NotFound when it has none and `follow` is not set."""
    read_to = find_file_ends(run_dir)
    for line in list_corrupt(run_dir):
        print(f"corrupt: {line}; readable samples follow", file=sys.stderr)
    found = [s for s in read_samples(run_dir) if step is None or s["step"] == step]
    if not found and not follow:
        of = "" if step is None else f" of step {step}"
        raise NotFound(
            f"{run_dir} has no samples{of} yet",
            fix="Wait until trajectories end, or wait here with --follow",
        )
    console = Console(highlight=False, soft_wrap=True)
    document = read_json_or_empty(run_dir / JOB_FILE_NAME).get("document", {})
    for sample in select_samples(found, order, limit):
        _print_sample(console, sample, document, as_json)
    if follow:
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                for sample in read_new(run_dir, read_to):
                    if (step is None or sample["step"] == step) and matches_order(sample, order):
                        _print_sample(console, sample, document, as_json)
                time.sleep(POLL_S)


def _print_sample(
    console: Console, sample: Sample, document: Mapping[str, Any], as_json: bool
) -> None:
    if as_json:
        print(json.dumps(sample), flush=True)
        return
    console.print(
        Text(
            escape_controls(format_heading(sample)), style="bold red" if sample["error"] else "bold"
        )
    )
    for role, title, text in split_parts(sample):
        label = Text(f"{title}: ", style=f"bold {STYLES[role]}")
        console.print(label.append(Text(escape_controls(text), style=STYLES[role])))
    for title, text in describe_row(sample, document):
        label = Text(f"{escape_controls(title)}: ", style="bold")
        console.print(label.append(Text(escape_controls(text), style="")))
    console.print()
    sys.stdout.flush()
