"""A core begins in turns, where its gang takes them: it never computes beside another's turn."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from pathlib import Path
from typing import cast

from meshrl.common.api.calls.interface import Interface
from meshrl.common.api.node import GangTurn, GiveBack, TakeTurn, Worker
from meshrl.common.base.clock import Clock
from meshrl.common.base.random import Random
from meshrl.common.mesh.residents.turns import Turns
from meshrl.common.mesh.runtime.calls.actor import Actor, call
from meshrl.services.trainer.core.first_version import SLICE_S
from meshrl.sim.loop import VirtualLoop, run_virtual
from tests.unit.trainer.tiers.bench import Bench

KEEPER = "worker/w7"


class TurnCalls(Interface):
    """What of a worker's interface is about turns."""


TurnCalls.methods = {name: Worker.methods[name] for name in ("take_turn", "give_back")}


class Keeper(Actor):
    interface = TurnCalls

    def __init__(self) -> None:
        self.functions: list[str] = []
        self.held = False

    @call(Worker.take_turn)
    def take_turn(self, request: TakeTurn) -> GangTurn:
        assert not self.held
        self.functions.append(request.function)
        self.held = True
        return GangTurn(request.ticket, 60.0)

    @call(Worker.give_back)
    def give_back(self, request: GiveBack) -> None:
        self.held = False


def test_every_slice_of_a_warm_start_runs_in_a_turn(tmp_path: Path) -> None:
    async def main(clock: Clock, random: Random) -> None:
        async with Bench(clock, random, tmp_path) as bench:
            core, keeper, worker = bench.core, Keeper(), bench.mesh(KEEPER)
            await worker.join(keeper)
            core.runner.turns = Turns(core.mesh, KEEPER, "g0.0", 1, enabled=True)
            assert not await core.first._made(lambda step, loss: None, lambda told: None)
            assert keeper.functions == ["warm_start"]

            def pieces() -> Generator[None, None, str]:
                for _ in range(3):
                    assert keeper.held
                    cast(VirtualLoop, asyncio.get_running_loop()).now += SLICE_S  # that it takes
                    yield
                return "made"

            assert await core.first.in_slices(pieces()) == "made"
            await clock.sleep(1.0)
            assert len(keeper.functions) > 2 and not keeper.held
            await worker.leave()

    run_virtual(main, limit_s=1e4)
