"""Job on a host without access to the head's files, which trains as on the head."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
from pathlib import Path

import pytest

from meshrl.commands.logs import RemoteLogs, print_logs
from meshrl.common.records.checkpoints import list_manifest_paths, verify_checkpoint
from meshrl.common.state import events, jobs, registry
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.directory.directory_paths import MeshPaths
from meshrl.launch.head.launcher import Launcher
from meshrl.launch.head.mesh_shape import MeshShape
from meshrl.view.history import sample_files
from meshrl.view.trace import trace_writer
from tests.mesh.hosts.hidden_host import HiddenHost
from tests.mesh.hosts.joined_host import submit, until

pytestmark = [pytest.mark.timeout(300), pytest.mark.needs("root")]
LINES = 20  # of a log
HEAD = (MeshShape(workers=0, accepted_services=()),)  # all of the job is on the second host


async def test_job_runs_on_a_host_without_files_of_the_head(mesh: Launcher, tmp_path: Path) -> None:
    host = HiddenHost(MeshPaths(tmp_path / "second"), mesh, workers=4)
    second = host.name
    host.start()
    try:

        async def has_started() -> bool:
            assert host.program is not None and host.program.poll() is None, host.output
            return sum(w.alive for w in await pool.read_workers(mesh.state)) == 4

        await until("the workers of the second host", has_started)
        few = ["budget.steps=3", "training.checkpoint_every=1", "sandbox.processes=1"]
        few += ["mesh.workers=4", "planner.training=2"]
        frozen = ["models.reference.path=initial", "algorithm.kl_coefficient=0.1"]
        await submit(mesh, "digits", *few, *frozen)
        await kill_trainer(mesh)
        places: dict[str, str] = {}
        found: dict[str, int] = {}  # bytes of weights that were there already, by process

        async def has_ended() -> jobs.JobRow | None:
            for entry in await registry.list_entries(mesh.state):
                if entry.kind not in places or entry.host == second:
                    places[entry.kind] = entry.host
                if entry.host == second:
                    bytes_received = int(entry.stats.get("chunks_found_bytes", 0))
                    found[entry.name] = max(bytes_received, found.get(entry.name, 0))
            row = await jobs.read_job(mesh.state, "digits")
            return row if row.is_terminal else None

        row = await until("the end of the job", has_ended, 150)
        assert row.phase == "finished", f"{row.error}\n{host.output}"
        kinds = {kind for kind, host in places.items() if host == second}
        assert kinds >= {"engine", "hybrid", "rollout", "sandbox", "scoring", "trainer"}, places
        assert any(found.values()), found
        run_dir = mesh.mesh_paths.root / "digits"
        assert verify_checkpoint(list_manifest_paths(run_dir)[-1])["step"] == 3
        await assert_logs_readable_at_head(mesh, host)
        recent_events = await events.read_all(mesh.state)
        assert not [e.fields for e in recent_events if e.kind in ("damaged", "lineage")]
        assert sample_files.read_samples(run_dir) and not sample_files.list_corrupt(run_dir)
        recorded_event = trace_writer.read_notes(run_dir)
        assert recorded_event.shards and {r["kind"] for r in recorded_event.trainer} == {
            "step",
            "checkpoint",
        }
        assert recorded_event.engines
    finally:
        host.end()


async def kill_trainer(mesh: Launcher) -> None:
    """Kill the trainer after a commit: the next one resumes from a fetched checkpoint."""

    async def has_committed() -> bool:
        return (await jobs.read_job(mesh.state, "digits")).version >= 1

    await until("a step", has_committed)
    trainer = await registry.lookup(mesh.state, "trainer/digits")
    assert trainer is not None
    os.kill(trainer.pid, signal.SIGKILL)


async def assert_logs_readable_at_head(mesh: Launcher, host: HiddenHost) -> None:
    async with RemoteLogs.connect(mesh.mesh_paths) as remote:
        found, silent = await remote.list_logs()
    assert not silent and {(log.host, log.log_file.name) for log in found} >= {
        (host.name, "worker-h1w0"),
        (host.name, "trainer-digits"),
    }
    [engine, *_] = [p for p in host.place.logs.glob("engine-*.log") if p.stat().st_size]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        root = mesh.mesh_paths.root
        await asyncio.to_thread(print_logs, [engine.stem], root, LINES, False, False)
    assert printed.getvalue().splitlines() == engine.read_text().splitlines()[-LINES:]
