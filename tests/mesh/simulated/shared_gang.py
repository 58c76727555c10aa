"""Gang of two workers on a virtual machine, whose three instances do not fit together.

Agent, workers, time slices and the table of kinds are the product's. Role processes have real
tensors, and check their content before each step. They commit the steps of their jobs beside the
computation, which therefore needs no Redis. A story interferes when a process is in a phase of a
switch.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch

from meshrl.common.api.calls.role import KindStates, MoveKinds, RoleControl, SetTier, TierUsage
from meshrl.common.base.errors import CorruptData, DeadlineExceeded
from meshrl.common.mesh.instances.kind_calls import KindCallsMixin
from meshrl.common.mesh.instances.kind_controller import KindController, TensorsOfKind
from meshrl.common.mesh.instances.tiers import StatelessSleeper, TierController
from meshrl.common.mesh.instances.time_slices import SliceClient
from meshrl.common.mesh.runtime.calls.actor import call
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.model.files.tensor_storages import TensorStorages
from meshrl.common.state import leader
from meshrl.common.state.jobs import read_job, submit
from meshrl.common.state.pool.scheduling.decisions import (
    Decision,
    FormGang,
    PlaceInstance,
    Rationale,
)
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.workers.placement import Placement
from meshrl.common.state.pool.workers.rows import Instance, Role, Tier
from meshrl.common.state.redis.keys import PLANNER_ELECTION
from meshrl.services.node.worker import GangWorker
from meshrl.services.trainer.role_process import get_process_kind_and_name
from meshrl.sim.event_record import EventRecord
from meshrl.sim.mesh.job.job_setup import build_config, write_job
from meshrl.sim.virtual_loop import VirtualLoop
from meshrl.sim.virtual_process import VirtualProcess
from tests.mesh.simulated.sharing.job_steps import Generation, JobSteps, Shard, parse_placement
from tests.mesh.simulated.virtual_meshes import BareMesh

FLOATS = {"parameters": 12_500, "gradients": 12_500, "optimizer": 25_000}
BUDGET = (
    368_000  # bytes of a worker's accelerator; an instance has 200,000, and needs up to 230,000
)
WIDE_BUDGET = 415_000
ENGINE = Instance("g0.0", "engines", Role.ROLLOUT, time_sliced=True)
CORE = Instance("g0.1", "cores", Role.TRAINING, core=True, ranks=(0, 1), time_sliced=True)
OTHER = Instance("g0.2", "others", Role.ROLLOUT, ranks=(1,), time_sliced=True)
INSTANCES = {one.job: one for one in (ENGINE, CORE, OTHER)}
PHASES = ("granted", "load", "prefetch", "compute", "offload", "write_back")
PHASE_S = 0.2  # seconds in each part of a phase
RANK_TIMEOUT_S = 10.0  # until a rank that does not answer counts as lost
STEPS = 1000  # of a job; more than a story makes
WHY = Rationale("test")


class SharedRole(KindCallsMixin, StatelessSleeper):
    """Role process with one tensor of each kind, to which each step that uses it adds one."""

    interface = RoleControl

    def __init__(
        self, gang: SharedGang, process: VirtualProcess, mesh: Mesh, seat: Placement
    ) -> None:
        self.gang, self.process, self.mesh, self.seat = gang, process, mesh, seat
        self.name, self.worker = mesh.name, process.parent.name if process.parent else ""
        number = 10 * list(INSTANCES).index(seat.job) + seat.rank
        self.first = {kind: 1000.0 * (number + 100 * i) for i, kind in enumerate(FLOATS)}
        self.tensors = {kind: torch.empty(count) for kind, count in FLOATS.items()}
        self.additions = dict.fromkeys(FLOATS, -1)  # to each tensor; -1: it is not restored yet
        self.steps = JobSteps(mesh, seat.job)  # of rank 0
        self.computed: asyncio.Queue[int] = asyncio.Queue()  # steps of all ranks, not committed
        self.rounds: asyncio.Queue[tuple[int, asyncio.Future[None]]] = asyncio.Queue()
        self.is_holder, self.is_computing, self.extra_s = False, False, 0.0
        self.piece_lock = asyncio.Lock()
        self._phase = ""  # of the order in progress
        self.slices = SliceClient(
            mesh, seat.slice_scheduler, seat.instance, seat.generation, enabled=seat.time_sliced
        )
        self.kinds = KindController(
            mesh,
            {
                kind: TensorsOfKind(
                    partial(TensorStorages, {kind: tensor}), partial(getattr, tensor, "nbytes")
                )
                for kind, tensor in self.tensors.items()
            },
            self._run,
            is_time_sliced=lambda: self.slices.is_enabled,
        )
        self.tiers = TierController(mesh, self, self.kinds, self.slices.set_enabled)

    def stats(self) -> dict[str, Any]:
        return {"generation": self.seat.generation, "ready": True, **self.tiers.stats()}

    # -- calls of the worker -----------------------------------------------------------------------

    @call(RoleControl.drain)
    def drain(self, reason: str) -> None:
        """Do nothing: all work is done in time slices."""

    @call(RoleControl.set_tier)
    async def set_tier(self, request: SetTier) -> TierUsage:
        return await self.tiers.set_tier(request)

    @call(RoleControl.move_kinds)
    async def move_kinds(self, order: MoveKinds) -> KindStates:
        is_prefetch = order.action == "load" and self.gang.is_beside_holder(self)
        self._phase = "prefetch" if is_prefetch else order.action
        return await self.kinds.move_kinds(order)

    async def sleep(self, tier: Tier) -> None:
        """Sleep between two pieces, as a core does; a further rank follows rank 0."""
        while self.seat.rank and not self.gang.roles["trainer/cores"].kinds.is_asleep:
            await self.gang.clock.sleep(0.1)
        await self.piece_lock.acquire()
        await self.kinds.offload(tier)

    async def wake(self) -> None:
        await self.kinds.load()
        self.piece_lock.release()

    async def move(self, tier: Tier) -> None:
        await self.kinds.move_copies(tier)

    # -- work --------------------------------------------------------------------------------------

    async def _run(self, work: Callable[[], Any]) -> Any:
        if self._phase:
            await self.pause(self._phase)
        return await self.mesh.host.run_blocking(work, deadline_s=60.0)

    async def pause(self, phase: str) -> None:
        """Stay in a phase, in which a story may interfere."""
        self.gang.enter(self.name, phase)
        await self.gang.clock.sleep(PHASE_S)
        extra_s, self.extra_s = self.extra_s, 0.0
        await self.gang.clock.sleep(extra_s)

    async def serve(self) -> None:
        """Compute until the process ends: rank 0 in time slices, a further rank with it."""
        await self.mesh.join(self, stats=self.stats)
        while self.seat.rank:
            step, answer = await self.rounds.get()
            async with self.piece_lock:
                await self.compute(step)
            if not answer.done():
                answer.set_result(None)
        step = await self.steps.start() + 1
        committing = asyncio.create_task(self._commit_steps(), name="commit steps")
        try:
            while not committing.done():
                step += await self._run_slice(step)
                await self.gang.clock.sleep(0.1)
            committing.result()
        finally:
            committing.cancel()

    async def _commit_steps(self) -> None:
        """Commit what is computed, in its order."""
        while True:
            step = await self.computed.get()
            await self.steps.commit(step, await self.steps.lease(step))

    async def _run_slice(self, step: int) -> int:
        kinds = self.gang.list_kinds(step)
        function = "train_step" if len(kinds) == len(FLOATS) else "forward_backward"
        async with self.piece_lock, self.slices.time_slice(function, kinds=kinds):
            self.is_holder = True
            try:
                await self.pause("granted")
                return await self._run_step(step)
            finally:
                self.is_holder = False

    async def _run_step(self, step: int) -> int:
        """Compute a step on all ranks, or on none if a rank is lost; return their number."""
        try:
            async with self.gang.clock.timeout(RANK_TIMEOUT_S, "the other rank"):
                others = [self.gang.run_on_rank(step)] if self.seat.ranks > 1 else []
                await asyncio.gather(self.compute(step), *others)
        except DeadlineExceeded:
            return 0
        self.gang.steps[self.seat.job] += 1
        self.computed.put_nowait(step)
        return 1

    async def compute(self, step: int) -> None:
        """Add one to all numbers of the step's kinds; restore them first after a loss."""
        kinds = self.gang.list_kinds(step)
        try:
            async with self.kinds.use_kinds(kinds, changed=kinds):
                await self._compute(step)
        except CorruptData:
            self.additions = dict.fromkeys(FLOATS, -1)
            self.kinds.clear_loss()
            await self.compute(step)

    async def _compute(self, step: int) -> None:
        self.is_computing = True
        try:
            self.gang.check(self.worker)
            await self.pause("compute")
            for kind in self.gang.list_kinds(step):
                tensor, added = self.tensors[kind], self.gang.count_additions(kind, step - 1)
                if self.additions[kind] != added:
                    self.gang.restores[self.seat.job] += 1
                    tensor.fill_(self.first[kind] + added)
                assert torch.all(tensor == self.first[kind] + added), f"{self.name} lost {kind}"
                tensor += 1
                self.additions[kind] = added + 1
        finally:
            self.is_computing = False


