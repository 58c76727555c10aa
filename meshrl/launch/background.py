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
from meshrl.common.mesh.process.ends.failure import tail
from meshrl.common.mesh.process.entry.child import PRIVATE
from meshrl.directory.places import MeshPlace, read_if_whole, running_launcher

POLL_S = 0.1


@dataclass(frozen=True)
class RootProgram:
    """A program that is the root process of a host, and how its start is told of."""

    module: str
    log: str  # name of its log
    start_s: float  # until it is ready
    failed: str  # of a start that fails
    late: str  # of one that takes longer


def start(program: RootProgram, place: MeshPlace, *words: str) -> int:
    """Start it and wait until it is ready; return its pid. MeshError with the end of its log when
    it ends before that; DeadlineExceeded.
    """
    place.logs.mkdir(parents=True, exist_ok=True)
    log = place.log(program.log)
    command = [sys.executable, "-m", program.module, "--root", str(place.root), *words]
    with log.open("a") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    until = time.monotonic() + program.start_s
    while running_launcher(place) != child.pid or not read_if_whole(place.launcher).get("ready"):
        if child.poll() is not None:
            said = "\n".join(tail(log, 5))
            raise MeshError(f"{program.failed}:\n{said}", fix=f"The log is {log}")
        if time.monotonic() > until:
            raise DeadlineExceeded(f"{program.late} after {program.start_s:g} s", where=str(log))
        time.sleep(POLL_S)
    return child.pid


def run_program(
    module: str, serve: Callable[[argparse.Namespace], Coroutine[Any, Any, int]], *documents: str
) -> NoReturn:
    """The life of a root process: its status is what `serve` returns of its options, --root and
    --health, and the `documents`, which are JSON.
    """
    os.umask(PRIVATE)
    parser = argparse.ArgumentParser(prog=module)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--health", default="")
    for name in documents:
        parser.add_argument(name, type=json.loads, default={})
    try:
        sys.exit(asyncio.run(serve(parser.parse_args())))
    except MeshError as error:
        sys.exit(f"error: {error}")
