"""Modules that a test writes and runs as separate processes."""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap
import time
from pathlib import Path

from meshrl.common.mesh.process.child_handle import read_start_time
from tests.load import scaled


def write_module(tmp_path: Path, name: str, code: str) -> dict[str, str]:
    """Write a module and return the environment in which a child finds it."""
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(code))
    return {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def python_argv(name: str, *arguments: str) -> list[str]:
    """Return the command line of a module."""
    return [sys.executable, "-m", name, *arguments]


async def wait_until_ended(pid: int, within_s: float = 10.0) -> bool:
    """Return True if the process ends in time."""
    until = time.monotonic() + scaled(within_s)
    while read_start_time(pid):
        if time.monotonic() > until:
            return False
        await asyncio.sleep(0.01)
    return True


async def wait_for_line(path: Path) -> str:
    """Return the line that a process writes into a file, once it is complete."""
    until = time.monotonic() + scaled(10.0)
    while not (text := read_or_empty(path)).endswith("\n"):
        assert time.monotonic() < until, f"nothing in {path}"
        await asyncio.sleep(0.01)
    return text.strip()


def read_or_empty(path: Path) -> str:
    """Return the text of a file, or "" if it does not exist."""
    return path.read_text() if path.exists() else ""
