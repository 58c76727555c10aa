"""Actors over a network that loses, repeats, reorders and partitions messages, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from meshrl.common.base.errors import DeadlineExceeded, MeshError, PeerLost
from meshrl.common.base.random import Random
from meshrl.common.mesh.runtime.dependencies import LeaseTerms, MeshDependencies
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.sim.redis.simulated_state import open_simulated_state
from meshrl.sim.virtual_loop import VirtualClock, run_virtual
from meshrl.sim.virtual_network import MemoryNetwork, MemoryTransport, NetworkFaults
from tests.simulated_host import SimulatedHost, staged
from tests.unit.common.mesh.runtime.talking import Number, Talk, Talker, Text


class World:
    def __init__(self, clock: VirtualClock, random: Random, faults: NetworkFaults) -> None:
        self.clock, self.random = clock, random
        self.network = MemoryNetwork(clock, random.child("network"), faults)
        self.state = open_simulated_state(clock)
        self.lost: list[str] = []
        self.mending: asyncio.Task[None] | None = None

    async def clear_faults_after(self, seconds: float) -> None:
        await self.clock.sleep(seconds)
        self.network.faults.loss = 0.0

    async def join(self, name: str, actor: Talker | None = None) -> Mesh:
        mesh = Mesh(
            name,
            "test",
            MeshDependencies(
                state=self.state,
                transport=MemoryTransport(self.network, f"mem:{name}:{self.random.hex_token(2)}"),
                clock=self.clock,
                random=self.random.child(name + self.random.hex_token()),
                host=SimulatedHost(self.clock, self.random.child("host")),
            ),
            terms=LeaseTerms(on_lost=self.lost.append),
        )
        await mesh.join(actor)
        return mesh


def simulate(
    story: Callable[[World], Awaitable[object]],
    *,
    seed: int = 0,
    faults: NetworkFaults | None = None,
) -> Any:
    async def main(clock: VirtualClock, random: Random) -> object:
        return await story(World(clock, random, faults or NetworkFaults()))

    return run_virtual(main, seed, limit_s=7200)


async def get_outcome(call: Awaitable[Any]) -> str:
    try:
        return repr(await call)
    except MeshError as error:
        return error.code


@pytest.mark.parametrize("seed", range(5))
def test_call_runs_at_most_once_under_any_network_fault(seed: int) -> None:
    async def story(world: World) -> tuple[list[int], list[str]]:
        actor = Talker()
        await world.join("a", actor)
        ref = (await world.join("b")).ref("a")
        calls = [get_outcome(ref.call(Talk.count, Number(i), deadline_s=2.0)) for i in range(300)]
        outcomes = list(await asyncio.gather(*calls))
        assert world.network.duplicated_messages > 20 and world.network.lost_messages > 20
        return actor.counted, outcomes

    faults = NetworkFaults(loss=0.1, duplication=0.2, reorder=0.2)
    counted, outcomes = simulate(story, seed=seed, faults=faults)
    assert len(counted) == len(set(counted))
    answered = [o for o in outcomes if o.startswith("Number")]
    assert len(set(answered)) == len(answered) > 150  # each count was returned once
    assert set(outcomes) - set(answered) == {"deadline_exceeded"}
    assert (counted, outcomes) == simulate(story, seed=seed, faults=faults)


@pytest.mark.parametrize("lost", ["request", "item", "end"])
def test_interrupted_stream_ends_with_an_error(lost: str) -> None:
    async def story(world: World) -> float:
        await world.join("a", Talker())
        mesh = await world.join("b")
        items = mesh.ref("a").stream(Talk.patient, Number(20 if lost == "item" else 3))
        if lost == "request":
            world.network.faults.loss = 1.0
            world.mending = asyncio.create_task(world.clear_faults_after(0.5))
        else:
            await anext(items)
            await world.clock.sleep(2.5 if lost == "end" else 0.5)
            world.network.faults.loss = 1.0
            world.mending = asyncio.create_task(world.clear_faults_after(1.0))
        with pytest.raises(PeerLost):
            async for _ in items:
                pass
        return world.clock.monotonic()

    assert simulate(story) < 60.0


def test_stream_keeps_its_order_over_a_reordering_network() -> None:
    async def story(world: World) -> list[int]:
        await world.join("a", Talker())
        items = (await world.join("b")).ref("a").stream(Talk.numbers, Number(300))
        return [item.value async for item in items]

    faults = NetworkFaults(duplication=0.3, reorder=0.3)
    assert simulate(story, faults=faults) == list(range(300))


@staged(simulate)
async def test_partition_causes_a_deadline_and_heals(world: World) -> None:
    a, b = await world.join("a", Talker()), await world.join("b")
    world.network.partition(a.transport.address, b.transport.address)
    start = world.clock.monotonic()
    with pytest.raises(DeadlineExceeded):
        await b.ref("a").call(Talk.echo, Text("anyone?"), deadline_s=10.0)
    assert 10.0 <= world.clock.monotonic() - start < 10.1
    world.network.heal(a.transport.address, b.transport.address)
    assert await b.ref("a").call(Talk.echo, Text("again")) == Text("again")


@staged(simulate)
async def test_stopped_process_receives_its_messages_later(world: World) -> None:
    a, b = await world.join("a", Talker()), await world.join("b")
    world.network.pause(a.transport.address)
    call = asyncio.create_task(b.ref("a").call(Talk.echo, Text("wake up")))
    await world.clock.sleep(5)
    assert not call.done()
    world.network.resume(a.transport.address)
    assert await call == Text("wake up")


@staged(simulate)
async def test_only_an_idempotent_call_survives_its_actors_replacement(world: World) -> None:
    a, b = await world.join("a", Talker()), await world.join("b")
    ref = b.ref("a")
    assert await ref.call(Talk.count, Number(0)) == Number(1)
    world.network.pause(a.transport.address)  # requests arrive, answers never leave
    once = asyncio.create_task(get_outcome(ref.call(Talk.count, Number(1))))
    again = asyncio.create_task(get_outcome(ref.call(Talk.count_idempotent, Number(1))))
    await world.clock.sleep(1)
    await a.leave()
    await world.join("a", Talker())
    assert await once == PeerLost.code
    assert await again == repr(Number(1))


def test_lease_is_renewed_until_it_is_revoked() -> None:
    async def story(world: World) -> float:
        a = await world.join("a", Talker())
        await world.clock.sleep(900)
        assert not world.lost
        key = await world.state.run_script("end_lease", ["{mesh}"], _eviction(a))
        assert key["ended"]
        await world.clock.sleep(3)
        assert len(world.lost) == 1 and world.lost[0].startswith("a (")
        return world.clock.monotonic()

    assert simulate(story) == pytest.approx(903, abs=1)


def test_stopped_process_is_a_lost_peer_after_its_lease() -> None:
    async def story(world: World) -> float:
        a, b = await world.join("a", Talker()), await world.join("b")
        world.network.pause(a.transport.address)
        await world.state.run_script("end_lease", ["{mesh}"], _eviction(a))
        start = world.clock.monotonic()
        with pytest.raises(PeerLost):
            await b.ref("a").call(Talk.count, Number(1), deadline_s=300)
        return world.clock.monotonic() - start

    async def delay(world: World) -> float:
        a, b = await world.join("a", Talker()), await world.join("b")
        ref = b.ref("a")
        await ref.call(Talk.echo, Text("before"))
        world.network.pause(a.transport.address)
        call = asyncio.create_task(ref.call(Talk.count, Number(1), deadline_s=300))
        await world.clock.sleep(1)
        await world.state.run_script("end_lease", ["{mesh}"], _eviction(a))
        with pytest.raises(PeerLost, match="of a has exited"):
            await call
        return world.clock.monotonic()

    assert simulate(story) == pytest.approx(300, abs=1)  # the lost process was never found
    assert float(str(simulate(delay))) < 10


def _eviction(mesh: Mesh) -> dict[str, str]:
    return {"name": mesh.name, "incarnation": mesh.incarnation, "event": "evicted"}


def test_virtual_time_reports_a_deadlock() -> None:
    async def wait_forever(clock: VirtualClock, random: Random) -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(DeadlineExceeded, match="no timer"):
        run_virtual(wait_forever)

    async def exceed_deadline(clock: VirtualClock, random: Random) -> None:
        async with clock.timeout(50, "a nap"):
            await clock.sleep(100)

    with pytest.raises(DeadlineExceeded, match="a nap took longer than 50 s"):
        run_virtual(exceed_deadline)
    with pytest.raises(DeadlineExceeded, match="the limit of 20 s"):
        run_virtual(exceed_deadline, limit_s=20)
