"""Output of a separate process: a JSON document in the last line that it prints."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import DeadlineExceeded, MeshError
from meshrl.common.mesh.process.host import Host


async def run_for_document(
    host: Host, command: Sequence[str], name: str, logs: Path, timeout_s: float
) -> dict[str, Any]:
    """Run a command and return its document, which may be an `error`.

    `logs` is the directory of its temporary output file. Raises DeadlineExceeded, and MeshError
    with the last line if it exits without a document.
    """
    lines, has_exited = await run_for_lines(host, command, name, logs, timeout_s)
    if not has_exited:
        raise DeadlineExceeded(f"{name} has not answered within {timeout_s:g} s")
    try:
        found = json.loads(lines[-1])
    except (IndexError, ValueError):
        found = None
    if not isinstance(found, dict):
        last = lines[-1] if lines else "without a word"
        raise MeshError(f"{name} has exited without an answer: {last}")
    return found


async def run_for_lines(
    host: Host, command: Sequence[str], name: str, logs: Path, timeout_s: float
) -> tuple[list[str], bool]:
    """Run a command; return its output lines, and True if it exited by itself."""
    log = _make_log_path(logs, name)
    child = host.spawn(list(command), name=name, log=log)
    try:
        has_exited = await child.wait(timeout_s) is not None
        return log.read_text(errors="replace").strip().splitlines(), has_exited
    finally:
        child.kill()
        log.unlink(missing_ok=True)


def _make_log_path(logs: Path, name: str) -> Path:
    """Return a unique path: two commands may run at a time."""
    logs.mkdir(parents=True, exist_ok=True)
    return logs / f"{name.replace('/', '-')}-{uuid.uuid4().hex}.log"
