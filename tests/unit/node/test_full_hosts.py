"""A host that can start nothing for a while: what it could not start is started when it can."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

from meshrl.common.base.random import Random
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings
from meshrl.common.state.pool.workers.rows import Doing
from meshrl.services.node.agent import TRY_AGAIN_S as WORKER_AGAIN_S
from meshrl.services.node.agent import NodeAgent
from meshrl.services.node.gpus.accelerators import cpu_slots
from meshrl.services.node.residents.process import TRY_AGAIN_S, RoleProcess
from meshrl.sim.loop import VirtualClock, run_virtual
from tests.meshes import alone
from tests.simulated_host import SimulatedChannel, SimulatedHost
from tests.unit.node.standing import ENGINE, role_process


async def forever(arguments: list[str], channel: SimulatedChannel) -> None:
    await asyncio.Event().wait()


class FullHost(SimulatedHost):
    """Has no process to give while it is `full`."""

    full = True

    def spawn(self, argv: list[str], **options: Any) -> Any:
        if self.full:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        return super().spawn(argv, **options)


def full_host(clock: VirtualClock, random: Random, root: Path) -> tuple[FullHost, Mesh]:
    host = FullHost(
        clock, random, {"meshrl.services.engine": forever, "meshrl.services.node.worker": forever}
    )
    settings = MeshSettings(redis_url="simulated", run_root=str(root), host="one")
    return host, alone("worker/w0", clock, random, host, settings=settings)


def doing_of(role: RoleProcess) -> Doing:
    return role.doing


def alive(host: FullHost) -> list[str]:
    return [child.name for child in host.children.values() if child.poll() is None]


def test_a_role_that_cannot_be_started_says_why_and_is_started_when_it_can(tmp_path: Path) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        host, mesh = full_host(clock, random, tmp_path)
        role = role_process(mesh, tmp_path, ENGINE)
        await role.start()
        assert role.doing == Doing.FAILED and "temporarily unavailable" in role.detail
        await clock.sleep(TRY_AGAIN_S + 1)
        await role.look()
        assert role.doing == Doing.FAILED
        host.full = False
        await clock.sleep(TRY_AGAIN_S + 1)
        await role.look()
        assert doing_of(role) == Doing.STARTING and role.pid
        await role.stop("the test ends")
        assert doing_of(role) == Doing.GONE and not alive(host)

    run_virtual(main, limit_s=3600.0)


def test_a_role_that_could_not_be_started_is_given_up_without_an_error(tmp_path: Path) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        _, mesh = full_host(clock, random, tmp_path)
        role = role_process(mesh, tmp_path, ENGINE)
        await role.start()
        await role.stop("the worker ends", leaving=True)
        assert role.doing == Doing.GONE and not role.pid

    run_virtual(main, limit_s=3600.0)


def test_a_worker_whose_budget_is_spent_is_started_when_the_host_can_again(tmp_path: Path) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        host, mesh = full_host(clock, random, tmp_path)
        (tmp_path / "mesh").mkdir()
        agent = NodeAgent(mesh, cpu_slots(1), [], "w")
        host.full = False
        await agent.start()
        host.full = True
        host.children[1].kill()
        await clock.sleep(900.0)  # the budget of restarts is spent
        assert not alive(host)
        host.full = False
        await clock.sleep(WORKER_AGAIN_S + 5.0)
        assert alive(host) == ["worker/w0"]
        await agent.leave()

    run_virtual(main, limit_s=3600.0)
