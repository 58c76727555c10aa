"""Deltas between hosts: an engine on one host follows a trainer on another, with the store on a
third. It serves what was trained.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from meshrl.common.state import jobs, registry
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.launch.head.launcher import Launcher
from tests.mesh.hosts.joining import beside, submitted, until

pytestmark = pytest.mark.timeout(300)


@pytest.mark.deep
async def test_an_engine_elsewhere_gets_what_changed(mesh: Launcher, tmp_path: Path) -> None:
    hosts = [beside(mesh, tmp_path / f"host{n}", f"h{n}w") for n in (1, 2)]
    for host in hosts:
        host.start()
    counted: dict[str, int] = {}

    async def applied() -> bool:
        for host in hosts:
            assert host.program is not None and host.program.poll() is None, host.said
        for entry in await registry.list_entries(mesh.state):
            for what in ("deltas_applied", "deltas_refused"):
                counted[what] = max(counted.get(what, 0), int(entry.stats.get(what, 0)))
        row = await jobs.read_job(mesh.state, "digits")
        assert not row.is_terminal, f"{row.error}\n{counted}"
        return counted["deltas_applied"] > 1 and row.steps_done >= 3

    # Steps so small that most float32 numbers stay what they are.
    slow = ["optimizer.muon_lr=0", "optimizer.adamw_lr=1e-10", "optimizer.warmup_steps=0"]

    async def there() -> bool:
        return sum(worker.alive for worker in await pool.read_workers(mesh.state)) == len(hosts)

    try:
        await until("a worker of each host", there)
        await submitted(mesh, "digits", "budget.steps=100000", "mesh.workers=2", *slow)
        await until("weights that came as deltas", applied)
    finally:
        for host in hosts:
            host.end()
    assert not counted["deltas_refused"]
