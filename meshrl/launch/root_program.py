"""Starts the root process of a host in the background, where it goes on when its starter ends; and
the entry of such a process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from meshrl.common.base.errors import DeadlineExceeded, MeshError
from meshrl.common.mesh.process.diagnosis.failure import read_tail
from meshrl.common.mesh.process.entry.child import PRIVATE_UMASK
from meshrl.directory.directory_paths import MeshPaths, find_root_pid, read_json_or_empty

POLL_S = 0.1


@dataclass(frozen=True)
class RootProgram:
    """A program that is the root process of a host, and how its start is told of."""

    module: str
    log_name: str  # name of its log
    start_timeout_s: float  # until it is ready
    failure_message: str  # of a start that fails
    timeout_message: str  # of one that takes longer


def start_in_background(program: RootProgram, mesh_paths: MeshPaths, *arguments: str) -> int:
    """Start it and wait until it is ready; return its pid. MeshError with the end of its log when
    it ends before that; DeadlineExceeded.
    """
    mesh_paths.logs.mkdir(parents=True, exist_ok=True)
    log = mesh_paths.log_path(program.log_name)
    command = [sys.executable, "-m", program.module, "--root", str(mesh_paths.root), *arguments]
    with log.open("a") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    until = time.monotonic() + program.start_timeout_s
    while find_root_pid(mesh_paths) != child.pid or not read_json_or_empty(mesh_paths.launcher).get(
        "ready"
    ):
        if child.poll() is not None:
            said = "\n".join(read_tail(log, 5))
            raise MeshError(f"{program.failure_message}:\n{said}", fix=f"The log is {log}")
        if time.monotonic() > until:
            raise DeadlineExceeded(
                f"{program.timeout_message} after {program.start_timeout_s:g} s", where=str(log)
            )
        time.sleep(POLL_S)
    return child.pid


def run_root_program(
    module: str, serve: Callable[[argparse.Namespace], Coroutine[Any, Any, int]], *json_options: str
) -> NoReturn:
    """The life of a root process: its status is what `serve` returns of its options, --root and
    --health, and the `documents`, which are JSON.
    """
    os.umask(PRIVATE_UMASK)
    parser = argparse.ArgumentParser(prog=module)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--health", default="")
    for name in json_options:
        parser.add_argument(name, type=json.loads, default={})
    try:
        sys.exit(asyncio.run(serve(parser.parse_args())))
    except MeshError as error:
        sys.exit(f"error: {error}")
