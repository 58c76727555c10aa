"""Queries and changes of a run's versions in a process of its own: list, pin, compare, export.

The process reads the store, with or without a running mesh.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from meshrl.common.base.errors import MeshError, from_wire
from meshrl.common.base.files.remote_directory import redact_url
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.process.spawning import SpawnOptions
from meshrl.directory import job_file

POLL_S = 0.01


def build_command(arguments: Sequence[str | Path]) -> list[str]:
    """Return the command line of the process: `arguments` are the command and its arguments."""
    return [sys.executable, "-m", "meshrl.services.weights.versions", *map(str, arguments)]


def build_arguments(
    action: str, run: str | Path, version: str = "", note: str = ""
) -> list[str | Path]:
    """Return the arguments of `list`, `pin` and `unpin`; no user input is parsed as an option."""
    note_options = [f"--note={note}"] if note else []
    return [action, *note_options, "--", run, *([version] if action != "list" else [])]


def run_versions_command(*arguments: str | Path) -> dict[str, Any]:
    """Return the answer to a command. Raises the command's own error."""
    with TemporaryDirectory(prefix="meshrl-versions-") as scratch:
        log = Path(scratch) / "said"
        # No other thread can tie it.
        dies_with_parent = threading.current_thread() is threading.main_thread()
        child = SystemHost().spawn(
            build_command(arguments),
            name="versions",
            log=log,
            options=SpawnOptions(die_with_parent=dies_with_parent),
        )
        try:
            while child.poll() is None:
                time.sleep(POLL_S)
        finally:
            child.kill()
        text = log.read_text(errors="replace")
    last_lines = "\n".join(line for line in text.splitlines() if line.startswith("{"))
    return parse_answer(last_lines, text)  # whatever else it wrote stands in the same file


async def copy_versions(run: Path, stop: asyncio.Event) -> str:
    """Copy the retained versions of a finished run to its `weights.copies`; `stop` ends the copy.

    Returns why some versions are missing there, empty if all are present.
    """
    place = (
        job_file.read_job_file(run / job_file.JOB_FILE_NAME)["document"]
        .get("weights", {})
        .get("copies", "")
    )
    if not place:
        return ""
    public_url = redact_url(place)
    print(f"copying versions to {public_url}", flush=True)
    copying = asyncio.create_task(run_command(build_command(["copy", f"--to={place}", "--", run])))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([copying, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not copying.done():
            return f"some versions are missing at {public_url}: the copy was stopped"
        _, output, error_output = copying.result()
        found = parse_answer(output, error_output)
        if failed := found["failed"]:
            why = from_wire(failed[0]["error"]["code"], failed[0]["error"]["text"])
            more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
            first = failed[0]["manifest"][:8]
            return f"some versions are missing at {public_url}: {first}{more}: {why}"
    except MeshError as error:
        return f"some versions are missing at {public_url}: {error}"
    finally:
        copying.cancel()
        stopping.cancel()
        await asyncio.gather(copying, stopping, return_exceptions=True)
    return ""


async def run_command(arguments: Sequence[str]) -> tuple[int, str, str]:
    """Return the exit status of a process, its standard output and its standard error."""
    process = await asyncio.create_subprocess_exec(*arguments, stdout=PIPE, stderr=PIPE)
    try:
        output, error_output = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    code = process.returncode or 0
    return code, output.decode(errors="replace"), error_output.decode(errors="replace")


def parse_answer(stdout: str, stderr: str) -> dict[str, Any]:
    """Return the process's last output, or raise the error that it reported."""
    lines = stdout.strip().splitlines()
    try:
        found: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        why = stderr.strip().splitlines() or ["no error output"]
        raise MeshError(
            f"reading the versions failed: {why[-1]:.300}",
            fix="Report this defect of MeshRL with that line",
        ) from None
    if error := found.get("error"):
        raise from_wire(error["code"], error["text"])
    return found
