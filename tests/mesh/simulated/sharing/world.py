"""Virtual mesh whose jobs share a gang by time slices, with checks of what its processes hold.

Planner, agent and workers are the product's own; see `roles` for the others.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from meshrl.common.base.random import Random
from meshrl.common.state import jobs
from meshrl.common.state.pool.scheduling.snapshot import PoolRequest
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.launch.services import service_plan
from meshrl.services.node.worker import GangWorker
from meshrl.services.planner.planner import Planner
from meshrl.sim.event_record import EventRecord
from meshrl.sim.mesh.job.job_setup import JOB_NAME, build_config
from meshrl.sim.mesh.runtime.programs import HOST_ID, ProcessContext
from meshrl.sim.mesh.runtime.virtual_mesh import VirtualLauncher
from meshrl.sim.mesh.runtime.virtual_redis import VirtualRedis, open_state
from meshrl.sim.virtual_loop import VirtualLoop
from meshrl.sim.virtual_machine import MachineClock, VirtualMachine
from meshrl.sim.virtual_network import MemoryNetwork
from meshrl.sim.virtual_process import VirtualProcess, VirtualProgram
from tests.mesh.simulated.sharing import roles
from tests.mesh.simulated.sharing.job_steps import Generation
from tests.mesh.simulated.sharing.roles import PacedHost, Role

STEPS = 100_000  # more than a run makes
START_S = (0.3, 1.5)  # duration of a role process's imports
PROGRAMS = {
    "meshrl.services.trainer": roles.run_trainer,
    "meshrl.services.engine": roles.run_engine,
    "meshrl.services.rollout": roles.run_shard,
}
JOBS = (JOB_NAME, f"{JOB_NAME}-2")


@dataclass(frozen=True)
class GangShape:
    """Size of a shared gang, and budgets of its workers in bytes; 0: unlimited."""

    workers: int = 1
    ranks: int = 1
    accelerator_bytes: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    policy: str = "hrrs"
    planners: int = 1  # all but the first stand by

    @property
    def options(self) -> list[str]:
        """Budgets as options of the agent."""
        found: list[str] = []
        for tier in ("accelerator", "memory", "disk"):
            found += [f"--{tier}-bytes", str(getattr(self, f"{tier}_bytes"))]
        return found


class SharedContext(ProcessContext):
    """Context whose role processes have declared bytes and rates."""

    host_type = PacedHost


class SharedGang:
    def __init__(
        self, loop: VirtualLoop, random: Random, root: Path, record: EventRecord, shape: GangShape
    ) -> None:
        self.loop, self.random, self.root, self.record, self.shape = (
            loop,
            random,
            root,
            record,
            shape,
        )
        self.machine = VirtualMachine(loop, random.child("machine"), record, root)
        self.clock = self.machine.clock
        self.network = MemoryNetwork(self.clock, random.child("network"))
        self.network.on_delivery = lambda source, target, frames: record.log_event(
            f"message {source} {target} {bytes(frames[0]).hex()}"
        )
        self.redis = VirtualRedis(MachineClock(loop), random.child("redis"))
        self.context = SharedContext(self.machine, self.network, self.redis, root)
        programs: dict[str, VirtualProgram] = {"launcher": self._run_launcher}
        for module, program in PROGRAMS.items():
            programs[module] = partial(self._start, program)
        self.machine.programs = self.context.build_programs() | programs
        self.roles: dict[str, Role] = {}  # the newest of each name
        self.violations: list[str] = []
        self.generation = {job: Generation() for job in JOBS}
        self._used: dict[str, dict[int, int]] = defaultdict(dict)  # bytes by worker and pid
        # by worker: each process that computes, with True if it takes time slices
        self._computing: dict[str, dict[Role, bool]] = defaultdict(dict)
        self.unsliced_overlaps = 0  # pieces of processes that begin or end to take time slices
        self._stop_requested = asyncio.Event()
        self._root_process = self.machine.spawn("launcher", [], "launcher", None, False)
        self.state = open_state(self.redis, self._root_process)
        self._requests = 0

    def violate(self, what: str) -> None:
        self.record.log_event(f"violation: {what}")
        self.violations.append(f"at {self.loop.now_s:.3f} s: {what}")

    # -- life cycle ------------------------------------------------------------------------------

    async def start(self) -> None:
        shape = self.shape
        await pool.write_settings(self.state, PoolSettings(slice_policy=shape.policy))  # type: ignore[arg-type]
        for seed, job in enumerate(JOBS):
            config = build_config(shape.workers, 1, shape.ranks, STEPS, job, seed)
            document = config.to_document() | {"bundle": {"dir": str(self.root), "digest": "0"}}
            await jobs.submit(self.state, job, document, str(self.root), f"submit {job}")
        await self.place(JOBS[0])

    async def place(self, partner: str) -> str:
        """Request that the second job is placed with another one, or apart; return the request."""
        self._requests += 1
        request = PoolRequest(f"place {self._requests}", "place", job=JOBS[1], partner=partner)
        await pool.submit_request(self.state, request)
        return request.op

    async def _start(self, program: Any, process: VirtualProcess, argv: list[str]) -> None:
        await self.clock.sleep(self.random.child(f"start {process.label}").uniform(*START_S))
        await program(self, process, argv)

    async def _run_launcher(self, process: VirtualProcess, argv: list[str]) -> None:
        services = [
            *(service_plan.make_planner(f"planner/{n}", n > 0) for n in range(self.shape.planners)),
            service_plan.make_agent(
                HOST_ID, self.shape.workers, "cpu", ("shards",), *self.shape.options
            ),
        ]
        launcher = VirtualLauncher(process, open_state(self.redis, process), services)
        watching = await launcher.start()
        await self._stop_requested.wait()
        await launcher.stop()
        watching.cancel()

    async def stop(self) -> None:
        self._stop_requested.set()
        async with self.clock.timeout(120.0, "stopping the mesh"):
            await self._root_process.exited.wait()

    # -- what processes hold ---------------------------------------------------------------------

    @property
    def live_roles(self) -> list[Role]:
        return [role for role in self.roles.values() if not role.process.has_exited]

    @property
    def workers(self) -> dict[str, GangWorker]:
        """Workers that run, by name."""
        found: dict[str, Any] = {}
        for process in self.machine.live_processes:
            if process.kind == "worker" and process.name in self.context.meshes:
                actor = self.context.meshes[process.name]._actor
                if isinstance(actor, GangWorker):
                    found[process.name] = actor
        return found

    @property
    def leader(self) -> VirtualProcess | None:
        """Planner that leads and runs; None while no one does."""
        for process in self.machine.live_processes:
            is_planner = process.kind == "planner" and process.name in self.context.meshes
            if is_planner and not process.is_stopped:
                actor = self.context.meshes[process.name]._actor
                if isinstance(actor, Planner) and actor.fencing_token:
                    return process
        return None

    def count_bytes(self, role: Role, size_bytes: int) -> None:
        """Count bytes that a process takes on its worker's accelerator."""
        used, pid = self._used[role.worker], role.process.pid
        if pid not in used:
            role.process.exit_callbacks.append(lambda: self._drop_process(role))
        used[pid] = used.get(pid, 0) + size_bytes
        limit = self.shape.accelerator_bytes
        if size_bytes > 0 and limit and sum(used.values()) > limit:
            shares = {self.machine.processes[one].label: size for one, size in used.items()}
            self.violate(f"the accelerator of {role.worker} has {shares} bytes of {limit}")

    def get_used_bytes(self, role: Role) -> int:
        return self._used[role.worker].get(role.process.pid, 0)

    def _drop_process(self, role: Role) -> None:
        self._used[role.worker].pop(role.process.pid, None)
        self.end_computing(role)

    def begin_computing(self, role: Role) -> None:
        there, is_sliced = self._computing[role.worker], role.slices.is_enabled
        names = [f"{one.process.label} of {one.placement.instance}" for one in there]
        if is_sliced and any(there.values()):
            self.violate(f"{role.process.label} computes beside {names}")
        elif there:
            self.record.log_event(f"unsliced: {role.process.label} beside {names}")
            self.unsliced_overlaps += 1
        there[role] = is_sliced

    def end_computing(self, role: Role) -> None:
        self._computing[role.worker].pop(role, None)

    def is_other_computing(self, role: Role) -> bool:
        return any(other is not role for other in self._computing[role.worker])
