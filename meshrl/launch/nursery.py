"""The nursery of a mesh: started before everything that it forks, and again when it ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from common.clock import Clock
from common.process.birth import NURSERY_ENV, OFF
from common.process.host import Host
from common.process.supervisor import ChildSpec, Hooks, Supervisor
from meshrl.launch import plan
from meshrl.launch.places import MeshPlace

LISTENS_S = 60.0  # until it has imported everything; without it processes are executed
LOOK_S = 0.02


class MeshNursery(Hooks):
    """The mesh's own, unless the environment names another one, or none."""

    def __init__(
        self,
        host: Host,
        clock: Clock,
        place: MeshPlace,
        environment: Mapping[str, str],
        budget: tuple[int, float],
    ) -> None:
        self._clock, self._socket = clock, place.nursery
        given = os.environ.get(NURSERY_ENV)
        self._done_without = bool(given)
        self.environment = {NURSERY_ENV: given or str(self._socket.resolve())}
        spec = ChildSpec(
            "nursery",
            plan.nursery(self._socket),
            env={**environment, NURSERY_ENV: OFF},
            log=place.log("nursery"),
            budget=budget,
            own_session=True,
        )
        self.supervisor = Supervisor(host, clock, [] if given else [spec], hooks=self)

    async def start(self) -> None:
        """Begins it; see `listens`. Says so when the environment names one that is not there."""
        self._look_for_the_named()
        self._socket.unlink(missing_ok=True)
        await self.supervisor.start()

    async def listens(self) -> None:
        """Waits while it imports: a process that does so by itself takes as long."""
        until = self._clock.monotonic() + LISTENS_S
        while not self._done_without and not self._socket.exists():
            if self._clock.monotonic() > until:
                return
            await self._clock.sleep(LOOK_S)

    async def stop(self, grace_s: float) -> None:
        """Ends it; what it has forked lives on."""
        await self.supervisor.stop(grace_s)

    async def gave_up(self, spec: ChildSpec, why: str) -> None:
        self._done_without = True
        self._say(f"{why}; its log: {spec.log}")

    def _look_for_the_named(self) -> None:
        named = self.environment[NURSERY_ENV]
        if self._done_without and named != OFF and not Path(named).exists():
            self._say(f"nothing is at {named}, which ${NURSERY_ENV} names")

    def _say(self, why: str) -> None:
        slower = "processes start in seconds, not milliseconds"
        print(f"no nursery: {slower}: {why}", file=sys.stderr)
