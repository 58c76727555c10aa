"""Worker with role processes whose tensors are real buffers, on a virtual clock.

Every process moves its buffers in chunks, and asserts what no worker may do: exceed a budget, or
move tensors of a process that computes.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from meshrl.common.api.calls.role import (
    KindState,
    KindStates,
    MoveKinds,
    RoleControl,
    SetTier,
    TierUsage,
)
from meshrl.common.api.node import KindUse, PrepareResidency, ResidencyReport
from meshrl.common.base.errors import Fenced, Refused, StorageFull
from meshrl.common.base.random import Random
from meshrl.common.mesh.runtime.calls.actor import Actor, call
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state.pool.workers.rows import Tier, TierBytes
from meshrl.common.state.redis.client import StateClient
from meshrl.services.node.instances.budgets import Budgets
from meshrl.services.node.instances.gpu_memory import GpuMemoryGuard
from meshrl.services.node.residency.residency_manager import ResidencyManager
from meshrl.sim.redis.server import SimulatedRedisServer
from meshrl.sim.redis.simulated_state import open_state_on
from meshrl.sim.virtual_loop import VirtualClock, run_virtual
from meshrl.sim.virtual_network import MemoryNetwork
from tests.meshes import make_virtual_mesh

CHUNK = 10  # bytes
CHUNK_S = {Tier.MEMORY: 0.1, Tier.DISK: 0.5}  # seconds of a chunk's copy
Buffer = np.ndarray
SIZES = {"parameters": 20, "gradients": 20, "optimizer": 60}


@dataclass
class Tiers:
    """Bytes of a worker's tiers, of all processes."""

    budgets: TierBytes
    used: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(list(Tier)[:3], 0))
    most: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(list(Tier)[:3], 0))

    def has_room(self, tier: Tier, size: int) -> bool:
        limit = getattr(self.budgets, str(tier))
        return not limit or self.used[tier] + size <= limit

    def take(self, tier: Tier, size: int) -> None:
        self.used[tier] += size
        self.most[tier] = max(self.most[tier], self.used[tier])
        limit = getattr(self.budgets, str(tier))
        assert not limit or self.used[tier] <= limit, f"{self.used[tier]} bytes of {tier}"


