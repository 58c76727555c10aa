"""An agent takes up, and ends, what it started or what is plainly its own: no registry that others
write has it end anything else.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.host.settings import MESH_ENV
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.handle import start_time
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.runtime.mesh import MeshSettings
from meshrl.common.state import registry
from meshrl.services.node.adopting import Notes
from meshrl.services.node.job_services import program
from tests.load import scaled
from tests.meshes import alone

SOON_S = 30.0  # for a process to be gone, on a busy host
NAME = "rollout/calc/0"
OURS, ANOTHERS = "a mark", "another mark"


@contextmanager
def running(mark: str, *words: str) -> Iterator[int]:
    code = "import time; print(flush=True); time.sleep(600)"
    with subprocess.Popen(
        [sys.executable, "-c", code, *words],
        env={**os.environ, MESH_ENV: mark},
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        try:
            yield child.pid
        finally:
            child.kill()


@pytest.mark.parametrize(
    ("mark", "named", "known"),
    [
        (OURS, NAME, True),
        (OURS, "rollout/calc/1", False),
        (OURS, "", False),
        (ANOTHERS, NAME, False),
    ],
)
async def test_what_the_registry_names_must_be_that_process_of_this_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str, named: str, known: bool
) -> None:
    monkeypatch.setenv(MESH_ENV, OURS)
    settings = MeshSettings(redis_url="simulated", run_root=str(tmp_path), host="one")
    mesh = alone("node/one", SystemClock(), Random(0), SystemHost(), settings=settings)
    notes = Notes(mesh, tmp_path / "notes.json", program)
    with running(mark, *(program(named) if named else ())) as pid:
        entry = registry.Entry(NAME, "rollout", host="one", pid=pid, incarnation="x")
        entry.start_time = start_time(pid)
        await registry.register(mesh.state, entry, 600_000)
        strange = registry.Entry("rollout/calc", "rollout", host="one", pid=pid, incarnation="y")
        await registry.register(mesh.state, strange, 600_000)
        assert list(await notes.running(["rollout"])) == [NAME][: int(known)]
        ended = await notes.end_unwatched(NAME)
        assert (ended is not None) == known
        if ended is not None:
            await ended.wait(scaled(SOON_S))
        assert bool(start_time(pid)) != known
