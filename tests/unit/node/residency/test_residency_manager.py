"""Residency manager with role processes whose tensors are real buffers, on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from meshrl.common.api.node import KindUse
from meshrl.common.base.errors import MeshError, NotFound, StorageFull
from meshrl.common.state.pool.scheduling.feasibility import SliceBytes
from meshrl.common.state.pool.workers.rows import Instance, Role, Tier, TierBytes
from meshrl.services.node.instances.desired_roles import DesiredRole
from meshrl.services.node.instances.gpu_memory import GpuMemoryFull
from meshrl.services.node.residency.kind_moves import MIN_MOVE_TIMEOUT_S
from meshrl.services.node.slices.switch_costs import estimate_switch_s
from tests.unit.node.residency.virtual_roles import World, in_world, run_story

BUDGET = TierBytes(accelerator=160)  # 1.6 instances
PHASES = ["load", "offload", "prefetch", "write_back"]


@in_world(TierBytes())
async def test_unlimited_accelerator_costs_no_call(world: World) -> None:
    a, b = await world.start("a"), await world.start("b")
    for instance in "abab":
        assert (await world.take_slice(instance)).moves == []
    assert a.calls == b.calls == [] and world.residency.state().instances == []


@in_world(TierBytes(accelerator=200))
async def test_instances_that_fit_together_are_described_once(world: World) -> None:
    a, b = await world.start("a"), await world.start("b")
    assert not world.residency.state().instances[0].accelerator_bytes  # unknown, so not resident
    for instance in "abab":
        assert (await world.take_slice(instance)).moves == []
    assert a.calls == b.calls == ["describe"]
    assert world.residency.state().accelerator_budget == 200


@in_world(BUDGET)
async def test_instances_take_turns_within_the_budget_and_lose_nothing(world: World) -> None:
    a, b = await world.start("a"), await world.start_offloaded("b")
    for turn in range(6):
        report = await world.take_slice("ba"[turn % 2], waiting=["ab"[turn % 2]])
        assert sum(move.size_bytes for move in report.moves if move.target == "accelerator") >= 40
        assert world.residency.state().rates["memory>accelerator"] == pytest.approx(100, rel=0.1)
    assert a.steps == b.steps == 3 and world.tiers.most[Tier.ACCELERATOR] <= 160
    assert world.budgets.get_usage("engine/a").accelerator == 100


@in_world(TierBytes(accelerator=100, memory=130))
async def test_state_has_the_tiers_of_copies_and_the_room_in_memory(world: World) -> None:
    await world.start("a")
    cold = await world.start("b", Tier.DISK)
    report = await world.take_slice("b")
    state = world.residency.state()
    b, a = state.instances
    assert (a.memory_bytes, sum(a.disk_bytes.values())) == (cold.sizes, 0)
    assert (sum(b.memory_bytes.values()), b.disk_bytes) == (0, cold.sizes)
    assert state.memory_room == 30
    without_b = replace(state, instances=[a, replace(b, accelerator_bytes={})])
    loads_s = sum(move.duration_s for move in report.moves if move.source == Tier.DISK)
    assert loads_s == pytest.approx(5.0, abs=0.1)
    assert estimate_switch_s("b", [], [without_b]) == pytest.approx(loads_s, abs=0.1)


@in_world(TierBytes(accelerator=100))
async def test_load_begins_before_all_that_must_leave_has_left(world: World) -> None:
    await world.start("a")
    b = await world.start_offloaded("b")
    began = world.clock.monotonic()
    report = await world.prepare("b")
    # 1 s of copies in each direction; the first kind leaves after 0.2 s or 0.6 s
    assert world.clock.monotonic() - began < 1.85
    assert [move.kind for move in report.moves if move.instance == "b"] == list(b.sizes)


@in_world(TierBytes(accelerator=100))
async def test_only_the_requested_kinds_are_loaded(world: World) -> None:
    a = await world.start_offloaded("a")
    await world.start("b")
    report = await world.prepare("a", "parameters")
    assert [m.kind for m in report.moves if m.instance == "a"] == ["parameters"]
    assert set(a.buffers[Tier.ACCELERATOR]) == {"parameters"}


@in_world(TierBytes(accelerator=110))
async def test_each_function_has_room_for_its_kinds_and_what_it_computes(world: World) -> None:
    # all kinds take 100 bytes; a pass computes with 30 beside them, an update with 5
    role = DesiredRole("g0", Instance("a", "job", Role.ROLLOUT), 0, "worker/w0")
    assert world.residency.reserve(role, SliceBytes(passes=130, update=105, largest=105))
    a = await world.start("a")
    for _ in range(2):
        await world.prepare("a", "parameters", "gradients")
        assert set(a.buffers[Tier.ACCELERATOR]) == {"parameters", "gradients"}
        await world.prepare("a", "parameters", "gradients", "optimizer")
        assert set(a.buffers[Tier.ACCELERATOR]) == set(a.sizes)
        assert not world.residency.state().fits_together, "a pass needs an order"
    await world.prepare("a", "parameters")
    with pytest.raises(GpuMemoryFull, match="60 bytes of the accelerator"):
        await world.prepare("a")  # an unknown function


@in_world(BUDGET)
async def test_repeated_ticket_is_one_order(world: World) -> None:
    await world.start("a")
    b = await world.start_offloaded("b")
    order = world.order("b")
    first, second = await asyncio.gather(*(world.residency.prepare(order) for _ in range(2)))
    assert first == second and len([one for one in b.calls if one.startswith("load")]) == 3
    assert (await world.residency.prepare(order)).moves == []


@in_world(BUDGET)
async def test_prefetch_hides_loads_and_is_reported_once(world: World) -> None:
    await world.start("a")
    b = await world.start_offloaded("b")
    await world.prepare("a")
    ahead = await world.prepare("b", prefetch=True, computing=["a"])
    assert not ahead.is_complete and sum(move.size_bytes for move in ahead.moves) == 40
    assert [one for one in b.calls if one.startswith("load")] == [
        "load parameters",
        "load gradients",
    ]
    report = await world.prepare("b")
    assert report.prefetched_bytes == 40
    assert sum(move.size_bytes for move in report.moves if move.instance == "b") == 60
    await world.prepare("a")
    assert (await world.prepare("b")).prefetched_bytes == 0


@in_world(BUDGET)
async def test_order_cancels_the_prefetch_of_another_instance_between_chunks(world: World) -> None:
    for instance in "abc":
        await (world.start if instance == "a" else world.start_offloaded)(instance)
    await world.prepare("a")
    ahead = asyncio.create_task(world.prepare("b", prefetch=True, computing=["a"]))
    await world.clock.sleep(0.15)
    report = await world.prepare("c")
    assert {move.instance for move in report.moves} == {"a", "c"}
    assert not (await ahead).is_complete
    assert world.processes["b"].role.calls[-1] == "cancel"
    assert not world.processes["b"].role.buffers[Tier.ACCELERATOR]
    await world.processes["c"].role.compute(["parameters"], 1.0)


@in_world(BUDGET)
async def test_prefetch_cancelled_before_it_begins_is_made_again(world: World) -> None:
    for instance in "abc":
        await (world.start if instance == "a" else world.start_offloaded)(instance)
    await world.prepare("a")
    prefetch = world.order("b", computing=["a"], prefetch=True)
    order = asyncio.create_task(world.prepare("c"))
    ahead = asyncio.create_task(world.residency.prepare(prefetch))
    assert not (await ahead).moves
    await order
    await world.prepare("a")
    assert (await world.residency.prepare(prefetch)).moves


@in_world(BUDGET)
async def test_order_awaits_the_prefetch_of_its_own_instance(world: World) -> None:
    await world.start("a")
    b = await world.start_offloaded("b")
    await world.prepare("a")
    ahead = asyncio.create_task(world.prepare("b", prefetch=True, computing=["a"]))
    await world.clock.sleep(0.15)
    report = await world.prepare("b")
    assert report.prefetched_bytes == 20 and "cancel" not in b.calls
    assert not (await ahead).is_complete


@in_world(BUDGET)
async def test_kinds_written_back_behind_the_holder_leave_at_once(world: World) -> None:
    a = await world.start("a")
    for instance in "bc":
        await world.start_offloaded(instance)
    await world.prepare("b")
    beside = world.prepare("b", prefetch=True, computing=["b"])
    await asyncio.gather(beside, world.processes["b"].role.compute(list(a.sizes), 5.0))
    assert a.calls[-1] == "write_back optimizer memory" and not a.dirty
    began = world.clock.monotonic()
    report = await world.prepare("c", waiting=["b"])
    assert {move.instance for move in report.moves} == {"a", "b", "c"}
    [left] = [move for move in report.moves if move.instance == "a"]
    assert left.duration_s < 0.1 and world.clock.monotonic() - began < 2.0


@in_world(BUDGET)
async def test_kinds_that_a_slice_does_not_need_make_room_while_it_computes(world: World) -> None:
    a, b = await world.start("a"), await world.start_offloaded("b")
    use = KindUse("a", ["parameters", "gradients"])
    await world.prepare("a", *use.kinds)
    computes = asyncio.create_task(a.compute(use.kinds, 5.0))
    await world.clock.sleep(0.1)
    ahead = world.order("b", prefetch=True, waiting=["b"])
    ahead.expected.append(KindUse("a", ["optimizer"], 60.0))
    ahead.computing.append(use)
    assert (await world.residency.prepare(ahead)).is_complete and not computes.done()
    assert {*a.buffers[Tier.ACCELERATOR]} == {*use.kinds} and a.steps == 0
    await computes
    report = await world.take_slice("b")
    assert (report.moves, report.prefetched_bytes, b.steps) == ([], 100, 1)


@in_world(TierBytes(accelerator=100, memory=140))
async def test_full_memory_sends_kinds_to_disk(world: World) -> None:
    a = await world.start("a")
    await world.start_offloaded("b")
    await world.prepare("b")
    assert a.buffers[Tier.DISK] and world.tiers.most[Tier.MEMORY] <= 140
    await world.take_slice("a")


@in_world(TierBytes(accelerator=100, memory=120, disk=20))
async def test_full_disk_is_a_typed_refusal_and_changes_nothing(world: World) -> None:
    a = await world.start("a")
    await world.start_offloaded("b")
    with pytest.raises(StorageFull, match="20 bytes of memory and 20 bytes of disk"):
        await world.prepare("b")
    assert a.buffers[Tier.ACCELERATOR].keys() == a.sizes.keys()
    await world.take_slice("a")


@in_world(TierBytes(accelerator=100))
async def test_tier_that_rejects_a_copy_is_avoided(world: World) -> None:
    a = await world.start("a")
    await world.start_offloaded("b")
    a.rejects = {Tier.MEMORY}
    await world.prepare("b")
    assert a.buffers[Tier.DISK].keys() == a.sizes.keys()
    a.rejects = {Tier.MEMORY, Tier.DISK}
    await world.take_slice("a")
    with pytest.raises(StorageFull):
        await world.prepare("b")


@in_world(BUDGET)
async def test_instances_take_turns_while_redis_is_away(world: World) -> None:
    a, b = await world.start("a"), await world.start_offloaded("b")
    await world.take_slice("b")
    world.redis.faults.is_unreachable = True
    for instance in "abab":
        await world.take_slice(instance)
    assert (a.steps, b.steps) == (2, 3)


@in_world(BUDGET)
async def test_kinds_of_computing_instances_never_move(world: World) -> None:
    a = await world.start("a")
    await world.start_offloaded("b")
    with pytest.raises(GpuMemoryFull, match="at most 60 can be free"):
        await world.prepare("b", computing=["a"])
    assert a.buffers[Tier.ACCELERATOR].keys() == a.sizes.keys()
    with pytest.raises(NotFound):
        await world.prepare("c")


async def fail_in_phase(world: World, phase: str, fault: Callable[[], Awaitable[None]]) -> None:
    """Let a process fail in a phase: b loads, a offloads, b is prefetched, a is written back."""
    a, b = await world.start("a"), await world.start_offloaded("b")
    failing = b if phase in ("load", "prefetch") else a
    failing.faults["load" if phase == "prefetch" else phase] = fault
    if phase == "prefetch":
        await world.prepare("a")
        ahead = asyncio.create_task(world.prepare("b", prefetch=True, computing=["a"]))
        await world.clock.sleep(1.0)
        ahead.cancel()
        await asyncio.gather(ahead, return_exceptions=True)
    elif phase == "write_back":
        await world.prepare("b")
        beside = world.prepare("b", prefetch=True, computing=["b"])
        await asyncio.gather(beside, return_exceptions=True)
    else:
        with_error = await asyncio.gather(world.prepare("b"), return_exceptions=True)
        assert isinstance(with_error[0], MeshError) == (phase == "load")


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", ["hangs", "dies"])
def test_failed_process_does_not_hold_the_others_up(phase: str, kind: str) -> None:
    async def story(world: World) -> None:
        failing = "b" if phase in ("load", "prefetch") else "a"
        other = "a" if failing == "b" else "b"

        async def fault() -> None:
            if kind == "hangs":
                await world.clock.sleep(1e6)
            await world.exit(failing)

        began = world.clock.monotonic()
        await fail_in_phase(world, phase, fault)
        await world.take_slice(other)
        c = await world.start_offloaded("c")
        await world.take_slice("c")  # it needs what the failed process had
        assert world.clock.monotonic() - began < 2.5 * MIN_MOVE_TIMEOUT_S
        assert world.killed == ([failing] if kind == "hangs" else [])
        assert failing not in world.processes and c.steps == 1
        assert failing not in {one.instance for one in world.residency.state().instances}

    run_story(story, BUDGET)


def test_cancellation_at_any_time_leaves_everything_whole() -> None:
    async def story(world: World, after_s: float) -> None:
        await world.start("a")
        b = await world.start_offloaded("b")
        task = asyncio.create_task(world.prepare("b"))
        await world.clock.sleep(after_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        calls = len(b.calls)
        await world.clock.sleep(5.0)
        assert len(b.calls) == calls or after_s > 1.5  # nothing moves any more
        for instance in "abab":
            await world.take_slice(instance)

    for step in range(6):
        run_story(lambda world, s=step: story(world, 0.3 * s + 0.05), BUDGET)  # type: ignore[misc]


def test_worker_can_exit_at_any_time() -> None:
    async def story(world: World, after_s: float) -> None:
        await world.start("a")
        await world.start_offloaded("b")
        await world.prepare("a")
        tasks = [
            asyncio.create_task(world.prepare("b", prefetch=True, computing=["a"])),
            asyncio.create_task(world.prepare("b")),
        ]
        await world.clock.sleep(after_s)
        began = world.clock.monotonic()
        await world.residency.__aexit__(None, None, None)
        assert world.clock.monotonic() - began < 1.0
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(task.done() for task in tasks)

    for step in range(4):
        run_story(lambda world, s=step: story(world, 0.5 * s + 0.05), BUDGET)  # type: ignore[misc]


def chaos(seed: int) -> None:
    """Run random orders, prefetches, cancellations and exits of three instances."""

    async def story(world: World) -> None:
        random = world.random.child("chaos")
        for instance in "abc":
            await world.start_offloaded(instance)
        for _ in range(25):
            names = list(world.processes)
            holder = random.choice(names)
            waiting = [name for name in names if name != holder]
            task = asyncio.create_task(world.take_slice(holder, random.random(), waiting=waiting))
            if random.random() < 0.2:
                await world.clock.sleep(random.random())
                if not world.processes[holder].role.is_computing:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
            else:
                await asyncio.wait([task])
                assert task.exception() is None
            if waiting and not world.processes[holder].role.is_computing:
                ahead = world.prepare(random.choice(waiting), prefetch=True, computing=[])
                ahead_task = asyncio.create_task(ahead)
                await world.clock.sleep(random.random())
                if random.random() < 0.3:
                    ahead_task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if random.random() < 0.1 and len(names) > 1:
                name = random.choice(names)
                await world.exit(name)
                role = await world.start_offloaded(name)
                assert role.steps == 0

    run_story(
        story, TierBytes(accelerator=160 + 20 * (seed % 5), memory=[0, 900][seed % 2]), seed=seed
    )


@pytest.mark.parametrize("seed", range(2))
def test_random_orders_lose_no_tensor_and_exceed_no_budget(seed: int) -> None:
    chaos(seed)


@pytest.mark.deep
def test_many_random_orders_lose_no_tensor_and_exceed_no_budget() -> None:
    for seed in range(200):
        chaos(seed)
