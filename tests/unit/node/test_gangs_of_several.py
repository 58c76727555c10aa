"""A gang of two workers as real processes: ready, moved and lost as one."""

from __future__ import annotations

import os
import signal

import pytest

from common.errors import ConfigError
from services.node.agent import Seat, seats
from tests.unit.node.smallmesh import SmallMesh, gone


def test_the_first_workers_of_a_host_make_its_gang() -> None:
    assert seats(4, "a", 2) == [
        Seat("a0", 0, 2),
        Seat("a0", 1, 2),
        Seat("a1", 0, 1),
        Seat("a2", 0, 1),
    ]
    assert seats(2, "g", 1) == [Seat("g0", 0, 1), Seat("g1", 0, 1)]
    with pytest.raises(ConfigError, match="3 ranks"):
        seats(2, "g", 3)


async def test_a_gang_is_ready_when_all_its_workers_are(mesh: SmallMesh) -> None:
    mesh.start_agent("--ranks", "2", workers=3)
    whole = await mesh.until("whole", lambda g: g.whole and g.size == 2)
    assert whole.workers == ["worker/g0", "worker/g0.1"]
    alone = await mesh.until("idle", lambda g: g.actual_state == "idle", gang="g1")
    assert (alone.size, alone.workers) == (1, ["worker/g1"])

    await mesh.until_ready(await mesh.decide("training", core=True))
    core, rank = await mesh.pid_of("trainer/j"), await mesh.pid_of("rank/j/1")

    os.kill(rank, signal.SIGKILL)  # its worker starts it again; the gang is not ready meanwhile
    again = await mesh.pid_of("rank/j/1", other_than=rank)
    ready = await mesh.until_ready(1)
    assert ready.actual_role == "training"
    assert await mesh.pid_of("trainer/j") == core

    worker = await mesh.pid_of("worker/g0.1")
    os.kill(worker, signal.SIGKILL)  # takes its role process with it
    assert await gone(again)
    lost = await mesh.until("not ready", lambda g: not g.settled)
    assert lost.workers == ["worker/g0", "worker/g0.1"]
    await mesh.pid_of("worker/g0.1", other_than=worker)
    await mesh.until_ready(1)

    await mesh.until_ready(await mesh.decide("idle", job=""))
    assert await gone(core)
    drained = (mesh.directory / "drained").read_text().splitlines()
    assert drained == ["idle from epoch 2"] * 2
