"""A gang of two workers as real processes: a resident is ready when all its ranks are."""

from __future__ import annotations

import os
import signal

import pytest

from meshrl.common.state.pool.workers.rows import Doing, Role
from tests.unit.node.smallmesh import SmallMesh, gone


@pytest.mark.rotating(2)
async def test_a_resident_is_ready_when_all_its_ranks_are(mesh: SmallMesh) -> None:
    mesh.start_agent(workers=3)
    await mesh.form("w2", "w0")
    await mesh.form("w1", gang="g1")
    await mesh.place("g0.0", Role.TRAINING, core=True, ranks=(0, 1))
    await mesh.place("g0.1", ranks=(1,))  # beside the second rank, which is on w0
    await mesh.until_settled("g0.0")
    await mesh.until_settled("g0.1")
    core, rank = await mesh.pid_of("trainer/j"), await mesh.pid_of("rank/j/1")
    engine = await mesh.pid_of("engine/g0.1")

    os.kill(rank, signal.SIGKILL)  # its worker starts it again; the others have no part in it
    again = await mesh.pid_of("rank/j/1", other_than=rank)
    await mesh.until_settled("g0.0")
    assert [await mesh.pid_of(name) for name in ("trainer/j", "engine/g0.1")] == [core, engine]

    worker = await mesh.pid_of("worker/w0")
    os.kill(worker, signal.SIGKILL)  # takes its role processes with it
    assert await gone(again) and await gone(engine)
    await mesh.pid_of("worker/w0", other_than=worker)
    await mesh.until_settled("g0.0")
    await mesh.until_settled("g0.1")
    assert await mesh.pid_of("trainer/j") == core

    await mesh.remove("g0.0")
    assert await gone(core)
    drained = (mesh.directory / "drained").read_text().splitlines()
    assert drained == ["g0.0 is gone from the record"] * len(drained) and drained


async def test_an_engine_has_one_process_on_its_first_worker(mesh: SmallMesh) -> None:
    mesh.start_agent(workers=2)
    await mesh.form("w1", "w0")
    await mesh.place("g0.0", job="slow", ranks=(1,))  # on w0, and leaves in seconds
    await mesh.until_settled("g0.0")
    leaves = await mesh.pid_of("engine/g0.0")
    await mesh.remove("g0.0")
    await mesh.place("g0.1", ranks=(0, 1))
    engine = await mesh.pid_of("engine/g0.1")
    assert await gone(leaves), "it begins when nobody else is on the accelerators of its gang"
    found = await mesh.until_settled("g0.1")
    assert {report.doing for report in found.reports.values()} == {Doing.READY}
    assert found.reports[1].token != found.reports[0].token

    worker = await mesh.pid_of("worker/w0")
    os.kill(worker, signal.SIGKILL)  # it keeps the accelerator again when it is back
    await mesh.pid_of("worker/w0", other_than=worker)
    token = found.reports[1].token
    await mesh.until("kept", "g0.1", lambda r: r.settled and r.reports[1].token != token)
    assert await mesh.pid_of("engine/g0.1") == engine
    await mesh.remove("g0.1")
    assert await gone(engine)
