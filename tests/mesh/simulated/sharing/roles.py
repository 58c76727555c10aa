"""Role processes of a virtual shared gang: declared bytes and rates instead of models.

Time slices, kinds, tiers and step commits are the product's own code. The content of each tensor
follows from the job's version, so that every piece can check what it reads.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from meshrl.common.api.calls.role import KindStates, MoveKinds, RoleControl, SetTier, TierUsage
from meshrl.common.base.errors import CorruptData, MeshError
from meshrl.common.base.files.offload_media import OffloadFile
from meshrl.common.base.files.offloaded_tensors import Octets
from meshrl.common.mesh.instances.kind_calls import KindCallsMixin
from meshrl.common.mesh.instances.kind_controller import KindController, TensorsOfKind
from meshrl.common.mesh.instances.tiers import StatelessSleeper, TierController
from meshrl.common.mesh.instances.time_slices import SliceClient
from meshrl.common.mesh.runtime.calls.actor import call
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import jobs
from meshrl.common.state.pool.workers import process_names
from meshrl.common.state.pool.workers.placement import Placement
from meshrl.common.state.pool.workers.rows import TensorKind, Tier
from meshrl.services.trainer.role_process import get_process_kind_and_name
from meshrl.sim.virtual_machine import VirtualHost
from meshrl.sim.virtual_process import VirtualProcess
from tests.mesh.simulated.sharing.job_steps import JobSteps, Shard, parse_placement, repeat

if TYPE_CHECKING:
    from tests.mesh.simulated.sharing.world import SharedGang

T = TypeVar("T")
P, G, OPT, KV = (
    TensorKind.PARAMETERS,
    TensorKind.GRADIENTS,
    TensorKind.OPTIMIZER,
    TensorKind.KV_CACHE,
)
CORE_BYTES = {P: 55_000, G: 55_000, OPT: 115_000}  # below the estimates of the job's model
ENGINE_BYTES = {P: 120_000, KV: 80_000}
BYTES_PER_S = {Tier.MEMORY: 400e3, Tier.DISK: 150e3}
COPIES = ("offload", "copy_offload", "_read_and_restore")  # functions of `OffloadStorage`
COPY_POLL_S = 0.1  # between two checks for a cancellation
ROUNDS = 2
MODULUS = 251  # contents are bytes


class PacedHost(VirtualHost):
    """Host whose copies of tensors take the time of a declared rate."""

    async def run_blocking(self, fn: Callable[..., Any], *args: Any, deadline_s: float) -> Any:
        if fn.__name__ in COPIES:
            tier = Tier.DISK if isinstance(args[0], OffloadFile) else Tier.MEMORY
            sizes = getattr(args[-2], "sizes_bytes", {})
            left_s, cancellation = sum(sizes.values()) / BYTES_PER_S[tier], args[-1]
            while left_s > 0.0 and not cancellation.is_requested:
                await self._machine.clock.sleep(min(left_s, COPY_POLL_S))
                left_s -= COPY_POLL_S
        return await super().run_blocking(fn, *args, deadline_s=deadline_s)


class DeclaredTensor:
    """Bytes of one kind, counted on the accelerator while they are there."""

    piece_bytes = 1 << 18

    def __init__(self, size_bytes: int, on_change: Callable[[int], None]) -> None:
        self.total_bytes, self._on_change = size_bytes, on_change
        self.sizes_bytes: Mapping[str, int] = {"tensor": size_bytes}
        self.content: Octets | None = None
        self.reallocate()

    def reallocate(self) -> None:
        self._on_change(self.total_bytes)
        self.content = np.full(self.total_bytes, MODULUS, np.uint8)

    def release(self) -> None:
        self._on_change(-self.total_bytes)
        self.content = None

    def refresh(self) -> None:
        """Do nothing: a copy has all the content."""

    def fill(self, number: int) -> None:
        assert self.content is not None
        self.content[:] = number % MODULUS

    def has(self, number: int) -> bool:
        return self.content is not None and bool(np.all(self.content == number % MODULUS))

    def read_into(self, name: str, start: int, out: Octets) -> None:
        assert self.content is not None
        out[:] = self.content[start : start + len(out)]

    def write(self, name: str, start: int, piece: Octets) -> None:
        assert self.content is not None
        self.content[start : start + len(piece)] = piece


class Role(StatelessSleeper, KindCallsMixin):
    """Role process with kinds of tensors; its pieces compute in time slices."""

    interface = RoleControl

    def __init__(
        self,
        world: SharedGang,
        process: VirtualProcess,
        mesh: Mesh,
        placement: Placement,
        sizes: Mapping[TensorKind, int],
    ) -> None:
        self.world, self.process, self.mesh, self.placement = world, process, mesh, placement
        self.random = world.random.child(f"role {process.label}")
        self.version, self.rounds, self.phase = -1, 0, ""
        self.slices = SliceClient(
            mesh,
            placement.slice_scheduler,
            placement.instance,
            placement.generation,
            enabled=placement.time_sliced,
        )
        assert process.parent is not None
        self.worker = process.parent.name
        count = partial(world.count_bytes, self)
        self.tensors = {kind: DeclaredTensor(size, count) for kind, size in sizes.items()}
        kinds: dict[str, TensorsOfKind] = {
            kind: self._describe_kind(tensor) for kind, tensor in self.tensors.items()
        }
        self.kinds = KindController(
            mesh, kinds, self._run, is_time_sliced=lambda: self.slices.is_enabled
        )
        self.tiers = TierController(
            mesh, self, self.kinds, set_time_slicing=self.slices.set_enabled
        )
        self.awake, self._piece = asyncio.Event(), asyncio.Lock()
        self.awake.set()
        world.roles[mesh.name] = self

    def _describe_kind(self, tensor: DeclaredTensor) -> TensorsOfKind:
        return TensorsOfKind(lambda: tensor, lambda: tensor.total_bytes)

    async def _run(self, work: Callable[[], Any]) -> Any:
        return work()

    def stats(self) -> dict[str, Any]:
        return self.placement.initial_stats() | self.tiers.stats() | self.slices.stats()

    def restore(self, version: int) -> None:
        """Fill all tensors with the state of a committed version."""
        self.version, self.rounds = version, 0
        for kind, tensor in self.tensors.items():
            tensor.fill(0 if kind == G else version)

    # -- calls of the worker ---------------------------------------------------------------------

    @call(RoleControl.drain)
    def drain(self, reason: str) -> None:
        """Do nothing: the next process repeats an interrupted step."""

    @call(RoleControl.set_tier)
    async def set_tier(self, request: SetTier) -> TierUsage:
        return await self.tiers.set_tier(request)

    @call(RoleControl.move_kinds)
    async def move_kinds(self, order: MoveKinds) -> KindStates:
        is_prefetch = order.action == "load" and self.world.is_other_computing(self)
        self.phase = "prefetch" if is_prefetch else order.action
        try:
            return await self.kinds.move_kinds(order)
        finally:
            self.phase = ""

    # -- tier of the whole process ---------------------------------------------------------------

    async def sleep(self, tier: Tier) -> None:
        self.awake.clear()
        try:
            async with self._piece:
                await self.kinds.write_back(tier)
                await self.kinds.save_record(tier, {"version": self.version})
                await self.kinds.offload(tier)
        except BaseException:
            self.awake.set()
            raise

    async def wake(self) -> None:
        await self.kinds.load()
        self.awake.set()

    async def move(self, tier: Tier) -> None:
        await self.kinds.move_copies(tier)

    async def prepare_removal(self) -> None:
        self.awake.clear()
        async with self._piece:
            pass

    async def cancel_removal(self) -> None:
        self.awake.set()

    # -- pieces ----------------------------------------------------------------------------------

    async def compute(
        self,
        function: str,
        kinds: Sequence[str],
        changed: Sequence[str],
        lasts_s: float,
        work: Callable[[Any], None],
        group: Sequence[VirtualProcess] = (),
    ) -> bool:
        """Compute a piece on all ranks in one time slice.

        Return False without it if the ranks are no longer those of `group`; none: any.
        """
        piece = partial(self.run_on_ranks, kinds, changed, lasts_s, work, group)
        while True:
            await self.awake.wait()
            async with self._piece:
                if not self.awake.is_set():
                    continue
                return await self.slices.run_in_slice(function, piece, lasts_s, kinds)

    async def run_on_ranks(
        self,
        kinds: Sequence[str],
        changed: Sequence[str],
        lasts_s: float,
        work: Callable[[Any], None],
        group: Sequence[VirtualProcess],
    ) -> bool:
        self.phase = "granted"
        await self.mesh.clock.sleep(0.05)
        self.phase = "computing"
        try:
            ranks = self.find_ranks()
            if group and [one.process for one in ranks] != group:
                return False
            loop = asyncio.get_running_loop()
            ends: list[Any] = []
            for rank in ranks:
                context = rank.process.context.copy()
                own = rank.run_piece(kinds, changed, lasts_s, work)
                exits = rank.process.exited.wait()
                pair: list[asyncio.Task[Any]] = [
                    loop.create_task(own, context=context),
                    loop.create_task(exits),
                ]
                ends.append(asyncio.wait(pair, return_when=asyncio.FIRST_COMPLETED))
            for done, pending in await asyncio.gather(*ends):
                for task in pending:
                    task.cancel()
                for task in done:
                    task.result()
            return True
        finally:
            self.phase = ""

    def find_ranks(self) -> list[Role]:
        """Return the processes of all ranks that run, rank 0 first."""
        placement = self.placement
        names = [f"rank/{placement.job}/{rank}" for rank in range(1, placement.ranks)]
        others = [self.world.roles[name] for name in names if name in self.world.roles]
        return [self, *(one for one in others if one.is_serving)]

    @property
    def is_serving(self) -> bool:
        return not self.process.has_exited and bool(self.mesh.ready)

    async def run_piece(
        self,
        kinds: Sequence[str],
        changed: Sequence[str],
        lasts_s: float,
        work: Callable[[Any], None],
    ) -> None:
        """Compute on this rank, and check what it reads."""
        try:
            async with self.kinds.use_kinds(kinds or list(self.tensors), changed):
                self.world.begin_computing(self)
                try:
                    await self.mesh.clock.sleep(lasts_s)
                    work(self)
                finally:
                    self.world.end_computing(self)
        except CorruptData as error:
            self.world.violate(f"{self.process.label} has lost its tensors: {error}")
            raise

    def check(self, expected: Mapping[TensorKind, int]) -> None:
        for kind, number in expected.items():
            if not self.tensors[kind].has(number):
                self.world.violate(f"{self.process.label}: {kind} is not of version {number}")


class Core(Role):
    """Core of a job: it leases groups, computes and commits steps."""

    @cached_property
    def steps(self) -> JobSteps:
        return JobSteps(self.mesh, self.placement.job)

    async def run(self) -> None:
        mesh = self.mesh
        await mesh.join(self, stats=self.stats)
        self.restore(await self.steps.start())
        mesh.ready = True
        group: list[VirtualProcess] = []
        while True:
            present = [one.process for one in self.find_ranks()]
            if len(present) < self.placement.ranks:
                await mesh.clock.sleep(0.5)
            elif present != group:  # a new rank has no state of this step
                group = present
                restore = partial(Role.restore, version=self.version)
                await self.compute("load", (), list(self.tensors), 0.1, restore)
            else:
                await self.run_step(group)

    async def run_step(self, group: list[VirtualProcess]) -> None:
        step = self.version + 1
        leased = await self.steps.lease(step)

        def add_gradient(rank: Role) -> None:
            rank.check({P: rank.version, G: rank.rounds})
            rank.rounds += 1
            rank.tensors[G].fill(rank.rounds)

        def update(rank: Role) -> None:
            rank.check({P: rank.version, G: ROUNDS, OPT: rank.version})
            rank.restore(rank.version + 1)

        for piece in [
            *[("forward_backward", (P, G), (G,), add_gradient)] * ROUNDS,
            ("optim_step", (), (P, G, OPT), update),
        ]:
            function, kinds, changed, work = piece
            lasts_s = self.random.uniform(0.2, 0.9)
            if not await self.compute(function, kinds, changed, lasts_s, work, group):
                return
        await self.steps.commit(step, leased)


class FurtherRank(Role):
    """Further rank of a core, which computes as rank 0 orders."""

    async def run(self) -> None:
        await self.mesh.join(self, stats=self.stats)
        self.mesh.ready = True
        await asyncio.Event().wait()


class VirtualEngine(Role):
    """Engine that generates for the groups of its job."""

    def _describe_kind(self, tensor: DeclaredTensor) -> TensorsOfKind:
        described = super()._describe_kind(tensor)
        if tensor.total_bytes != ENGINE_BYTES[P]:
            return described

        async def rebuild(memory: Any) -> None:
            memory.reallocate()
            memory.fill(self.version)

        return TensorsOfKind(described.collect, described.measure_bytes, rebuild)

    async def run(self) -> None:
        mesh, job, clock = self.mesh, self.placement.job, self.mesh.clock
        seconds = self.world.generation[job]
        await mesh.join(self, stats=self.stats)
        self.restore(0)
        mesh.ready = True
        while True:
            row = await repeat(mesh, jobs.read_job, mesh.state, job)
            if row.version > self.version:
                install = partial(VirtualEngine.install, version=row.version)
                await self.compute("sync", (P,), (P,), 0.1, install)
            until = clock.monotonic() + 2.0
            while clock.monotonic() < until:
                if seconds.wanted_s <= seconds.generated_s:
                    await clock.sleep(0.5)
                    continue
                lasts_s = max(0.4, min(1.5, self.slices.quantum_s))
                await self.compute("generate", (), (KV,), lasts_s, VirtualEngine.read_parameters)
                seconds.generated_s += lasts_s

    def install(self, version: int) -> None:
        self.version = version
        self.tensors[P].fill(version)

    def read_parameters(self) -> None:
        self.check({P: self.version})


async def run_trainer(world: SharedGang, process: VirtualProcess, argv: list[str]) -> None:
    placement = parse_placement(argv)
    role = Core if placement.core and not placement.rank else FurtherRank
    kind, name = get_process_kind_and_name(placement)
    mesh = world.context.open_mesh(process, name, kind)
    await _serve(role(world, process, mesh, placement, CORE_BYTES))


async def run_engine(world: SharedGang, process: VirtualProcess, argv: list[str]) -> None:
    placement = parse_placement(argv)
    mesh = world.context.open_mesh(process, f"engine/{placement.instance}", "engine")
    await _serve(VirtualEngine(world, process, mesh, placement, ENGINE_BYTES))


async def run_shard(world: SharedGang, process: VirtualProcess, argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job")
    parser.add_argument("--shard", type=int)
    arguments, _ = parser.parse_known_args(argv)
    name = process_names.shard_name(arguments.job, arguments.shard)
    mesh = world.context.open_mesh(process, name, "rollout")
    await _serve(Shard(mesh, arguments.job, world.generation[arguments.job]))


async def _serve(actor: Any) -> None:
    try:
        await actor.run()
    finally:
        try:
            async with actor.mesh.clock.timeout(5.0, "leaving"):
                await actor.mesh.leave()
        except MeshError:
            pass
