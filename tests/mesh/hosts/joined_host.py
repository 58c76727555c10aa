"""Hosts for tests: a mesh of this process, and other directories of this machine that join it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from meshrl.common.base.host.settings import REDIS_ENV, MeshSettings
from meshrl.common.state import jobs
from meshrl.common.state.redis.client import open_sync_client, run_script_once
from meshrl.common.state.redis.keys import MESH_PREFIX
from meshrl.directory.directory_paths import MeshPaths
from meshrl.job import bundle, job_reader
from meshrl.launch.head.launcher import Launcher
from meshrl.launch.hosts.host_launcher import HostShape
from tests.load import scaled
from tests.mesh.running import JOB, ROOT

HOSTING = (sys.executable, "-m", "meshrl.launch.hosts.host_launcher")
WITHIN_S = 90.0
END_S = 60.0

T = TypeVar("T")


class JoinedHost:
    """Second directory whose root process is its own program."""

    left_out: tuple[str, ...] = (REDIS_ENV,)  # of the environment

    def __init__(self, place: MeshPaths) -> None:
        self.place = place
        self.program: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        return MeshSettings.from_file(self.place.settings).host

    @property
    def command(self) -> list[str]:
        """Return the command that `meshrl join` runs."""
        return [*HOSTING, "--root", str(self.place.root)]

    def start(self) -> None:
        self.place.logs.mkdir(parents=True, exist_ok=True)
        environment = {k: v for k, v in os.environ.items() if k not in self.left_out}
        with self.place.log_path("hosting").open("ab") as log:
            self.program = subprocess.Popen(
                self.command,
                env={**environment, "PYTHONPATH": str(ROOT)},
                stdout=log,
                stderr=log,
            )

    def end(self) -> int:
        """Stop the host regularly and return its exit status."""
        assert self.program is not None
        self.program.send_signal(signal.SIGTERM)
        return self.program.wait(scaled(END_S))

    @property
    def output(self) -> str:
        logs = sorted(self.place.logs.glob("*.log"))
        return "\n".join(f"--- {f.name}\n{f.read_text(errors='replace')[-1500:]}" for f in logs)


def admit(mesh: Launcher, host: str) -> None:
    """Admit the keys of a host, as the head does when a host joins."""
    with contextlib.closing(open_sync_client(mesh.settings.redis_url, scaled(WITHIN_S))) as client:
        run_script_once(client, "admit_host", [MESH_PREFIX], {"host": host})


def create_neighbor_host(mesh: Launcher, root: Path, prefix: str = "h1w") -> JoinedHost:
    """Start a host with one worker that shares the mesh's secret and reaches its Redis."""
    place = MeshPaths(root)
    place.directory.mkdir(parents=True, mode=0o700)
    settings = replace(mesh.settings, host=f"{root.name}-1", run_root=str(root))
    admit(mesh, settings.host)
    settings.to_file(place.settings)
    HostShape(workers=1, worker_prefix=prefix).write(place)
    return JoinedHost(place)


async def until(
    what: str, poll: Callable[[], Awaitable[T | None]], within_s: float = WITHIN_S
) -> T:
    """Wait until `poll` returns a true value, and return the value."""
    within_s = scaled(within_s)
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if found := await poll():
            return found
        await asyncio.sleep(0.05)
    raise AssertionError(f"not {what} within {within_s:g} s")


async def submit(mesh: Launcher, job: str, *words: str) -> None:
    """Submit the job of digits."""
    config, base = job_reader.load_config(JOB, [f"name={job}", *words])
    run_dir = mesh.mesh_paths.root / job
    _, document = bundle.pack_bundle(config, base, run_dir)
    await jobs.submit(mesh.state, job, document, str(run_dir), uuid.uuid4().hex)
