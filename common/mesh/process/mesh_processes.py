"""Processes of a mesh and the programs that they run, from /proc.

Every process of a mesh inherits $MESHRL_MESH, whatever its current parent. So this finds processes
that no registry or process tree lists, and detects false entries of a foreign registry.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from meshrl.common.base.host.settings import MESH_TAG_ENV
from meshrl.common.mesh.process.child_handle import read_parent_pid, read_start_time

MODULE_PREFIX = "module:"  # before the name of an executed module: see `child.py`


def find_mesh_processes(tag: str) -> list[int]:
    """Find running processes with this mesh tag, and their descendants, except this process.

    Descendants may have cleared their environment.
    """
    pids = {int(name) for name in os.listdir("/proc") if name.isdigit()} - {os.getpid()}
    found = {pid for pid in pids if read_mesh_tag(pid) == tag}
    parents = {pid: read_parent_pid(pid) for pid in pids - found} if found else {}
    while below := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= below
    return sorted(pid for pid in found if read_start_time(pid))


def read_mesh_tag(pid: int) -> str:
    """Return the mesh tag that a process started with; empty without one or for another user's
    process.
    """
    begin = os.fsencode(f"{MESH_TAG_ENV}=")
    found = [one for one in _read_words(pid, "environ") if one.startswith(begin)]
    return os.fsdecode(found[0].removeprefix(begin)) if found else ""


def is_exec_in_progress() -> bool:
    """Return True if any process is between fork and exec: its mesh tag appears in a moment."""
    return any(_is_executing(int(name)) for name in os.listdir("/proc") if name.isdigit())


def _is_executing(pid: int) -> bool:
    if any(_read_words(pid, "environ")) or any(_read_words(pid, "cmdline")):
        return False
    try:
        return bool(os.readlink(f"/proc/{pid}/exe"))  # neither the kernel's own nor a zombie
    except OSError:  # another user's, or it has just ended
        return False


def is_mesh_program(pid: int, program: Sequence[str]) -> bool:
    """Return True if a process has this one's mesh tag and runs `program`.

    `program` is a module and the first words that follow it in the command line, however it was
    started.
    """
    expected, words = [os.fsencode(word) for word in program], _read_words(pid, "cmdline")
    words = [word.removeprefix(os.fsencode(MODULE_PREFIX)) for word in words]
    runs = any(words[at : at + len(expected)] == expected for at in range(len(words)))
    return runs and read_mesh_tag(pid) == os.environ.get(MESH_TAG_ENV, "")


def _read_words(pid: int, file: str) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes().split(b"\0")
    except OSError:  # another user's, or it has just ended
        return []
