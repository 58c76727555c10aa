"""A service whose restarts are spent is tried again for a reason that holds, and else given up."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import PeerLost, StateUnavailable, StorageFull
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.ends.failure import Failure
from meshrl.common.mesh.process.supervision.ended import Reports
from meshrl.common.mesh.process.supervision.supervisor import ChildEnd, ChildSpec
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import jobs
from meshrl.launch.services.absolving import PATIENCE_S, PROGRESS_S, absolved
from meshrl.sim.loop import VirtualClock, run_virtual
from tests.meshes import alone
from tests.simulated_host import SimulatedHost
from tests.unit.node.test_failing_roles import DOCUMENT

SPEC = ChildSpec("rollout/job/0", [])
ODD = ChildEnd(1, "exit status 1", Failure.of(ValueError("odd")))
LOST = ChildEnd(1, "exit status 1", Failure.of(PeerLost("gone")))
Ask = Callable[[ChildEnd], Awaitable[bool]]


def with_mesh(look: Callable[[Mesh, Clock, Ask], Awaitable[None]]) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        mesh = alone("launcher", clock, random, SimulatedHost(clock, random))
        reports = Reports(mesh.state, clock)

        async def ask(end: ChildEnd, full: str = "") -> bool:
            return await absolved(mesh.state, reports, SPEC, end, full)

        await look(mesh, clock, ask)

    run_virtual(main)


def test_a_mesh_whose_jobs_do_not_come_further_is_given_up(tmp_path: Path) -> None:
    async def look(mesh: Mesh, clock: Clock, ask: Ask) -> None:
        assert not await ask(ODD), "there is no job"
        await jobs.submit(mesh.state, "calc", DOCUMENT, str(tmp_path), "submit")
        assert await ask(ODD)
        await clock.sleep(PROGRESS_S + 1.0)
        assert not await ask(ODD)

    with_mesh(look)


def test_a_lost_peer_is_waited_for_and_not_for_ever(tmp_path: Path) -> None:
    async def look(mesh: Mesh, clock: Clock, ask: Ask) -> None:
        assert await ask(replace(LOST, lasting_s=PATIENCE_S - 1.0))
        assert not await ask(replace(LOST, lasting_s=PATIENCE_S + 1.0))
        await jobs.submit(mesh.state, "calc", DOCUMENT, str(tmp_path), "submit")
        assert await ask(replace(LOST, lasting_s=PATIENCE_S + 1.0)), "a job came further"

    with_mesh(look)


def test_an_outage_is_waited_out() -> None:
    async def look(mesh: Mesh, clock: Clock, ask: Ask) -> None:
        for error in (StorageFull("full"), StateUnavailable("away")):
            end = ChildEnd(1, "exit status 1", Failure.of(error), lasting_s=10 * PATIENCE_S)
            assert await ask(end)

    with_mesh(look)


def test_a_job_whose_errors_spend_the_budget_fails_and_the_mesh_goes_on(tmp_path: Path) -> None:
    async def look(mesh: Mesh, clock: Clock, ask: Ask) -> None:
        await jobs.submit(mesh.state, "calc", DOCUMENT, str(tmp_path), "submit")
        await clock.sleep(PROGRESS_S + 1.0)
        assert await ask(ChildEnd(1, "exit status 1", Failure.of(ValueError("odd"), job="calc")))
        row = await jobs.job(mesh.state, "calc")
        assert row.phase == "failed" and "rollout/job/0 ended by ValueError: odd" in row.error

    with_mesh(look)
