"""A turn on an engine that stands still or dies: it goes on with all that was written, and nothing
else.
"""

from __future__ import annotations

import asyncio

import pytest

from meshrl.services.rollout.routing.engine_link import TURN_S
from meshrl.services.rollout.trajectories.trajectory import Trajectory
from tests.unit.rollout.routing.test_router import LOOK_S, Bench, on_bench

NEW = 300


def begin(bench: Bench, member: int) -> asyncio.Task[Trajectory]:
    return asyncio.create_task(bench.generate(member, new=NEW))


def undisturbed(members: int) -> list[list[int]]:
    found: list[list[int]] = []

    async def story(bench: Bench) -> None:
        for member in range(members):
            found.append((await begin(bench, member)).turn.tolist())

    on_bench(story)
    return found


@pytest.mark.deep
def test_a_turn_that_takes_too_long_goes_on_elsewhere_after_its_last_token() -> None:
    (expected,) = undisturbed(1)

    async def story(bench: Bench) -> None:
        turn = begin(bench, 0)
        await bench.clock.sleep(1.0)
        stuck = bench.engine
        stuck.commands.give(stuck.engine.pause)
        await bench.add("engine/g1")
        await bench.clock.sleep(TURN_S / 2)
        assert not turn.done()
        await bench.clock.sleep(TURN_S / 2 + 10.0)
        assert turn.done() and turn.result().turn.tolist() == expected
        stuck.commands.give(stuck.engine.resume)
        await bench.clock.sleep(5.0)
        assert turn.result().length == 3 + NEW, "what came late was taken in"

    on_bench(story)


def test_a_turn_whose_engine_dies_goes_on_elsewhere_after_its_last_token() -> None:
    expected = undisturbed(3)

    async def story(bench: Bench) -> None:
        turns = [begin(bench, member) for member in range(3)]
        await bench.clock.sleep(1.5)
        assert bench.engine.engine.running == 3
        await bench.add("engine/g1")
        await bench.clock.sleep(2 * LOOK_S)
        await bench.engines.pop("engine/g0").mesh.transport.close()
        await bench.clock.sleep(20.0)
        assert [turn.result().turn.tolist() for turn in turns] == expected
        assert bench.router.continued == 3

    on_bench(story)
