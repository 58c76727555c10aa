"""The ranks of one core on two hosts, one of which sees no file of the other."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from meshrl.common.state import events, jobs, registry
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.directory.directory_paths import MeshPaths
from meshrl.launch.head.launcher import Launcher
from meshrl.launch.head.mesh_shape import MeshShape
from tests.load import scaled
from tests.mesh.hosts.hidden import HiddenHost
from tests.mesh.hosts.joining import submitted, until

pytestmark = [pytest.mark.timeout(900), pytest.mark.needs("root")]
HEAD = (
    MeshShape(workers=1),
    PoolSettings(
        gang_scope="network", shortage_grace_s=scaled(120.0)
    ),  # the second host may come late
)


@pytest.mark.deep
async def test_a_gang_over_two_hosts_loses_nothing_with_a_rank_or_with_the_host_of_the_core(
    mesh: Launcher, tmp_path: Path
) -> None:
    # Workers whose names come before those of the head's: rank 0 is one of them.
    second = HiddenHost(MeshPaths(tmp_path / "second"), mesh, workers=1, prefix="a")
    third = HiddenHost(MeshPaths(tmp_path / "third"), mesh, workers=1, prefix="b")
    hosts = second, third
    second.start()
    try:
        words = (
            "budget.steps=100000",  # until it is cancelled
            "training.checkpoint_every=1",
            "training.ranks=2",
            "mesh.workers=3",
            f"training.rank_deadline_s={scaled(20.0)}",
        )
        await submitted(mesh, "digits", *words)

        async def row() -> jobs.JobRow:
            found = await jobs.read_job(mesh.state, "digits")
            assert found.phase != "failed", "\n".join([found.error, *(h.said for h in hosts)])
            return found

        async def trained_by_both() -> tuple[registry.RegistryEntry, registry.RegistryEntry] | None:
            core = await registry.lookup(mesh.state, "trainer/digits")
            rank = await registry.lookup(mesh.state, "rank/digits/1")
            there = core is not None and rank is not None and (await row()).steps_done
            return (core, rank) if there and core is not None and rank is not None else None

        core, rank = await until("a step of both", trained_by_both, 150)
        assert (core.host, rank.host) == (second.name, mesh.settings.host)
        os.kill(rank.pid, signal.SIGKILL)

        async def rank_lost() -> bool:
            return any(e.kind == "rank_lost" for e in await events.read_all(mesh.state))

        await until("a loss", rank_lost)
        lost_at = (await row()).steps_done

        async def went_on() -> bool:
            return (await row()).steps_done > lost_at

        await until("a step of the gang that is formed again", went_on, 150)
        second.lose()
        third.start()

        async def host_lost() -> bool:
            return any(e.kind == "host_lost" for e in await events.read_all(mesh.state))

        await until("the loss of the host", host_lost)
        lost_at = (await row()).steps_done
        await until("a step of a core on another host", went_on, 200)
        await jobs.cancel(mesh.state, "digits", "enough")

        async def ended() -> jobs.JobRow | None:
            return found if (found := await row()).is_terminal else None

        end = await until("the end of the job", ended)
        assert end.phase == "stopped" and end.lineage == 0

        async def accounted() -> bool:  # a step in commit may be reported after the end
            told = await events.read_all(mesh.state)
            steps = [e.fields["version"] for e in told if e.kind == "step"]
            return steps == list(range(1, (await row()).steps_done + 1))

        await until("each step once, and none lost", accounted)
    finally:
        for host in hosts:
            if host.program is not None:
                host.end()
