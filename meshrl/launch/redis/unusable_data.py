"""Reasons of a Redis not to load its file, and renaming of a user's keys."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from redis.exceptions import ResponseError

from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.redis.keys import MESH_PREFIX, job_prefix

# Log lines in which a server rejects its file, and in which it blames the host for that.
LOAD_ERROR = re.compile(r"append.?only|\bAOF\b|\bRDB\b|loading DB|manifest", re.IGNORECASE)
HOST_ERROR = re.compile(
    r"permission denied|no space left|too many open|cannot allocate|address|chdir", re.IGNORECASE
)


def find_load_error(log: Path, offset: int) -> str:
    """Return the warning after `offset` in the log with which the server blames its file, or ""."""
    if not log.is_file():  # the server has never started
        return ""
    with log.open("rb") as file:
        file.seek(offset)
        lines = file.read().decode(errors="replace").splitlines()
    warnings = [line.partition(" # ")[2] for line in lines if " # " in line]
    if any(HOST_ERROR.search(warning) for warning in warnings):
        return ""
    return next((one for one in reversed(warnings) if LOAD_ERROR.search(one)), "").strip()


async def rename_keys(state: StateClient, jobs: Iterable[str], timestamp_ms: int) -> None:
    """Rename the keys of the mesh and its jobs in a server of the user's.

    Keys that name the owner come last, so that an interrupted rename is repeated.
    """
    for prefix in [*map(job_prefix, jobs), MESH_PREFIX]:
        cursor: Any = "0"
        while True:
            cursor, keys = await state.run_command("SCAN", cursor, "MATCH", f"{prefix}*")
            for key in keys:
                try:
                    await state.run_command("RENAME", key, f"aside:{timestamp_ms}:{key}")
                except ResponseError as error:
                    if "no such key" not in str(error):  # the key has expired since
                        raise
            if str(cursor) == "0":
                break
    print(
        f"the former keys of Redis were renamed with the prefix aside:{timestamp_ms}:",
        file=sys.stderr,
        flush=True,
    )