class KindRole(Actor):
    """Role process with buffers by kind and tier."""

    interface = RoleControl

    def __init__(
        self, clock: VirtualClock, tiers: Tiers, sizes: dict[str, int], tier: Tier
    ) -> None:
        self.clock, self.tiers, self.sizes = clock, tiers, sizes
        self.buffers: dict[Tier, dict[str, Buffer]] = {tier: {} for tier in tiers.used}
        self.dirty: set[str] = set()
        self.calls: list[str] = []
        self.order = 0
        self.cancelled: set[int] = set()
        self.computing_kinds: frozenset[str] = frozenset()
        self.is_dead = self.is_asleep = False
        self.steps = 0
        # by action: called at each chunk of such a move; "unmap": at each segment
        self.faults: dict[str, Callable[[], Awaitable[None]]] = {}
        self.rejects: set[Tier] = set()
        self._moving = asyncio.Lock()
        for kind, size in sizes.items():
            self._put(tier, kind, np.zeros(size, np.uint8))
            if tier == Tier.ACCELERATOR:
                self.dirty.add(kind)

    def _put(self, tier: Tier, kind: str, buffer: Buffer) -> None:
        self.tiers.take(tier, buffer.nbytes)
        self._drop(tier, kind)
        self.buffers[tier][kind] = buffer

    def _drop(self, tier: Tier, kind: str) -> None:
        buffer = self.buffers[tier].pop(kind, None)
        if buffer is not None:
            self.tiers.take(tier, -buffer.nbytes)

    def die(self) -> None:
        """Free what a process has; copies in memory and on disk are its worker's."""
        self.is_dead = True
        for kind in self.sizes:
            self._drop(Tier.ACCELERATOR, kind)

    def delete_copies(self) -> None:
        for tier, kind in itertools.product((Tier.MEMORY, Tier.DISK), self.sizes):
            self._drop(tier, kind)

    async def compute(self, kinds: Sequence[str], lasts_s: float) -> None:
        """Change tensors for some seconds."""
        async with self._moving:
            if self.is_asleep:  # it was too late for this time slice
                return
            self.computing_kinds = frozenset(kinds)
        await self._compute(kinds, lasts_s)

    async def _compute(self, kinds: Sequence[str], lasts_s: float) -> None:
        await self.clock.sleep(lasts_s)
        self.steps += 1
        for kind in kinds:
            buffer = self.buffers[Tier.ACCELERATOR][kind]
            assert np.all(buffer == (self.steps - 1) % 251), kind
            buffer[:] = self.steps % 251
            self.dirty.add(kind)
        self.computing_kinds = frozenset()

    @property
    def is_computing(self) -> bool:
        return bool(self.computing_kinds)

    @call(RoleControl.drain)
    def drain(self, reason: str) -> None:
        """Do nothing: all work is done in time slices."""

    @call(RoleControl.set_tier)
    async def set_tier(self, request: SetTier) -> TierUsage:
        """Move all kinds, as the process sleeps or wakes."""
        action = "load" if request.tier == Tier.ACCELERATOR else "offload"
        if action == "load" and not self.is_asleep:
            return self._usage()
        missing = [kind for kind in self.sizes if kind not in self.buffers[Tier.ACCELERATOR]]
        kinds = missing if action == "load" else list(self.sizes)
        async with self._moving:
            self.is_asleep = action == "offload"
            for kind in kinds:
                order = MoveKinds(0, action, [kind], request.tier)
                await self._move(order, kind)
        return self._usage()

    def _usage(self) -> TierUsage:
        return TierUsage(*(sum(b.nbytes for b in one.values()) for one in self.buffers.values()))

    @call(RoleControl.describe_kinds)
    def describe_kinds(self, _: None) -> KindStates:
        self.calls.append("describe")
        return self._states()

    def _states(self) -> KindStates:
        sizes = {
            tier: {kind: buffer.nbytes for kind, buffer in buffers.items()}
            for tier, buffers in self.buffers.items()
        }
        return KindStates(
            [
                KindState(
                    kind,
                    size,
                    accelerator_bytes=sizes[Tier.ACCELERATOR].get(kind, 0),
                    memory_bytes=sizes[Tier.MEMORY].get(kind, 0),
                    disk_bytes=sizes[Tier.DISK].get(kind, 0),
                    is_dirty=kind in self.dirty,
                    can_drop=False,
                )
                for kind, size in self.sizes.items()
            ]
        )

    @call(RoleControl.unmap_segment)
    async def unmap_segment(self, inode: int) -> None:
        if "unmap" in self.faults:
            await self.faults["unmap"]()
        self.calls.append(f"unmap {inode}")

    @call(RoleControl.move_kinds)
    async def move_kinds(self, request: MoveKinds) -> KindStates:
        if request.order <= self.order:
            raise Fenced(f"order {request.order} after {self.order}")
        self.order = request.order
        self.calls.append(f"{request.action} {' '.join(request.kinds)} {request.tier}".strip())
        # it completes even if its caller has exited
        self._task = asyncio.create_task(self._move_all(request))
        return await asyncio.shield(self._task)

    async def _move_all(self, request: MoveKinds) -> KindStates:
        is_used = self.computing_kinds.intersection(request.kinds)
        assert not is_used, "a process moves tensors that it computes with"
        async with self._moving:
            if self.is_asleep:
                raise Refused("the process moves as a whole")
            for kind in request.kinds:
                if request.order not in self.cancelled:
                    await self._move(request, kind)
        return self._states()

    @call(RoleControl.cancel_move)
    async def cancel_move(self, order: int) -> KindStates:
        self.calls.append("cancel")
        self.cancelled.add(order)
        async with self._moving:
            return self._states()

    async def _move(self, request: MoveKinds, kind: str) -> None:
        on = self.buffers[Tier.ACCELERATOR]
        if request.action == "load":
            source = next(t for t in (Tier.MEMORY, Tier.DISK) if kind in self.buffers[t])
            self._put(Tier.ACCELERATOR, kind, np.full(self.sizes[kind], 255, np.uint8))
            target = on[kind]
            if not await self._copy(request, self.buffers[source][kind], target, source):
                self._drop(Tier.ACCELERATOR, kind)
            return
        tier = Tier(request.tier)
        if kind in self.dirty and kind in on:
            if tier in self.rejects:
                raise StorageFull(f"{tier} is full")
            copy = np.zeros_like(on[kind])
            if not self.tiers.has_room(tier, copy.nbytes):
                self._drop(tier, kind)
            self.tiers.take(tier, copy.nbytes)
            is_whole = await self._copy(request, on[kind], copy, tier)
            if is_whole:
                for stale in (Tier.MEMORY, Tier.DISK):
                    self._drop(stale, kind)
            self.tiers.take(tier, -copy.nbytes)
            if not is_whole:
                return
            self._put(tier, kind, copy)
            self.dirty.discard(kind)
        if request.action == "offload":
            self._drop(Tier.ACCELERATOR, kind)

    async def _copy(self, request: MoveKinds, source: Buffer, target: Buffer, tier: Tier) -> bool:
        """Copy in chunks; return False if the order was cancelled between two of them."""
        for begin in range(0, len(source), CHUNK):
            if request.action in self.faults:
                await self.faults[request.action]()
            await self.clock.sleep(CHUNK_S[tier])
            if request.order in self.cancelled or self.is_dead:
                return False
            target[begin : begin + CHUNK] = source[begin : begin + CHUNK]
        return True


