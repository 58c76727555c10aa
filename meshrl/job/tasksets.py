"""Reader of a `verifiers` taskset's tasks as rows, by the interpreter that has the package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import ConfigError
from meshrl.common.job.config import JobConfig
from meshrl.common.mesh.process.diagnosis import failure
from meshrl.common.mesh.process.entry import child
from meshrl.job.dataset_rows import check_sendable

BOOT_SCRIPT = (
    Path(__file__).parents[1] / "services" / "environment" / "verifiers_environment" / "boot.py"
)
GUARD_COMMAND = [sys.executable, "-I", "-S", str(child.__file__)]
LOAD_TIMEOUT_S = 1800.0  # a taskset may fetch its data first


def load_tasks(config: JobConfig, modules: Path) -> tuple[list[str], list[str]]:
    """Return (held-out rows, training rows) as JSON lines.

    Raises ConfigError with the taskset's output.
    """
    environment, dataset = config.environment, config.dataset
    most = dataset.tasks + dataset.held_out_tasks if dataset.tasks else 0
    with tempfile.TemporaryDirectory() as scratch:
        rows = Path(scratch) / "rows.jsonl"
        argv = [environment.python, "-I", str(BOOT_SCRIPT), "--taskset", environment.verifiers]
        argv += ["--options", json.dumps(environment.verifiers_options), "--most", str(most)]
        argv += ["--modules", str(modules), "--rows", str(rows)]
        log = Path(scratch) / "said"
        try:
            with run_guarded([f"exec:{argv[0]}", *argv[1:]], log) as process:
                code = process.wait(LOAD_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            wrong = f"taskset {environment.verifiers!r} did not load in {LOAD_TIMEOUT_S:.0f} s"
            raise ConfigError(wrong) from error
        if code:
            log_tail = "\n".join(failure.read_tail(log, 3))
            raise ConfigError(f"taskset {environment.verifiers!r} failed to load: {log_tail}")
        lines = rows.read_text(encoding="utf-8").splitlines()
    if len(lines) <= dataset.held_out_tasks:
        raise ConfigError(
            f"taskset {environment.verifiers!r} has {len(lines)} tasks",
            fix="Lower dataset.held_out_tasks: no task remains to train on",
        )
    for number, line in enumerate(lines, 1):
        check_sendable(f"taskset {environment.verifiers!r}, task {number}", json.loads(line))
    return lines[: dataset.held_out_tasks], lines[dataset.held_out_tasks :]


@contextmanager
def run_guarded(
    argv: list[str], log: Path, *, python: Sequence[str] = GUARD_COMMAND, **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program that writes to `log`; all its children end with the block.

    `python` takes its command line as `child.py` does. `options` are those of `Popen`.
    """
    owner, ours = os.pipe()  # a guard ends all of them, and bounds what they write
    fds = [owner, *options.pop("pass_fds", ())]
    try:
        with log.open("ab") as log_file:
            command = [*python, f"guard={owner}", "--", *argv]
            process = subprocess.Popen(
                command, stdout=log_file, stderr=log_file, pass_fds=fds, **options
            )
    finally:
        os.close(owner)
    try:
        yield process
    finally:
        os.close(ours)
        process.wait()


def get_module_name(taskset: str) -> str:
    """Return the module that a taskset's id names: `owner/my-tasks@1` is `my_tasks`."""
    return taskset.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()
