"""Moves of tensors before a time slice: preparations, their failures, prefetches, explanations."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from meshrl.common.api.node import (
    AcquireSlice,
    ExplainSlices,
    InstanceResidency,
    KindMove,
    KindUse,
    PrepareResidency,
    ReleaseSlice,
    ResidencyReport,
    ResidencyState,
    SliceExplanation,
    Worker,
)
from meshrl.common.base.errors import MeshError
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.retry_policy import ServiceUnavailable
from meshrl.common.state.pool.demand.profiles import FunctionProfile, TimeStatistics
from meshrl.common.state.pool.workers.rows import Tier
from meshrl.services.node.instances.gpu_memory import GpuMemoryFull
from meshrl.services.node.slices.gang_residency import PREPARE_FACTOR, PREPARE_FLOOR_S
from meshrl.services.node.slices.slice_queue import ANTICIPATION_CAP_S
from meshrl.services.node.slices.slice_scheduler import FAILURE_PAUSE_S
from meshrl.sim.virtual_loop import VirtualClock
from tests.stories import story_on
from tests.unit.node.time_slices.test_slice_scheduler import LEASES, Stage, on_stage

RATE = 10.0  # bytes per second
SIZE = 100  # bytes of an instance
LOAD, OFFLOAD = "memory>accelerator", "accelerator>memory"  # directions of rates
ENGINE, CORE, OTHER = "g0.0", "g0.1", "g0.2"  # on rank 0; on both; on rank 1


class DeclaredResidency:
    """Worker with room for `budget` bytes, whose moves take virtual time."""

    def __init__(self, clock: VirtualClock, budget: int, present: str, *others: str) -> None:
        self.clock, self.budget = clock, budget
        self.bytes = {present: SIZE} | dict.fromkeys(others, 0)  # on the accelerator
        self.prefetched: set[str] = set()
        self.orders: list[PrepareResidency] = []
        self.state_count = 0  # of descriptions
        self.cancelled: list[str] = []
        self.error: MeshError | None = None
        self.hangs = False

    async def prepare(self, order: PrepareResidency) -> ResidencyReport:
        self.orders.append(order)
        try:
            if self.error is not None:
                raise self.error
            if self.hangs:
                await asyncio.Event().wait()
            return await self._move(order)
        except asyncio.CancelledError:
            self.cancelled.append(order.instance)
            raise

    async def _move(self, order: PrepareResidency) -> ResidencyReport:
        moves = []
        computing = {use.instance for use in order.computing}
        for other in self.bytes.keys() - computing - {order.instance}:
            room = self.budget - sum(self.bytes.values()) + self.bytes[order.instance]
            if room < SIZE and not order.prefetch and self.bytes[other]:
                moves.append(await self._move_one(other, 0))
        if self.budget - sum(self.bytes.values()) >= SIZE > self.bytes[order.instance]:
            moves.append(await self._move_one(order.instance, SIZE))
            if order.prefetch:
                self.prefetched.add(order.instance)
        hidden = SIZE if order.instance in self.prefetched and not order.prefetch else 0
        if hidden:
            self.prefetched.discard(order.instance)
        return ResidencyReport(bool(self.bytes[order.instance]), moves, hidden)

    async def _move_one(self, instance: str, size: int) -> KindMove:
        await self.clock.sleep(SIZE / RATE)
        self.bytes[instance] = size
        tiers = (Tier.MEMORY, Tier.ACCELERATOR) if size else (Tier.ACCELERATOR, Tier.MEMORY)
        return KindMove(instance, "parameters", *tiers, SIZE, SIZE / RATE)

    def state(self) -> ResidencyState:
        self.state_count += 1
        return describe(self.budget, **self.bytes)


def describe(budget: int, **present: int) -> ResidencyState:
    instances = [
        InstanceResidency(name, 1, {"parameters": size}, {"parameters": SIZE}, ["parameters"])
        for name, size in present.items()
    ]
    return ResidencyState(budget, instances, {LOAD: RATE, OFFLOAD: RATE})


def request(mesh: Mesh, instance: str, ticket: int = 1, estimate_s: float = 1.0) -> AcquireSlice:
    return AcquireSlice(
        instance, 1, mesh.name, mesh.incarnation, ticket, "train_step", estimate_s, ["parameters"]
    )


async def explain(mesh: Mesh) -> SliceExplanation:
    return await mesh.ref("worker/w0").call(Worker.explain_slices, ExplainSlices(0.0))


async def release(mesh: Mesh, instance: str, ticket: int = 1) -> None:
    await mesh.ref("worker/w0").call(
        Worker.release_slice, ReleaseSlice(instance, mesh.incarnation, ticket)
    )


def tight(stage: Stage, present: str = ENGINE) -> tuple[DeclaredResidency, DeclaredResidency]:
    """Give both workers room for one instance, and return their residencies."""
    first = DeclaredResidency(stage.clock, SIZE, present, *({ENGINE, CORE} - {present}))
    second = DeclaredResidency(stage.clock, SIZE, CORE, OTHER)
    stage.residencies = {"w0": first, "w1": second}
    return first, second


@story_on(on_stage)
async def test_slice_begins_when_all_workers_have_the_tensors(stage: Stage) -> None:
    first, second = tight(stage)
    _, scheduler = await stage.workers()
    core, _ = await stage.join_instance(1)
    began = stage.clock.monotonic()
    granted = await core.ref("worker/w0").call(Worker.acquire_slice, request(core, CORE))
    waited = stage.clock.monotonic() - began
    assert waited == pytest.approx(2 * SIZE / RATE, abs=0.5)  # out and in, longer than a lease
    assert waited > LEASES.floor_s and stage.kills == []
    assert granted.duration_s == pytest.approx(LEASES.floor_s, abs=0.1)  # from the grant on
    assert first.bytes == {ENGINE: 0, CORE: SIZE} and second.bytes == {CORE: SIZE, OTHER: 0}
    assert scheduler.stats().slice_holders == [CORE]
    [record] = (await explain(core)).slices
    assert (record.instance, record.job, record.function) == (CORE, "j", "train_step")
    assert record.granted_s - record.chosen_s == pytest.approx(20.0, abs=0.5)
    assert [(move.instance, move.target) for move in record.moves] == [
        (ENGINE, "memory"),
        (CORE, "accelerator"),
    ]
    assert record.end == "" and record.ended_s == 0.0


@story_on(on_stage)
async def test_only_another_worker_is_asked_once_about_a_fully_resident_instance(
    stage: Stage,
) -> None:
    first, second = tight(stage)
    for residency in (first, second):
        residency.budget = 10 * SIZE
        residency.bytes = dict.fromkeys(residency.bytes, SIZE)
    await stage.workers()
    (mesh, core), (_, engine), (_, other) = [await stage.join_instance(i) for i in (1, 0, 2)]
    await stage.compute("engine", engine, 0.1, times=5)
    assert first.orders == second.orders == []
    # a process that started there may have moved the kinds of others since its state was read
    for _ in range(5):
        await asyncio.gather(stage.compute("core", core, 0.1), stage.compute("other", other, 0.1))
    assert all(one.granted_s - one.chosen_s < 0.1 for one in (await explain(mesh)).slices[1:])
    assert [order.instance for order in first.orders] == [CORE] * 5
    assert sorted(order.instance for order in second.orders) == [CORE] * 5 + [OTHER] * 5
    assert not any(order.prefetch for order in second.orders)
    assert second.state_count == 1 + len(second.orders)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (GpuMemoryFull("no room", where="w1"), GpuMemoryFull),
        (ServiceUnavailable("restarts", where="w1"), ServiceUnavailable),
    ],
    ids=["memory", "process"],
)
@story_on(on_stage)
async def test_failed_preparation_fails_the_request_and_others_go_on(
    stage: Stage, error: MeshError, raised: type[MeshError]
) -> None:
    _, second = tight(stage, CORE)
    second.error = error
    _, scheduler = await stage.workers()
    (core, slices), (_, engine) = [await stage.join_instance(i) for i in (1, 0)]
    with pytest.raises(raised, match=error.message):
        await core.ref("worker/w0").call(Worker.acquire_slice, request(core, CORE))
    assert scheduler.stats().slice_holders == []
    await stage.compute("engine", engine, 0.1)
    trains = asyncio.create_task(stage.compute("core", slices, 0.1))
    await stage.clock.sleep(30.0)
    assert not trains.done()
    second.error = None  # the requester repeats within its bound
    await trains
    assert stage.kills == []


@story_on(on_stage)
async def test_worker_that_exits_in_a_preparation_fails_the_request(stage: Stage) -> None:
    _, second = tight(stage)
    second.hangs = True
    lost, _ = await stage.worker("w1")
    _, scheduler = await stage.worker("w0")
    (core, _), (engine, _) = [await stage.join_instance(i) for i in (1, 0)]
    waiting = asyncio.create_task(
        core.ref("worker/w0").call(Worker.acquire_slice, request(core, CORE))
    )
    await stage.clock.sleep(30.0)
    await lost.leave()
    with pytest.raises(ServiceUnavailable, match=f"the tensors of {CORE} are not on"):
        await waiting
    await engine.ref("worker/w0").call(Worker.acquire_slice, request(engine, ENGINE))
    assert scheduler.stats().slice_holders == [ENGINE]


@story_on(on_stage)
async def test_hanging_preparation_ends_at_its_own_deadline(stage: Stage) -> None:
    first, _ = tight(stage)
    first.hangs = True
    _, scheduler = await stage.workers()
    (core, _), (engine, _) = [await stage.join_instance(i) for i in (1, 0)]
    first.bytes[ENGINE] = 0
    limit_s = PREPARE_FLOOR_S + PREPARE_FACTOR * SIZE / RATE
    began = stage.clock.monotonic()
    with pytest.raises(ServiceUnavailable, match="moving the tensors"):
        await engine.ref("worker/w0").call(Worker.acquire_slice, request(engine, ENGINE))
    assert stage.clock.monotonic() - began == pytest.approx(limit_s + FAILURE_PAUSE_S, abs=1.0)
    assert first.cancelled == [ENGINE] and scheduler.stats().slice_holders == []
    first.hangs = False
    await core.ref("worker/w0").call(Worker.acquire_slice, request(core, CORE))


@pytest.mark.parametrize("way", ["cancel", "exit", "remove", "release", "disband"])
@story_on(on_stage)
async def test_request_that_is_dropped_in_its_preparation_frees_the_ranks(
    stage: Stage, way: str
) -> None:
    first, _ = tight(stage)
    first.hangs = True
    _, scheduler = await stage.workers()
    (core, _), (engine, _) = [await stage.join_instance(i) for i in (1, 0)]
    calls = core.ref("worker/w0").call(Worker.acquire_slice, request(core, CORE))
    waiting = asyncio.create_task(calls)
    await stage.clock.sleep(1.0)
    assert [order.instance for order in first.orders] == [CORE]
    if way == "cancel":
        waiting.cancel()
    elif way == "exit":
        scheduler.release_instance(CORE)
    elif way == "remove":
        scheduler.set_gang(replace(stage.gang, instances=stage.gang.instances[:1]))
    elif way == "release":
        await release(core, CORE)
    else:
        scheduler.set_gang(None)
        scheduler.set_gang(stage.gang)
    await stage.clock.sleep(1.0)
    assert first.cancelled == [CORE]
    first.hangs = False
    await engine.ref("worker/w0").call(Worker.acquire_slice, request(engine, ENGINE))
    assert scheduler.stats().slice_holders == [ENGINE]
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


@story_on(on_stage)
async def test_waiting_instance_is_prefetched_beside_the_holder(stage: Stage) -> None:
    first, second = tight(stage)
    first.budget = 2 * SIZE  # room beside the engine
    await stage.workers()
    (core, _), (engine, _) = [await stage.join_instance(i) for i in (1, 0)]
    await engine.ref("worker/w0").call(Worker.acquire_slice, request(engine, ENGINE))
    waiting = asyncio.create_task(
        core.ref("worker/w0").call(Worker.acquire_slice, request(core, CORE))
    )
    await stage.clock.sleep(1.0)
    prefetches = [order for order in first.orders if order.prefetch]
    [order] = prefetches
    assert (order.instance, order.computing) == (CORE, [KindUse(ENGINE, ["parameters"])])
    [expected] = order.expected
    assert expected == KindUse(CORE, ["parameters"], expected.starts_in_s)
    assert expected.starts_in_s == pytest.approx(1.0, abs=0.1)
    assert [order.instance for order in second.orders if order.prefetch] == [CORE]
    await stage.clock.sleep(3.0)
    await release(engine, ENGINE)
    began = stage.clock.monotonic()
    await waiting
    assert len([order for order in first.orders if order.prefetch]) == 1  # once for each request
    assert stage.clock.monotonic() - began < SIZE / RATE + ANTICIPATION_CAP_S + 0.1
    record = (await explain(core)).slices[-1]
    assert record.instance == CORE and record.granted_s - record.chosen_s <= SIZE / RATE + 0.5


@story_on(on_stage)
async def test_idle_gang_prefetches_for_the_request_that_is_expected_first(stage: Stage) -> None:
    first, _ = tight(stage)
    await stage.workers()
    (_, core), (_, engine) = [await stage.join_instance(i) for i in (1, 0)]
    for _ in range(2):
        await stage.compute("core", core, 0.1)
        await stage.compute("engine", engine, 0.1)
    await stage.clock.sleep(1.0)
    last = [order for order in first.orders if order.prefetch][-1]
    assert (last.instance, last.computing) == (CORE, [])
    assert [use.instance for use in last.expected] == [CORE, ENGINE]


@story_on(on_stage)
async def test_first_prefetch_of_known_kinds_is_for_the_one_that_repeats_first(
    stage: Stage,
) -> None:
    first, _ = tight(stage)
    await stage.workers()
    (_, core), (_, engine) = [await stage.join_instance(i) for i in (1, 0)]
    for slices, gap_s in ((engine, 20.0), (core, 3.0)):
        gaps = TimeStatistics()
        gaps.add(gap_s)
        slices.profile.set_stored({"generate": FunctionProfile(gaps=gaps, repeats=1.0)})
    await stage.compute("core", core, 0.1)
    await stage.compute("engine", engine, 0.1)  # the core's tensors have left for it
    await stage.clock.sleep(1.0)
    last = [order for order in first.orders if order.prefetch][-1]
    assert (last.instance, last.computing) == (CORE, [])
    assert [use.instance for use in last.expected] == [CORE, ENGINE]


@story_on(on_stage)
async def test_prefetched_bytes_are_recorded_as_hidden(stage: Stage) -> None:
    first, _ = tight(stage)
    first.budget = 2 * SIZE
    await stage.workers()
    (core, _), (engine, _) = [await stage.join_instance(i) for i in (1, 0)]
    await engine.ref("worker/w0").call(Worker.acquire_slice, request(engine, ENGINE, 1, 20.0))
    waiting = asyncio.create_task(
        core.ref("worker/w0").call(Worker.acquire_slice, request(core, CORE))
    )
    await stage.clock.sleep(SIZE / RATE + 1.0)
    await release(engine, ENGINE)
    await asyncio.wait([waiting])
    record = (await explain(core)).slices[-1]
    assert record.hidden_bytes == SIZE and record.moves == []


@story_on(on_stage)
async def test_decisions_name_candidates_scores_and_reasons(stage: Stage) -> None:
    await stage.workers()
    (mesh, core), (_, engine) = [await stage.join_instance(i) for i in (1, 0)]
    holds = asyncio.create_task(stage.compute("engine", engine, 2.0))
    await stage.clock.sleep(0.5)
    await asyncio.gather(holds, stage.compute("core", core, 1.0))
    await stage.clock.sleep(1.0)
    found = await explain(mesh)
    assert (found.gang, found.policy) == ("g0", "hrrs")
    assert [(one.chosen, one.reason) for one in found.decisions] == [
        (ENGINE, "response ratio"),
        (CORE, "response ratio"),
    ]
    [candidate] = found.decisions[1].candidates
    assert (candidate.instance, candidate.function) == (CORE, "generate")
    assert candidate.wait_s == pytest.approx(1.5, abs=0.1) and candidate.switch_s == 0.0
    assert candidate.score == pytest.approx(2.5, abs=0.1)  # the service is unknown: 1 s
    assert [one.end for one in found.slices] == ["released", "released"]
    assert found.slices[1].ended_s - found.slices[1].granted_s == pytest.approx(1.0, abs=0.1)
    later = ExplainSlices(found.slices[1].granted_s)
    recent = await mesh.ref("worker/w0").call(Worker.explain_slices, later)
    assert [one.instance for one in recent.slices] == [CORE]


@story_on(on_stage)
async def test_policy_of_the_mesh_orders_the_next_requests(stage: Stage) -> None:
    _, scheduler = await stage.workers()
    scheduler.set_policy("fifo")
    mesh, engine = await stage.join_instance(0)
    await stage.compute("engine", engine, 0.1)
    found = await explain(mesh)
    assert found.policy == found.decisions[0].policy == "fifo"
    assert found.decisions[0].reason == "oldest request"
