"""Modules that a test writes, to be run as processes of their own."""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap
from pathlib import Path

from common.process.handle import start_time


def module(tmp_path: Path, name: str, code: str) -> dict[str, str]:
    """Writes a module and returns the environment under which a child finds it."""
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(code))
    return {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def python(name: str, *arguments: str) -> list[str]:
    """The command line of a module."""
    return [sys.executable, "-m", name, *arguments]


async def ended(pid: int, within_s: float = 10.0) -> bool:
    """Whether a process ends in time."""
    for _ in range(int(within_s / 0.01)):
        if not start_time(pid):
            return True
        await asyncio.sleep(0.01)
    return False


async def written(path: Path) -> str:
    """What a process writes into a file, once it is there."""
    for _ in range(1000):
        if (text := content(path)).endswith("\n"):
            return text.strip()
        await asyncio.sleep(0.01)
    raise AssertionError(f"nothing in {path}")


def content(path: Path) -> str:
    """The text of a file; none of one that is not there."""
    return path.read_text() if path.exists() else ""
