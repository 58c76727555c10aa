"""An engine over the wire: pausing and sleeping, with requests in work."""

from __future__ import annotations

import numpy as np

from common.api.engine import Engine, Rest
from common.generation.contract import Request
from tests.unit.rollout.routing.test_router import Bench, on_bench


def test_a_request_that_the_engine_cannot_serve_ends_as_aborted() -> None:
    async def story(bench: Bench) -> None:
        bench.engine.command(lambda: bench.engine._admit([impossible()], []))
        await bench.generate(0)

    on_bench(story)


def impossible() -> Request:
    return Request(999, np.array([1], np.int32), 5, 1.0, (), 0, -1, top_p=7.0)


def test_an_engine_that_rests_keeps_its_requests_and_goes_on() -> None:
    async def story(bench: Bench) -> None:
        engine = bench.rollout.ref("engine/g0")
        for asleep in (False, True):
            turn = bench.begin(int(asleep))
            await bench.clock.sleep(0.05)
            await engine.call(Engine.rest, Rest(paused=not asleep, asleep=asleep))
            await bench.clock.sleep(5.0)
            assert not turn.done() and bench.engine.asleep == asleep
            await engine.call(Engine.rest, Rest(paused=False, asleep=False))
            if asleep:  # `follow` fetches the weights then
                assert bench.engine.manifest == "" and bench.engine.changed.is_set()
                await bench.engine.swap({}, 3, "third")
                assert bench.engine.engine.version == 3
            await turn

    on_bench(story)
