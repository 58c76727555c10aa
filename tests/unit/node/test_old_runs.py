"""What a joined host has kept of runs goes when they are over, and nothing of the head's does."""

from __future__ import annotations

import os
from pathlib import Path

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.files.home import make
from meshrl.common.job.config import JobConfig
from meshrl.common.mesh.runtime.mesh import MeshSettings
from meshrl.common.state import jobs
from meshrl.common.state.server import home
from meshrl.services.node.old_runs import UNKNOWN_S, sweep
from meshrl.sim.redis.state import simulated_state
from tests.meshes import on_sockets


async def test_only_what_no_job_goes_on_with_is_removed(tmp_path: Path) -> None:
    clock, root = SystemClock(), tmp_path / "second"
    state = simulated_state(clock)
    await home.tell(state, make("head", tmp_path / "head", b"probe"))
    settings = MeshSettings(redis_url=state.url, run_root=str(root), host="second")
    mesh = on_sockets("node/second", state, clock, settings=settings)
    for job in ("going", "ended"):
        await jobs.submit(state, job, JobConfig(name=job).document(), "/runs", job)
    await jobs.cancel(state, "ended", "stop")
    since = {job: (await jobs.job(state, job)).since_ms for job in ("going", "ended")}
    kept = [f"going/{since['going']}", "unknown/7", "going/notes"]
    gone = ["going/1", f"ended/{since['ended']}", "forgotten/8"]
    for name in (*kept, *gone):
        (root / "runs" / name / "ledger").mkdir(parents=True)
    long_ago = clock.wall() - 2 * UNKNOWN_S
    for path in (root / "runs/forgotten/8/ledger", root / "runs/forgotten/8"):
        os.utime(path, (long_ago, long_ago))

    (root / "bundles/.gone-a-bundle.123/modules").mkdir(parents=True)  # by one that was killed
    (root / "bundles/another").mkdir()
    (unused := root / "chunks/5e/5e").parent.mkdir(parents=True)
    unused.touch()
    os.utime(unused, (long_ago, long_ago))

    await home.tell(state, make("second", tmp_path / "head", b"probe"))
    await sweep(mesh)  # at home nothing else goes
    assert [path.name for path in (root / "bundles").iterdir()] == ["another"]
    assert all((root / "runs" / name).is_dir() for name in (*kept, *gone)) and unused.exists()
    await home.tell(state, make("head", tmp_path / "head", b"probe"))
    await sweep(mesh)
    assert all((root / "runs" / name).is_dir() for name in kept)
    assert not any((root / "runs" / name).exists() for name in gone)
    assert not (root / "runs/ended").exists() and not unused.exists()
    await mesh.leave()
    await state.close()
