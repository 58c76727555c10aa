"""Turns of the model: each to an engine, and on to another one when that goes."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from functools import partial

from common.api.engine import Sampling
from common.errors import MeshError, ToolFailed
from common.mesh import Mesh
from services.rollout.link import ABORTED, LENGTH, STOP, EngineLink, TokenSink, Turn
from services.rollout.routing import choose
from services.rollout.trajectory import Trajectory

ATTEMPTS = 5  # engines in a row may fail a trajectory without one new token,
PATIENCE_S = 120.0  # and for so long: engines are killed, stopped and moved as a matter of course
PLACE_S = 24 * 3600.0  # a trajectory may wait so long for an engine: spot capacity can be away


class Router:
    """Engines of the job as the registry shows them, and the trajectories that wait for one."""

    def __init__(self, mesh: Mesh, sink: TokenSink, sampling: Sampling, bound: int) -> None:
        self._mesh, self._sink, self._sampling, self._bound = mesh, sink, sampling, bound
        self.links: dict[str, EngineLink] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._waiting: list[tuple[int, int, Trajectory, asyncio.Future[EngineLink]]] = []  # a heap
        self.continued = 0  # trajectories that went on elsewhere after their engine failed

    @property
    def capacity(self) -> int:
        """Trajectories that all engines together may hold."""
        return sum(link.bound for link in self.links.values())

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def observe(self, alive: set[str]) -> None:
        """Takes the engines that are alive and ready now; an engine tells its version itself."""
        for name in self.links.keys() - alive:
            self._tasks[name].cancel()
        for link in self.links.values():
            link.listen()
        self.dispatch()  # one that rested may serve again
        for name in sorted(alive - self.links.keys()):
            link = EngineLink(
                self._mesh, name, self._bound, self._sink, self._sampling, self.dispatch
            )
            self.links[name] = link
            task = asyncio.get_running_loop().create_task(link.run(), name=f"link {name}")
            self._tasks[name] = task
            task.add_done_callback(partial(self._ended, name))

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(name) is task:
            del self.links[name], self._tasks[name]
        error = None if task.cancelled() else task.exception()
        if isinstance(error, MeshError):  # a lost peer: its requests are already moving
            self._mesh.telemetry.log.info("engine", name=name, error=str(error))
        elif error is not None:
            self._mesh.host.exit(70, f"{self._mesh.name} cannot read from {name}: {error!r}")

    async def generate(self, turn: Callable[[], Turn], floor: int) -> int:
        """Runs a turn to its end on whatever engines there are; STOP or LENGTH.

        `turn` is asked again after an engine failed, since the trajectory has grown. ToolFailed
        after ATTEMPTS failures in a row, over PATIENCE_S at least, without a new token.
        """
        while True:
            request = turn()
            trajectory = request.trajectory
            if len(trajectory.turn) and int(trajectory.tokens[-1]) in self._sampling.stop:
                return (
                    STOP  # known from the ledger, or the engine went with its last token delivered
                )
            if request.max_new <= 0:
                return LENGTH
            link = await self._place(trajectory, floor)
            length = trajectory.length
            finish = await self._attempt(link, request)
            if finish in (STOP, LENGTH):
                return finish
            link.held.discard(trajectory.id)
            trajectory.engine = ""
            self.continued += 1
            link.rest()
            now = self._mesh.clock.monotonic()
            if trajectory.length > length or not trajectory.attempts:
                trajectory.attempts, trajectory.failing_since = 0, now
            trajectory.attempts += 1
            if trajectory.attempts >= ATTEMPTS and now - trajectory.failing_since > PATIENCE_S:
                raise ToolFailed(f"{ATTEMPTS} engines in a row failed trajectory {trajectory.id}")

    async def _attempt(self, link: EngineLink, request: Turn) -> int:
        try:
            return await link.generate(request)
        except MeshError:
            return ABORTED

    async def _place(self, trajectory: Trajectory, floor: int) -> EngineLink:
        name = choose((link.load for link in self.links.values()), floor, trajectory.engine)
        if name is not None and (name == trajectory.engine or not self._waiting):
            return self._assign(trajectory, name)
        future: asyncio.Future[EngineLink] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (trajectory.id, floor, trajectory, future))
        async with self._mesh.clock.timeout(PLACE_S, "an engine for a trajectory"):
            return await future

    def _assign(self, trajectory: Trajectory, name: str) -> EngineLink:
        link = self.links[name]
        link.held.add(trajectory.id)
        trajectory.engine = name
        return link

    def dispatch(self) -> None:
        """Gives room that has opened to those who wait, oldest group first."""
        while self._waiting:
            _, floor, trajectory, future = self._waiting[0]
            if not future.done():
                name = choose((link.load for link in self.links.values()), floor)
                if name is None:
                    return
                future.set_result(self._assign(trajectory, name))
            heapq.heappop(self._waiting)

    def release(self, trajectory: Trajectory) -> None:
        """The trajectory has ended: its slot goes to the next."""
        link = self.links.get(trajectory.engine)
        if link is not None and trajectory.id in link.held:
            link.held.discard(trajectory.id)
            link.ended.append(trajectory.id)
        trajectory.engine = ""
        self.dispatch()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
