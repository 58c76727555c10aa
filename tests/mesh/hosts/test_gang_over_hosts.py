"""Ranks of one core on two hosts, one of which has no access to the other's files."""

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
from tests.mesh.hosts.hidden_host import HiddenHost
from tests.mesh.hosts.joined_host import submit, until

pytestmark = [pytest.mark.timeout(900), pytest.mark.needs("root")]
HEAD = (
    MeshShape(workers=1),
    PoolSettings(
        gang_scope="network", shortage_grace_s=scaled(120.0)
    ),  # the second host may be late
)


@pytest.mark.deep
async def test_gang_over_two_hosts_survives_loss_of_a_rank_and_of_the_core_host(
    mesh: Launcher, tmp_path: Path
) -> None:
    # Worker names that precede those of the head's: rank 0 is one of them.
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
        await submit(mesh, "digits", *words)

        async def row() -> jobs.JobRow:
            found = await jobs.read_job(mesh.state, "digits")
            assert found.phase != "failed", "\n".join([found.error, *(h.output for h in hosts)])
            return found

        async def has_trained_on_both() -> (
            tuple[registry.RegistryEntry, registry.RegistryEntry] | None
        ):
            core = await registry.lookup(mesh.state, "trainer/digits")
            rank = await registry.lookup(mesh.state, "rank/digits/1")
            there = core is not None and rank is not None and (await row()).steps_done
            return (core, rank) if there and core is not None and rank is not None else None

        core, rank = await until("a step of both", has_trained_on_both, 150)
        assert (core.host, rank.host) == (second.name, mesh.settings.host)
        os.kill(rank.pid, signal.SIGKILL)

        async def has_lost_rank() -> bool:
            return any(e.kind == "rank_lost" for e in await events.read_all(mesh.state))

        await until("a loss", has_lost_rank)
        lost_at = (await row()).steps_done

        async def has_continued() -> bool:
            return (await row()).steps_done > lost_at

        await until("a step of the gang that is formed again", has_continued, 150)
        second.lose()
        third.start()

        async def has_lost_host() -> bool:
            return any(e.kind == "host_lost" for e in await events.read_all(mesh.state))

        await until("the loss of the host", has_lost_host)
        lost_at = (await row()).steps_done
        await until("a step of a core on another host", has_continued, 200)
        await jobs.cancel(mesh.state, "digits", "enough")

        async def has_ended() -> jobs.JobRow | None:
            return found if (found := await row()).is_terminal else None

        end = await until("the end of the job", has_ended)
        assert end.phase == "stopped" and end.lineage == 0

        async def check_account() -> bool:  # a step in commit may be reported after the end
            reports = await events.read_all(mesh.state)
            steps = [e.fields["version"] for e in reports if e.kind == "step"]
            return steps == list(range(1, (await row()).steps_done + 1))

        await until("each step once, and none lost", check_account)
    finally:
        for host in hosts:
            if host.program is not None:
                host.end()
