"""Process that computes in time slices, as an engine or as a trainer, and records the times."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import torch

from meshrl.common.mesh.instances.time_slices import SliceClient
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings, run_service
from meshrl.common.state.pool.workers.placement import Placement, build_parser
from meshrl.services.engine.role_process import ThreadDriver
from meshrl.services.engine.service import EngineService
from meshrl.services.trainer.compute.piece_runner import PieceRunner
from meshrl.services.trainer.gang.gang_compute import GangCompute
from meshrl.services.trainer.ranks.rank import Rank
from tests.unit.common.generation.engines_under_test import built_in, request
from tests.unit.trainer.ranks.batches_under_test import BINS, bins_of_step, fresh_learner

SLOTS, NEW = 4, 100


class CallLog:
    """Wrapper of an object that writes a line for each call of one method."""

    def __init__(self, inner: Any, method: str, note: Path) -> None:
        self._inner, self._method, self._note = inner, method, note

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return self._record_calls(found) if name == self._method else found

    def _record_calls(self, method: Any) -> Any:
        def recorded_call(*args: Any) -> Any:
            started_s = time.monotonic()
            found = method(*args)
            if found:
                with self._note.open("a") as file:
                    file.write(f"{started_s} {time.monotonic()}\n")
            return found

        return recorded_call


async def generate(mesh: Mesh, turns: SliceClient, note: Path) -> None:
    engine: Any = CallLog(built_in("eager", SLOTS, 128, clock=mesh.clock), "step", note)
    driver = ThreadDriver(asyncio.get_running_loop())
    service = EngineService(mesh, engine, driver.call_on_loop, time_slices=turns)
    driver.start(service)
    count = 0
    while True:
        if not engine.num_running:
            asked = [request(count + i, max_new=NEW) for i in range(SLOTS)]
            service.commands.enqueue(lambda asked=asked: engine.submit(asked))  # type: ignore[misc]
            count += SLOTS
        await mesh.clock.sleep(0.02)


async def train(mesh: Mesh, turns: SliceClient, note: Path) -> None:
    learner: Any = CallLog(fresh_learner("plain"), "compute_local_gradient", note)
    compute = GangCompute(mesh, "j", Rank.for_single_rank(learner), PieceRunner(mesh, turns))
    while True:
        await compute.begin_step()
        for index, bin in enumerate(bins_of_step(0)):
            await compute.compute_round(index, [bin])
        await compute.apply_gradient(BINS, 1.0, 1.0)


async def main(kind: str, seat: Placement) -> None:
    torch.set_num_threads(1)
    settings = MeshSettings.from_env()
    mesh = await Mesh.open(f"{kind}/{seat.instance}", kind, settings)
    await mesh.join(None)
    turns = SliceClient(
        mesh, seat.slice_scheduler, seat.instance, seat.generation, enabled=seat.time_sliced
    )
    work = generate if kind == "engine" else train
    await work(mesh, turns, Path(settings.run_root) / kind)


if __name__ == "__main__":
    options = build_parser(__doc__)
    options.add_argument("--kind", required=True)
    arguments = options.parse_args()
    run_service(lambda: main(arguments.kind, Placement.from_args(arguments)))
