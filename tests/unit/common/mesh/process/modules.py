"""Modules that a test writes, to be run as processes of their own."""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap
import time
from pathlib import Path

from meshrl.common.mesh.process.child_handle import read_start_time
from tests.load import scaled


def module(tmp_path: Path, name: str, code: str) -> dict[str, str]:
    """Writes a module and returns the environment under which a child finds it."""
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(code))
    return {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def python(name: str, *arguments: str) -> list[str]:
    """The command line of a module."""
    return [sys.executable, "-m", name, *arguments]


async def ended(pid: int, within_s: float = 10.0) -> bool:
    """Whether a process ends in time."""
    until = time.monotonic() + scaled(within_s)
    while read_start_time(pid):
        if time.monotonic() > until:
            return False
        await asyncio.sleep(0.01)
    return True


async def written(path: Path) -> str:
    """What a process writes into a file, once it is there."""
    until = time.monotonic() + scaled(10.0)
    while not (text := content(path)).endswith("\n"):
        assert time.monotonic() < until, f"nothing in {path}"
        await asyncio.sleep(0.01)
    return text.strip()


def content(path: Path) -> str:
    """The text of a file; none of one that is not there."""
    return path.read_text() if path.exists() else ""
