"""Orders beside processes that start: their rooms, and the first reports of their kinds."""

from __future__ import annotations

import asyncio

from meshrl.common.state.pool.scheduling.feasibility import SliceBytes
from meshrl.common.state.pool.workers.rows import Instance, Role, Tier, TierBytes
from meshrl.services.node.instances.desired_roles import DesiredRole
from tests.unit.node.residency.virtual_roles import KindRole, World, in_world

BUDGET = TierBytes(accelerator=160)  # 1.6 instances


def describe_role(instance: str) -> DesiredRole:
    return DesiredRole("g0", Instance(instance, "job", Role.ROLLOUT), 0, "worker/w0")


async def begin_start(world: World, instance: str) -> KindRole:
    """Start a process that keeps its claim of 110 bytes, because it has no tier yet."""
    assert world.residency.reserve(describe_role(instance), SliceBytes(110, 110, 110))
    role = await world.start(instance)
    world.budgets.reserve(f"engine/{instance}", 110)
    return role


def count_offloads(role: KindRole) -> int:
    return sum(one.startswith("offload") for one in role.calls)


@in_world(BUDGET)
async def test_prefetch_leaves_the_kinds_of_a_starting_process(world: World) -> None:
    a, b = await begin_start(world, "a"), await world.start_offloaded("b")
    await world.prepare("b", prefetch=True, waiting=["b"])
    # the room of kinds that left would stay claimed
    assert not any(one.startswith(("offload", "write_back")) for one in a.calls)
    assert set(b.buffers[Tier.ACCELERATOR]) == {"parameters", "gradients"}


@in_world(BUDGET)
async def test_order_brings_all_kinds_beside_a_starting_process(world: World) -> None:
    a, b = await begin_start(world, "a"), await world.start_offloaded("b")
    assert (await world.prepare("b")).is_complete
    assert set(b.buffers[Tier.ACCELERATOR]) == set(b.sizes) and count_offloads(a)
    assert not world.budgets.has_reservation("engine/a")


@in_world(BUDGET)
async def test_order_plans_again_if_its_room_is_taken_while_others_leave(world: World) -> None:
    a, b = await world.start("a"), await world.start_offloaded("b")

    async def claim_room() -> None:
        world.budgets.reserve("engine/c", 50)

    a.faults["offload"] = claim_room
    assert (await world.prepare("b")).is_complete
    assert set(b.buffers[Tier.ACCELERATOR]) == set(b.sizes)
    assert not a.buffers[Tier.ACCELERATOR]


@in_world(BUDGET)
async def test_holder_is_described_again_after_a_request_for_room(world: World) -> None:
    a = await world.start("a")
    await world.start_offloaded("b")
    await world.prepare("a")  # it computes from now on
    assert not await world.residency.claim_free_room(describe_role("c"), 100)
    described = a.calls.count("describe")
    await world.prepare("b")
    assert a.calls.count("describe") == described + 1


@in_world(BUDGET)
async def test_order_loads_the_kinds_of_a_process_whose_start_ends_meanwhile(world: World) -> None:
    await world.start("a")
    b = await world.start_offloaded("b")
    process = world.processes["b"]
    process.tier = Tier.ABSENT
    ordered = asyncio.create_task(world.prepare("b"))
    while "describe" not in b.calls:
        await world.clock.sleep(1e-5)
    process.tier = Tier.ACCELERATOR  # the answer is of the state before
    assert (await ordered).is_complete
    assert set(b.buffers[Tier.ACCELERATOR]) == set(b.sizes)
