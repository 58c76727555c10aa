"""Background start of a host's root process, which outlives its starter, and its entry point."""

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
    """Program that is the root process of a host, with its start messages."""

    module: str
    log_name: str  # name of its log
    start_timeout_s: float  # until it is ready
    failure_message: str  # error of a failed start
    timeout_message: str  # error of a start beyond its timeout


def start_in_background(program: RootProgram, mesh_paths: MeshPaths, *arguments: str) -> int:
    """Start the program and wait until it is ready; return its pid.

    Raises MeshError with the end of its log when it ends before that, or DeadlineExceeded.
    """
    mesh_paths.logs.mkdir(parents=True, exist_ok=True)
    log = mesh_paths.log_path(program.log_name)
    command = [sys.executable, "-m", program.module, "--root", str(mesh_paths.root), *arguments]
    with log.open("a") as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    until = time.monotonic() + program.start_timeout_s
    while find_root_pid(mesh_paths) != child.pid or not read_json_or_empty(
        mesh_paths.root_marker
    ).get("ready"):
        if child.poll() is not None:
            log_tail = "\n".join(read_tail(log, 5))
            raise MeshError(f"{program.failure_message}:\n{log_tail}", fix=f"Check the log {log}")
        if time.monotonic() > until:
            raise DeadlineExceeded(
                f"{program.timeout_message} after {program.start_timeout_s:g} s", where=str(log)
            )
        time.sleep(POLL_S)
    return child.pid


def run_root_program(
    module: str, serve: Callable[[argparse.Namespace], Coroutine[Any, Any, int]], *json_options: str
) -> NoReturn:
    """Run a root process and exit with the status that `serve` returns.

    `serve` gets the options --root, --health and the `json_options`, which are JSON.
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