class SharedGang(BareMesh):
    """Agent with the workers w0 and w1, which form the gang g0."""

    def __init__(self, loop: VirtualLoop, root: Path, record: EventRecord, seed: int = 3) -> None:
        super().__init__(loop, root, record, seed)
        self.machine.programs |= self.around.build_programs() | {
            "meshrl.services.engine": self._run_role,
            "meshrl.services.trainer": self._run_role,
        }
        self.roles: dict[str, SharedRole] = {}  # the newest of each name
        self.steps = Counter[str]()  # computed, by job
        self.restores = Counter[str]()  # of tensors, by job
        self._awaited: tuple[Collection[str], str] = ((), "")
        self._entered: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    # -- life cycle --------------------------------------------------------------------------------

    async def start(self, memory_bytes: int = 0, *, prefetches: bool = False) -> None:
        """Start all instances and wait until each has computed.

        `prefetches`: every other step needs no optimizer, and there is room for a part of the next
        instance beside it.
        """
        self._update_every = 2 if prefetches else 1
        self._accelerator_bytes = WIDE_BUDGET if prefetches else BUDGET
        self._leader = await leader.campaign(self.state, PLANNER_ELECTION, "test", 86_400_000)
        self._memory_bytes = memory_bytes
        for number, instance in enumerate(INSTANCES.values()):
            run = self.root / "runs" / instance.job
            run.mkdir(parents=True)
            config = build_config(2, 1, len(instance.ranks), STEPS, instance.job)
            document = write_job(config, run)
            await submit(self.state, instance.job, document, str(run), f"submit {number}")
            shard = self.process(f"shard/{instance.job}", "rollout")
            shard.run(Shard(shard.mesh, instance.job, Generation(generated_s=math.inf)).run())
        self.start_agent()
        for worker in ("w0", "w1"):
            while await pool.read_worker(self.state, worker) is None:
                await self.clock.sleep(0.5)
        await self.write(FormGang("g0", ("w0", "w1"), WHY))
        await self.place(*INSTANCES.values())
        await self.until_steps(2, 600.0)

    def start_agent(self) -> None:
        budgets = [
            f"--accelerator-bytes={self._accelerator_bytes}",
            f"--memory-bytes={self._memory_bytes}",
        ]
        words = ["--workers=2", "--services=none", *budgets]
        self.machine.spawn("meshrl.services.node", words, "node/one", None, dies_with_parent=False)

    async def place(self, *instances: Instance) -> None:
        await self.write(*(PlaceInstance("g0", instance, WHY) for instance in instances))

    async def write(self, *decisions: Decision) -> None:
        op = f"decision {self.machine.random.random()}"
        refused = await pool.write_decisions(self.state, self._leader, op, decisions, None)
        assert not refused, refused

    async def _run_role(self, process: VirtualProcess, argv: list[str]) -> None:
        seat = parse_placement(argv)
        kind, name = "engine", f"engine/{seat.instance}"
        if seat.core:
            kind, name = get_process_kind_and_name(seat)
        await self.clock.sleep(1.0)
        role = SharedRole(self, process, self.around.open_mesh(process, name, kind), seat)
        self.roles[name] = role
        try:
            await role.serve()
        finally:
            await role.tiers.stop()
            await role.mesh.leave()

    # -- steps -------------------------------------------------------------------------------------

    def list_kinds(self, step: int) -> list[str]:
        """List the kinds that a step uses and changes."""
        is_update = step % self._update_every == 0
        return [kind for kind in FLOATS if is_update or kind != "optimizer"]

    def count_additions(self, kind: str, step: int) -> int:
        """Return how often the steps up to this one have added to a kind."""
        return step // self._update_every if kind == "optimizer" else step

    # -- what runs ---------------------------------------------------------------------------------

    def find(self, name: str) -> VirtualProcess:
        """Return the live process of a name."""
        return next(one for one in self.machine.live_processes if one.name == name)

    def list_roles(self, worker: str) -> list[SharedRole]:
        roles = self.roles.values()
        return [one for one in roles if one.worker == worker and not one.process.has_exited]

    def is_beside_holder(self, role: SharedRole) -> bool:
        """Return True if another instance has a time slice on the role's worker."""
        live = [one for one in self.roles.values() if not one.process.has_exited]
        holders = {one.seat.job for one in live if one.is_holder} - {role.seat.job}
        return any(one.seat.job in holders for one in self.list_roles(role.worker))

    def find_worker(self, name: str) -> GangWorker:
        """Return the actor of a worker that runs."""
        actor = self.around.meshes[name]._actor
        assert isinstance(actor, GangWorker)
        return actor

    def list_computing(self, worker: str) -> list[SharedRole]:
        return [role for role in self.list_roles(worker) if role.is_computing]

    def check(self, worker: str) -> None:
        """Check that one instance computes, and that the tensors fit."""
        assert len(self.list_computing(worker)) == 1, "two instances compute"
        used = sum(role.kinds.accelerator_bytes for role in self.list_roles(worker))
        assert used <= self._accelerator_bytes, f"{used} bytes are on the accelerator of {worker}"

    async def run_on_rank(self, step: int) -> None:
        answer = asyncio.get_running_loop().create_future()
        self.roles["rank/cores/1"].rounds.put_nowait((step, answer))
        await answer

    def enter(self, name: str, phase: str) -> None:
        names, awaited = self._awaited
        if phase == awaited and name in names:
            self._awaited = (), ""
            self._entered.set_result(name)

    async def until_phase(self, phase: str, *names: str) -> SharedRole:
        """Wait until one of these processes enters a phase, and return its role."""
        self._awaited = names, phase
        self._entered = asyncio.get_running_loop().create_future()
        async with self.clock.timeout(60.0, f"the phase {phase} of {names}"):
            return self.roles[await self._entered]

    async def until_steps(
        self, count: int, within_s: float, jobs: Collection[str] = tuple(INSTANCES)
    ) -> float:
        """Wait until each job has computed so many steps more; return the seconds."""
        began, before = self.clock.monotonic(), Counter(self.steps)
        while any(self.steps[job] < before[job] + count for job in jobs):
            assert self.clock.monotonic() - began < within_s, (self.steps - before, self.describe())
            await self.clock.sleep(0.5)
        return self.clock.monotonic() - began

    async def until_committed(self, count: int, within_s: float) -> None:
        """Wait until so many steps more of each job are committed."""
        began, first = self.clock.monotonic(), await self._read_versions()
        while any(now < first[job] + count for job, now in (await self._read_versions()).items()):
            assert self.clock.monotonic() - began < within_s, (first, self.describe())
            await self.clock.sleep(0.5)

    async def _read_versions(self) -> dict[str, int]:
        return {job: (await read_job(self.state, job)).version for job in INSTANCES}

    def stop(self) -> None:
        """Kill all processes but the test's; raise the errors of the shards."""
        for bare in self.processes:
            bare.check()
        for process in self.machine.live_processes:
            if process.name != "test":
                process.kill()

    def describe(self) -> list[str]:
        return [f"{one.label} {one.is_stopped}" for one in self.machine.live_processes]
