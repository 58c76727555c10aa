"""Role process without a model: it registers, reports that it is ready, changes tiers and
drains.
"""

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path
from typing import Any

from meshrl.common.api.calls.role import RoleControl, SetTier, TierUsage
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import Fenced
from meshrl.common.base.random import Random
from meshrl.common.mesh.instances.kind_calls import KindCallsMixin
from meshrl.common.mesh.instances.kind_controller import KindController
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.runtime.calls.actor import call
from meshrl.common.mesh.runtime.dependencies import AccessRules, LeaseTerms, MeshDependencies
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings, run_service
from meshrl.common.mesh.transport.zmq_transport import ZmqTransport
from meshrl.common.state.pool.workers.placement import Placement
from meshrl.common.state.pool.workers.placement import build_parser as seats
from meshrl.common.state.pool.workers.rows import Tier
from meshrl.common.state.redis.client import StateClient
from tests.load import scaled
from tests.meshes import register_process

BYTES = 1000  # size of its state, in any tier


class Standin(KindCallsMixin):
    interface = RoleControl

    def __init__(self, note: Path, seat: Placement, mesh: Mesh) -> None:
        self._note = note
        self.kinds = KindController(mesh, {}, partial(mesh.host.run_blocking, deadline_s=60.0))
        self.about: dict[str, Any] = seat.initial_stats()

    @call(RoleControl.drain)
    async def drain(self, reason: str) -> None:
        if self.about["job"] == "slow":
            await asyncio.sleep(60.0)
        with self._note.open("a") as file:
            file.write(f"{reason}\n")

    @call(RoleControl.set_tier)
    def settle(self, m: SetTier) -> TierUsage:
        if m.epoch < self.about["epoch"]:
            raise Fenced("a later wish has come")
        self.about |= {"epoch": m.epoch, "tier": m.tier}
        sizes = {tier: BYTES if tier == m.tier else 0 for tier in Tier}
        return TierUsage(sizes[Tier.ACCELERATOR], sizes[Tier.MEMORY], sizes[Tier.DISK])


async def main(kind: str, seat: Placement) -> None:
    settings = MeshSettings.from_env()
    name = f"trainer/{seat.job}" if seat.core else f"{kind}/{seat.instance}"
    if seat.rank:
        name = f"rank/{seat.job}/{seat.rank}"
    state, clock = await StateClient.open(settings.redis_url), SystemClock()
    doorway = await register_process(name, name.partition("/")[0], settings, state, clock)
    mesh = Mesh(
        name,
        kind,
        MeshDependencies(
            state=state,
            transport=ZmqTransport(settings.bind, settings.advertise, keys=doorway.keys),
            clock=clock,
            random=Random.from_os_entropy(),
            host=SystemHost(),
        ),
        settings=settings,
        terms=LeaseTerms(ttl_s=scaled(1.5), renew_interval_s=0.3),
        access=AccessRules(credentials=doorway),
    )
    standin = Standin(Path(settings.run_root) / "drained", seat, mesh)
    mesh.ready = False
    await mesh.join(standin, stats=lambda: standin.about)
    if seat.job == "broken":
        os._exit(9)
    mesh.ready = True
    try:
        await asyncio.Event().wait()
    finally:
        await mesh.leave()


if __name__ == "__main__":
    options = seats(__doc__)
    options.add_argument("--kind", required=True)
    arguments = options.parse_args()
    run_service(lambda: main(arguments.kind, Placement.from_args(arguments)))