@dataclass
class Process:
    """Process as its supervisor knows it."""

    name: str
    process_key: tuple[str, int]
    pid: int
    role: KindRole
    mesh: Mesh
    is_ready: bool = True
    is_time_sliced: bool = True
    is_moving: bool = False
    tier: Tier = Tier.ACCELERATOR


class World:
    """Worker w0 with its residency manager, and role processes."""

    def __init__(self, clock: VirtualClock, random: Random, budgets: TierBytes) -> None:
        self.clock, self.random = clock, random
        self.redis = SimulatedRedisServer(clock)
        self.state = open_state_on(self.redis, StateClient, clock)
        self.network = MemoryNetwork(clock, random.child("network"))
        self.tiers = Tiers(budgets)
        self.processes: dict[str, Process] = {}  # by instance
        self.killed: list[str] = []
        self.mesh = self.make_mesh("worker/w0")
        self.budgets = Budgets(budgets, self.mesh.host, Path())
        self.residency = ResidencyManager(
            self.mesh,
            self.budgets,
            GpuMemoryGuard(self.mesh),
            lambda: list(self.processes.values()),
            self.kill,
        )
        self._orders = 0
        self._exited: dict[str, KindRole] = {}  # their copies are replaced by the next process's

    def make_mesh(self, name: str) -> Mesh:
        return make_virtual_mesh(name, self.state, self.network, self.clock, self.random)

    async def start(self, instance: str, tier: Tier = Tier.ACCELERATOR) -> KindRole:
        """Start a process whose tensors are on a tier."""
        if (earlier := self._exited.pop(instance, None)) is not None:
            earlier.delete_copies()
        role = KindRole(self.clock, self.tiers, SIZES, tier)
        mesh = self.make_mesh(f"engine/{instance}")
        await mesh.join(role)
        pid = 1000 + self.random.randrange(1 << 20)
        self.processes[instance] = Process(mesh.name, (instance, 1), pid, role, mesh)
        used = TierBytes(**{str(tier): sum(SIZES.values())})
        self.budgets.record_usage(mesh.name, used, can_move=True)
        return role

    async def start_offloaded(self, instance: str) -> KindRole:
        return await self.start(instance, Tier.MEMORY)

    async def kill(self, instance: str, generation: int, why: str) -> None:
        self.killed.append(instance)
        await self.clock.sleep(0.5)
        await self.exit(instance)

    async def exit(self, instance: str) -> None:
        """End a process; its supervisor notices at once."""
        process = self.processes[instance]
        process.pid, process.is_ready = 0, False
        process.role.die()
        await process.mesh.leave()
        self.budgets.record_exit(process.name)
        self.residency.release_instance(instance)
        self._exited[instance] = self.processes.pop(instance).role

    def order(
        self,
        instance: str,
        *kinds: str,
        computing: Sequence[str] = (),
        waiting: Sequence[str] = (),
        **more: object,
    ) -> PrepareResidency:
        self._orders += 1
        fields = {
            "ticket": f"{instance}/{self._orders}",
            "computing": [KindUse(one, []) for one in computing],
            "prefetch": False,
            "expected": [KindUse(one, [], 1.0 + number) for number, one in enumerate(waiting)],
            **more,
        }
        return PrepareResidency(instance=instance, generation=1, kinds=list(kinds), **fields)  # type: ignore[arg-type]

    async def prepare(self, instance: str, *kinds: str, **more: Any) -> ResidencyReport:
        return await self.residency.prepare(self.order(instance, *kinds, **more))

    async def take_slice(self, instance: str, lasts_s: float = 1.0, **more: Any) -> ResidencyReport:
        """Prepare an instance, and let it compute on all of its kinds."""
        report = await self.prepare(instance, **more)
        role = self.processes[instance].role
        await role.compute(list(role.sizes), lasts_s)
        return report


def in_world(
    budgets: TierBytes, *, limit_s: float = 3600.0
) -> Callable[[Callable[[World], Awaitable[None]]], Callable[[], None]]:
    """Make a test of a story with a worker of these budgets."""

    def decorate(story: Callable[[World], Awaitable[None]]) -> Callable[[], None]:
        def test() -> None:
            run_story(story, budgets, limit_s=limit_s)

        test.__name__, test.__doc__ = story.__name__, story.__doc__
        return test

    return decorate


def run_story(
    story: Callable[[World], Awaitable[None]],
    budgets: TierBytes,
    *,
    seed: int = 0,
    limit_s: float = 3600.0,
) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        world = World(clock, random, budgets)
        await world.mesh.join(None)
        async with world.residency:
            await story(world)
        left = [task.get_name() for task in asyncio.all_tasks() if "prepare" in task.get_name()]
        assert not left, left

    run_virtual(main, seed=seed, limit_s=limit_s)
