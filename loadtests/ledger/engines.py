"""Engines of `loadtests.ledger`, each an actor with its own address in the mesh.

Usage:

    python -m loadtests.ledger.engines simulated --first 0 --count 32
    python -m loadtests.ledger.engines native --log FILE
    python -m loadtests.ledger.engines reference --trajectories 40 --out FILE

`simulated` hosts many engines without compute; `native` is one built-in engine at a declared pace,
which joins under the name that it reads once it is ready, and notes each request that it is asked
to generate; `reference` generates what an undisturbed
engine would, and ends.
"""

from __future__ import annotations

import asyncio
import os
import struct
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from loadtests.ledger.traffic import (
    GREEDY_NEW,
    LENGTH_MEDIAN,
    LENGTH_SIGMA,
    MAX_TOKENS,
    RATE,
    SLOTS,
    VOCABULARY,
    greedy_prompt,
)
from loadtests.measuring.entry import options
from meshrl.common.generation.engine_contract import GenerationRequest, TokenEngine
from meshrl.common.job.emulation import parse_engine_speed
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings, run_service
from meshrl.services.engine.role_process import SWITCH_INTERVAL_S, ThreadDriver
from meshrl.services.engine.service import EngineService
from meshrl.services.engine.stepping.emulation import EmulatedSteps
from meshrl.sim.engines.simulated_engine import SimulatedEngine

PACE = "10/32/20000"  # of the native engine: 100 tokens/s for each request
ASKED = struct.Struct("<qqq")  # monotonic ns, trajectory, tokens of its context
FOREVER_S = 3600.0


def published(service: EngineService) -> dict[str, Any]:
    """Return the registry fields of an engine."""
    return {
        "ready": not service.draining,
        "running": service.engine.num_running,
        "waiting": service.engine.num_waiting,
        "version": service.engine.version,
        "tokens": service.engine.tokens_generated,
        "plateau": service.throughput.plateau_batch,
    }


# ---------------------------------------------------------------- without compute


async def simulated(first: int, count: int) -> None:
    settings = MeshSettings.from_env()
    meshes = [
        await Mesh.open(f"engine/s{number:02d}", "engine", settings)
        for number in range(first, first + count)
    ]
    await asyncio.gather(*(serve(mesh, n / RATE / count) for n, mesh in enumerate(meshes)))


async def serve(mesh: Mesh, phase_s: float) -> None:
    """Run all engines of the process in turn, stepping and flushing at the pace of their
    requests.
    """
    clock = mesh.clock
    engine = SimulatedEngine(
        clock,
        SLOTS,
        RATE,
        seed=1,
        vocab_size=VOCABULARY,
        max_length=MAX_TOKENS,
        lengths=(LENGTH_MEDIAN, LENGTH_SIGMA),
    )
    service = EngineService(mesh, engine, lambda action: action())
    await mesh.join(service, stats=lambda: published(service))
    due = clock.monotonic() + phase_s
    try:
        while True:
            await clock.sleep(due - clock.monotonic())
            service.run_once()
            due = max(due + 1 / RATE, clock.monotonic())
    finally:
        await mesh.leave()


# ---------------------------------------------------------------- the built-in engine


def tiny() -> TokenEngine:
    import torch

    from loadtests.measuring.shapes import drawn, shape
    from meshrl.common.generation.builtin.engine_builder import build_engine

    torch.set_num_threads(1)
    config = shape(64, 2, 128, 512, (4, 2), max_positions=1024)
    weights = drawn(config)
    weights["unembedding"].mul_(4)  # sharp enough that tokens differ
    engine = build_engine(config, SLOTS, 1024, backend="native", dtype="float32")
    engine.wake(weights, 0)
    return engine


class NotingService(EngineService):
    """Service that notes each generation request in a file, which survives SIGKILL."""

    def __init__(self, mesh: Mesh, engine: TokenEngine, driver: ThreadDriver, log: Path) -> None:
        emulated = EmulatedSteps(engine, parse_engine_speed(PACE), mesh.clock)
        super().__init__(mesh, engine, driver.call_on_loop, emulation=emulated)
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def admit(self, requests: list[GenerationRequest], ended_sessions: list[int]) -> None:
        now = time.monotonic_ns()
        os.write(self._log, b"".join(ASKED.pack(now, r.session, len(r.tokens)) for r in requests))
        super().admit(requests, ended_sessions)


async def native(inner: TokenEngine, name: str, log: Path) -> None:
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    mesh = await Mesh.open(name, "engine", MeshSettings.from_env())
    driver = ThreadDriver(asyncio.get_running_loop())
    service = NotingService(mesh, inner, driver, log)
    driver.start(service)
    await mesh.join(service, stats=lambda: published(service))
    try:
        await asyncio.sleep(FOREVER_S)
    finally:
        driver.stop()
        await mesh.leave()


def reference(trajectories: int, out: Path) -> None:
    """Write the undisturbed completion of each prompt, as rows of tokens."""
    engine = tiny()
    requests = [
        GenerationRequest(n, greedy_prompt(n), GREEDY_NEW, 0.0, (), n, -1)
        for n in range(trajectories)
    ]
    engine.submit(requests)
    found: dict[int, list[int]] = {n: [] for n in range(trajectories)}
    busy = True
    while busy:
        busy = engine.step()
        flush = engine.drain_outputs()
        if flush is not None:
            parts = np.split(flush.tokens, np.cumsum(flush.counts)[:-1])
            for request, part in zip(flush.ids.tolist(), parts, strict=True):
                found[request] += part.tolist()
    np.save(out, np.array([found[n] for n in range(trajectories)], np.int32))


def main() -> None:
    parser = options(__doc__, first=0, count=1, nice=0, log=Path, trajectories=0, out=Path)
    parser.add_argument("kind", choices=("simulated", "native", "reference"))
    chosen = parser.parse_args()
    os.nice(chosen.nice)
    if chosen.kind == "simulated":
        run_service(lambda: simulated(chosen.first, chosen.count))
    elif chosen.kind == "native":
        engine = tiny()
        name = sys.stdin.readline().strip()
        if name:
            run_service(lambda: native(engine, name, chosen.log))
    else:
        reference(chosen.trajectories, chosen.out)


if __name__ == "__main__":
    main()
