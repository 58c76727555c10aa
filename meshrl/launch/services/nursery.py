"""The nursery of a mesh: started before everything that it forks, and again when it ends."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import DeadlineExceeded
from meshrl.common.mesh.process.forking.birth import ANSWER_S, NURSERY_ENV, OFF, answers
from meshrl.common.mesh.process.handle import Child
from meshrl.common.mesh.process.host import Host
from meshrl.common.mesh.process.supervision.supervisor import ChildEnd, ChildSpec, Hooks, Supervisor
from meshrl.directory.places import MeshPlace
from meshrl.launch.services import plan

LISTENS_S = 60.0  # until it has imported everything; without it processes are executed
LOOK_S = 0.02
ASK_S = 2.0  # between two questions whether it serves
STOPPED = "Tt"  # states of a process that was stopped, in /proc
SILENCES = 3  # in a row, of 2 s each: it was stopped, or hangs, and every start waits for it


class MeshNursery(Hooks):
    """The mesh's own, unless the environment names another one, or none."""

    def __init__(
        self,
        host: Host,
        clock: Clock,
        place: MeshPlace,
        environment: Mapping[str, str],
        budget: tuple[int, float],
        ended: Callable[[Child, ChildEnd], Awaitable[None]] | None = None,
    ) -> None:
        self._host, self._clock, self._socket = host, clock, place.nursery
        self._heard = ended
        self._watching: asyncio.Task[None] | None = None
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
        if not self._done_without:
            self._watching = asyncio.create_task(self._watch(), name="watch the nursery")

    async def listens(self) -> None:
        """Waits while it imports: a process that does so by itself takes as long."""
        until = self._clock.monotonic() + LISTENS_S
        while not self._done_without and not self._socket.exists():
            if self._clock.monotonic() > until:
                return
            await self._clock.sleep(LOOK_S)

    async def stop(self, grace_s: float) -> None:
        """Ends it; what it has forked lives on."""
        if self._watching is not None:
            self._watching.cancel()
        await self.supervisor.stop(grace_s)

    async def _watch(self) -> None:
        """Kills one that does not answer, so that its supervisor starts another. Silences are
        counted, not timed: a launcher that was stopped itself must not blame it.
        """
        silent: tuple[int, int] = (0, 0)  # pid, silences in a row
        while True:
            await self._clock.sleep(ASK_S)
            child = self.supervisor.children.get("nursery")
            if child is None or not self._socket.exists():
                continue
            heard = await self._answers(child)
            silent = (child.pid, 0 if heard else 1 + (silent[1] if silent[0] == child.pid else 0))
            if silent[1] >= SILENCES:
                self._socket.unlink(missing_ok=True)  # nobody asks it until another listens
                child.kill()

    async def _answers(self, child: Child) -> bool:
        usage = child.usage()
        if usage is not None and usage.state in STOPPED:
            return False
        try:
            return await self._host.run_blocking(answers, self._socket, deadline_s=2 * ANSWER_S)
        except DeadlineExceeded:
            return False

    async def ended(self, child: Child, end: ChildEnd) -> None:
        if self._heard is not None:
            await self._heard(child, end)

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
