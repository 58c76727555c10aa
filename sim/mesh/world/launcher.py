"""The root of a virtual mesh: it keeps the services running, as the product's launcher does."""

from __future__ import annotations

import asyncio

from meshrl.common.mesh.process.handle import Child
from meshrl.common.mesh.process.supervision.ended import EndReport, Reports
from meshrl.common.mesh.process.supervision.lease_watch import LeaseWatch
from meshrl.common.mesh.process.supervision.supervisor import ChildEnd, ChildSpec, Hooks, Supervisor
from meshrl.common.state.redis.client import State
from meshrl.launch.services import absolving, plan
from meshrl.launch.services.services import BUDGET, GRACE_S
from meshrl.sim.loop import VirtualClock
from meshrl.sim.machine import ProcessHost
from meshrl.sim.mesh.world.programs import HOST
from meshrl.sim.process import VirtualProcess


class VirtualLauncher(Hooks):
    """Its process is never killed: with it the mesh would end, as the product's does."""

    def __init__(self, process: VirtualProcess, state: State, services: list[plan.Service]) -> None:
        self.clock: VirtualClock = process.machine.clock
        self.state, self.why = state, ""
        self._process = process
        self._specs = [
            ChildSpec(
                service.name,
                list(service.argv),
                budget=BUDGET,
                critical=True,
                stage=stage,
                own_session=True,
            )
            for stage, service in enumerate(services)
        ]
        self._supervisor = self._supervised()
        self._watch = LeaseWatch(
            state, self.clock, HOST, lambda: self._supervisor.children.values()
        )
        self._reports = Reports(state, self.clock)
        self._stopping = False

    def _supervised(self) -> Supervisor:
        return Supervisor(ProcessHost(self._process), self.clock, self._specs, hooks=self)

    async def start(self) -> asyncio.Task[None]:
        await self._supervisor.start()
        return asyncio.create_task(self._watch.run(), name="watch leases")

    async def kill_services(self) -> None:
        """At once: Redis has gone back, and what has acted on it starts anew."""
        self._stopping = True
        for child in self._supervisor.children.values():
            child.kill()
        await self._supervisor.stop(GRACE_S)

    async def start_again(self) -> None:
        self._supervisor, self._stopping = self._supervised(), False
        await self._supervisor.start()

    async def stop(self) -> None:
        self._stopping = True
        self._reports.stop()
        await self._supervisor.stop(GRACE_S)

    async def ended(self, child: Child, end: ChildEnd) -> None:
        if self._stopping or end.asked:
            return
        await self._watch.evict(child)
        await self._reports.tell(
            EndReport(child.name, end.code, end.why, end.failure, final=end.final)
        )

    async def absolved(self, spec: ChildSpec, end: ChildEnd) -> bool:
        return await absolving.absolved(self.state, self._reports, spec, end, "")

    def lease_expired(self, child: Child) -> bool:
        return self._watch.expired(child)

    async def gave_up(self, spec: ChildSpec, why: str) -> None:
        self.why = f"{spec.name} does not stay up ({why})"
