"""The agent of a host: one worker for each accelerator, started, watched, and adopted again.

Workers are in sessions of their own and survive the agent. Its next incarnation finds them by what
it wrote down (pid and start time) and goes on watching.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.actor import Actor, call
from common.api.node import ListWorkers, Node, WorkerProcess, WorkerProcesses
from common.errors import DeadlineExceeded, StateUnavailable
from common.leasewatch import LeaseWatch
from common.mesh import Mesh
from common.process import Child
from common.state import events
from common.supervisor import ChildSpec, Hooks, Supervisor
from services.node.accelerators import Accelerator

BUDGET = (20, 120.0)  # restarts of a worker in seconds: spot hosts see faults every few seconds
TRY_AGAIN_S = 60.0  # after the budget was spent
GRACE_S = 6.0  # for a worker to end its role process and itself
EVENT_S = 2.0  # a report must not hold up a restart


class NodeAgent(Actor, Hooks):
    interface = Node

    def __init__(
        self, mesh: Mesh, accelerators: list[Accelerator], worker_options: list[str], prefix: str
    ) -> None:
        self._mesh, self._accelerators = mesh, accelerators
        self._options = worker_options
        self._gangs = [f"{prefix}{place}" for place in range(len(accelerators))]
        self._root = Path(mesh.settings.run_root) / "mesh"
        self._notes = self._root / f"{mesh.name.replace('/', '-')}.json"
        self._adopted: set[str] = set()
        self._supervisor = Supervisor(mesh.host, mesh.clock, hooks=self)
        self.leases = LeaseWatch(
            mesh.state, mesh.clock, mesh.settings.host, lambda: self._supervisor.children.values()
        )
        self._tasks: set[asyncio.Task[None]] = set()

    def stats(self) -> dict[str, Any]:
        return {"workers": len(self._supervisor.children), "adopted": len(self._adopted)}

    async def start(self) -> None:
        notes = self._read_notes()
        for gang, accelerator in zip(self._gangs, self._accelerators, strict=True):
            spec = self._spec(gang, accelerator)
            adopted = None
            if spec.name in notes:
                adopted = self._mesh.host.adopt(*notes[spec.name], name=spec.name)
            if adopted is not None:
                self._adopted.add(spec.name)
            await self._supervisor.add(spec, adopted=adopted)
        self._run(self.leases.run())

    async def stop(self) -> None:
        """The host leaves the mesh: its workers end. (An agent that is killed leaves them be.)"""
        for task in self._tasks:
            task.cancel()
        await self._supervisor.stop(GRACE_S)
        self._notes.unlink(missing_ok=True)

    @call(Node.workers)
    def workers(self, m: ListWorkers) -> WorkerProcesses:
        found = [
            WorkerProcess(
                gang=name.removeprefix("worker/"),
                pid=child.pid,
                adopted=name in self._adopted,
                restarts=self._supervisor.restarts(name),
            )
            for name, child in self._supervisor.children.items()
        ]
        accelerators = [accelerator.name for accelerator in self._accelerators]
        return WorkerProcesses(self._mesh.name, accelerators, found)

    def _spec(self, gang: str, accelerator: Accelerator) -> ChildSpec:
        module = [sys.executable, "-m", "services.node.worker"]
        return ChildSpec(
            f"worker/{gang}",
            [*module, "--gang", gang, "--accelerator", accelerator.name, *self._options],
            env=accelerator.env,
            log=self._root / "logs" / f"worker-{gang}.log",
            budget=BUDGET,
            own_session=True,
            die_with_parent=False,
        )

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

    async def ended(self, child: Child, code: int, why: str) -> None:
        self._adopted.discard(child.name)
        await self.leases.evict(child)
        await self._note("process_ended", {"name": child.name, "code": code, "why": why})

    def lease_expired(self, child: Child) -> bool:
        return self.leases.expired(child)

    async def gave_up(self, spec: ChildSpec, why: str) -> None:
        await self._note("worker_gave_up", {"name": spec.name, "why": why})
        self._mesh.telemetry.log.error("worker does not stay up", name=spec.name, why=why)
        self._run(self._try_again(spec))

    async def _try_again(self, spec: ChildSpec) -> None:
        await self._mesh.clock.sleep(TRY_AGAIN_S)
        await self._supervisor.remove(spec.name, 0.0)
        await self._supervisor.add(spec)
