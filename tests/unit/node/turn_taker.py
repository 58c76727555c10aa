"""A process that computes in turns, as an engine or as a trainer, and notes when it did."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import torch

from meshrl.common.mesh.residents.turns import Turns
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings, run
from meshrl.common.state.pool.workers.seat import Seat, parser
from meshrl.services.engine.running import ThreadDriver
from meshrl.services.engine.service import EngineService
from meshrl.services.trainer.compute.piece_runner import PieceRunner
from meshrl.services.trainer.gang.compute import Compute
from meshrl.services.trainer.ranks.rank import Rank
from tests.unit.common.generation.engines_under_test import built_in, request
from tests.unit.trainer.ranks.batches_under_test import BINS, bins_of_step, fresh_learner

SLOTS, NEW = 4, 100


class Noted:
    """Something that computes, with a line for each time that it did."""

    def __init__(self, inner: Any, method: str, note: Path) -> None:
        self._inner, self._method, self._note = inner, method, note

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return self._noting(found) if name == self._method else found

    def _noting(self, method: Any) -> Any:
        def noted(*args: Any) -> Any:
            began = time.monotonic()
            found = method(*args)
            if found:
                with self._note.open("a") as file:
                    file.write(f"{began} {time.monotonic()}\n")
            return found

        return noted


async def generate(mesh: Mesh, turns: Turns, note: Path) -> None:
    engine: Any = Noted(built_in("eager", SLOTS, 128, clock=mesh.clock), "step", note)
    driver = ThreadDriver(asyncio.get_running_loop())
    service = EngineService(mesh, engine, driver.deliver, turns=turns)
    driver.start(service)
    count = 0
    while True:
        if not engine.running:
            asked = [request(count + i, max_new=NEW) for i in range(SLOTS)]
            service.commands.give(lambda asked=asked: engine.submit(asked))  # type: ignore[misc]
            count += SLOTS
        await mesh.clock.sleep(0.02)


async def train(mesh: Mesh, turns: Turns, note: Path) -> None:
    learner: Any = Noted(fresh_learner("plain"), "bins_gradient", note)
    compute = Compute(mesh, "j", Rank.alone(learner), PieceRunner(mesh, turns))
    while True:
        await compute.begin()
        for index, bin in enumerate(bins_of_step(0)):
            await compute.compute(index, [bin])
        await compute.apply(BINS, 1.0, 1.0)


async def main(kind: str, seat: Seat) -> None:
    torch.set_num_threads(1)
    settings = MeshSettings.from_env()
    mesh = await Mesh.open(f"{kind}/{seat.resident}", kind, settings)
    await mesh.join(None)
    turns = Turns(mesh, seat.keeper, seat.resident, seat.generation, enabled=seat.turns)
    work = generate if kind == "engine" else train
    await work(mesh, turns, Path(settings.run_root) / kind)


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--kind", required=True)
    arguments = options.parse_args()
    run(lambda: main(arguments.kind, Seat.of(arguments)))
