"""The agent of a host: it starts one worker for each accelerator, watches them, and adopts them
again. The first few of them may make one gang; the others are gangs of one.

Workers are in sessions of their own and survive the agent. Its next incarnation finds them by what
it wrote down (pid and start time) and goes on watching.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import ConfigError, DeadlineExceeded, StateUnavailable
from common.process.handle import Child
from common.process.lease_watch import LeaseWatch
from common.process.supervisor import ChildSpec, End, Hooks, Supervisor
from common.runtime.actor import Actor
from common.runtime.mesh import Mesh
from common.runtime.patience import patiently
from common.state import events, registry
from common.state.ended import Report, Reports
from services.node.accelerators import Accelerator
from services.node.worker import worker_name

BUDGET = (20, 120.0)  # restarts of a worker in seconds: spot hosts see faults every few seconds
TRY_AGAIN_S = 60.0  # after the budget was spent
GRACE_S = 6.0  # for a worker to end its role process and itself
EVENT_S = 2.0  # a report must not hold up a restart


class Seat(NamedTuple):
    """A worker's place."""

    gang: str
    rank: int
    ranks: int


def seats(workers: int, prefix: str, ranks: int) -> list[Seat]:
    """The first `ranks` workers in one gang, each other one in a gang of its own; ConfigError if
    there are fewer workers.
    """
    if workers < ranks:
        raise ConfigError(
            f"a gang of {ranks} ranks does not fit on {workers} workers",
            where="node agent",
            fix="lower training.ranks, or give the host more workers",
        )
    alone = range(1, workers - ranks + 1)
    together = [Seat(f"{prefix}0", rank, ranks) for rank in range(ranks)]
    return [*together, *(Seat(f"{prefix}{place}", 0, 1) for place in alone)]


class NodeAgent(Actor, Hooks):
    def __init__(
        self,
        mesh: Mesh,
        accelerators: list[Accelerator],
        worker_options: list[str],
        prefix: str,
        ranks: int = 1,
    ) -> None:
        self._mesh, self._accelerators = mesh, accelerators
        self._options = worker_options
        self._seats = seats(len(accelerators), prefix, ranks)
        self._root = Path(mesh.settings.run_root) / "mesh"
        self._notes = self._root / f"{mesh.name.replace('/', '-')}.json"
        self._adopted: set[str] = set()
        self._supervisor = Supervisor(mesh.host, mesh.clock, hooks=self)
        self._reports = Reports(mesh.state, mesh.clock)
        self.leases = LeaseWatch(
            mesh.state, mesh.clock, mesh.settings.host, lambda: self._supervisor.children.values()
        )
        self._tasks: set[asyncio.Task[None]] = set()

    def stats(self) -> dict[str, Any]:
        return {"workers": len(self._supervisor.children), "adopted": len(self._adopted)}

    async def start(self) -> None:
        specs = [
            self._spec(seat, accelerator)
            for seat, accelerator in zip(self._seats, self._accelerators, strict=True)
        ]
        known = [self._read_notes(), await self._registered([spec.name for spec in specs])]
        for spec in specs:
            adopted = self._running(spec.name, known)
            if adopted is not None:
                self._adopted.add(spec.name)
            await self._supervisor.add(spec, adopted=adopted)
        self._run(self.leases.run())

    async def stop(self) -> None:
        """The host leaves the mesh: its workers end. (An agent that is killed leaves them be.)"""
        for task in self._tasks:
            task.cancel()
        self._reports.stop()
        await self._supervisor.stop(GRACE_S)
        self._notes.unlink(missing_ok=True)

    def _spec(self, seat: Seat, accelerator: Accelerator) -> ChildSpec:
        module = [sys.executable, "-m", "services.node.worker"]
        place = ["--gang", seat.gang, "--rank", str(seat.rank), "--ranks", str(seat.ranks)]
        name = worker_name(seat.gang, seat.rank)
        return ChildSpec(
            name,
            [*module, *place, "--accelerator", accelerator.name, *self._options],
            env=accelerator.env,
            log=self._log(name),
            budget=BUDGET,
            own_session=True,
            die_with_parent=False,
        )

    def _log(self, name: str) -> Path:
        return self._root / "logs" / (name.replace("/", "-") + ".log")

    def _running(self, name: str, known: Iterable[Mapping[str, tuple[int, int]]]) -> Child | None:
        """The worker that an earlier incarnation started, if it still runs."""
        for processes in known:
            if name in processes:
                child = self._mesh.host.adopt(*processes[name], name=name)
                if child is not None:
                    return child
        return None

    async def _registered(self, names: list[str]) -> dict[str, tuple[int, int]]:
        """Workers by what they say themselves: a full disk takes no notes."""
        mesh = self._mesh
        found = await patiently(mesh.clock, lambda: registry.lookup_all(mesh.state, names))
        here = mesh.settings.host
        return {e.name: (e.pid, int(e.start_time)) for e in found.values() if e.host == here}

    def _read_notes(self) -> Mapping[str, tuple[int, int]]:
        try:
            notes = json.loads(self._notes.read_bytes())
            return {name: (int(pid), int(start)) for name, (pid, start) in notes.items()}
        except FileNotFoundError:
            return {}

    def _write_notes(self) -> None:
        children = self._supervisor.children
        notes = {name: (child.pid, child.start_time) for name, child in children.items()}
        self._notes.parent.mkdir(parents=True, exist_ok=True)
        self._mesh.host.replace_file(self._notes, json.dumps(notes).encode())

    def _run(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _note(self, kind: str, fields: dict[str, Any]) -> None:
        with contextlib.suppress(StateUnavailable, DeadlineExceeded):
            async with self._mesh.clock.timeout(EVENT_S, "an event"):
                await events.append(self._mesh.state, kind, fields)

    # What the supervisor tells

    async def started(self, child: Child) -> None:
        self._write_notes()
        how = "adopted" if child.name in self._adopted else "started"
        await self._note("worker_up", {"name": child.name, "pid": child.pid, "how": how})

    async def ended(self, child: Child, end: End) -> None:
        self._adopted.discard(child.name)
        await self.leases.evict(child)
        await self._end_unwatched(child.name)
        if end.asked:
            return
        log = str(self._log(child.name))
        await self._reports.tell(
            Report(child.name, end.code, end.why, end.failure, final=end.final, log=log)
        )

    async def _end_unwatched(self, name: str) -> None:
        """Ends the worker that holds this name and is nobody's: it was started when no note could
        be taken, and had not registered when its agent was followed by this one.
        """
        with contextlib.suppress(StateUnavailable, DeadlineExceeded):
            async with self._mesh.clock.timeout(EVENT_S, "a look for a worker"):
                child = self._running(name, [await self._registered([name])])
            if child is not None:
                child.kill()
                await self.leases.evict(child)

    def lease_expired(self, child: Child) -> bool:
        return self.leases.expired(child)

    async def gave_up(self, spec: ChildSpec, why: str) -> None:
        await self._note("worker_gave_up", {"name": spec.name, "why": why})
        self._mesh.telemetry.log.error("worker does not stay up", name=spec.name, why=why)
        self._run(self._try_again(spec))

    async def _try_again(self, spec: ChildSpec) -> None:
        """Starts it once more after a pause, and again for as long as this host cannot."""
        await self._supervisor.remove(spec.name, 0.0)
        while True:
            await self._mesh.clock.sleep(TRY_AGAIN_S)
            try:
                await self._supervisor.add(spec)
                return
            except OSError as error:
                why = f"it cannot be started: {error}"
                await self._note("worker_gave_up", {"name": spec.name, "why": why})
