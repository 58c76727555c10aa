"""Weight deltas between hosts: trainer, engine and store are on three hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshrl.common.state import jobs, registry
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.launch.head.launcher import Launcher
from tests.mesh.hosts.joined_host import create_neighbor_host, submit, until

pytestmark = pytest.mark.timeout(300)


@pytest.mark.deep
async def test_engine_on_another_host_receives_deltas(mesh: Launcher, tmp_path: Path) -> None:
    hosts = [create_neighbor_host(mesh, tmp_path / f"host{n}", f"h{n}w") for n in (1, 2)]
    for host in hosts:
        host.start()
    counters: dict[str, int] = {}

    async def has_applied_deltas() -> bool:
        for host in hosts:
            assert host.program is not None and host.program.poll() is None, host.output
        for entry in await registry.list_entries(mesh.state):
            for what in ("deltas_applied", "deltas_refused"):
                counters[what] = max(counters.get(what, 0), int(entry.stats.get(what, 0)))
        row = await jobs.read_job(mesh.state, "digits")
        assert not row.is_terminal, f"{row.error}\n{counters}"
        return counters["deltas_applied"] > 1 and row.steps_done >= 3

    # Steps so small that most float32 numbers do not change.
    slow = ["optimizer.muon_lr=0", "optimizer.adamw_lr=1e-10", "optimizer.warmup_steps=0"]

    async def has_version() -> bool:
        return sum(worker.alive for worker in await pool.read_workers(mesh.state)) == len(hosts)

    try:
        await until("a worker of each host", has_version)
        await submit(mesh, "digits", "budget.steps=100000", "mesh.workers=2", *slow)
        await until("weights that came as deltas", has_applied_deltas)
    finally:
        for host in hosts:
            host.end()
    assert not counters["deltas_refused"]
