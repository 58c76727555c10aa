"""Engine with random weights as a member of a mesh, for load tests.

Usage:

python -m loadtests.routing.engine --name engine/g0 --pace 6/16/30000
"""

from __future__ import annotations

import asyncio
from typing import Any

from loadtests.measuring.entry import options
from loadtests.measuring.models import serve
from loadtests.measuring.shapes import drawn, shape
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.generation.builtin.engine_builder import build_engine
from meshrl.common.job.emulation import parse_engine_speed
from meshrl.common.mesh.runtime.mesh import Mesh, run_service
from meshrl.services.engine.service import FLUSH_S, FLUSH_STEPS, EngineService
from meshrl.services.engine.stepping.emulation import EmulatedSteps

MODEL = shape(64, 2, 128, 64, (2, 1))


def published(service: EngineService) -> dict[str, Any]:
    """Return what the registry shows of an engine."""
    return {
        "requests": service.shard_streams.request_counts,
        "prefill_tokens_per_s": service.steps.prefill_tokens_per_s,
        "cache_bytes_per_token": service.engine.cache_bytes_per_token,
        "plateau": service.throughput.plateau_batch,
    }


async def main(name: str, slots: int, max_length: int, pace: str) -> None:
    mesh = await Mesh.open(name, "engine", MeshSettings.from_env())
    built = build_engine(
        MODEL, slots, max_length, max_steps=1 if pace else FLUSH_STEPS, step_budget_s=FLUSH_S
    )
    built.wake(drawn(MODEL), 0)
    emulated = EmulatedSteps(built, parse_engine_speed(pace), mesh.clock) if pace else None
    await serve(mesh, built, published, emulated)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = options(__doc__, slots=64, max_length=4096, pace="")
    parser.add_argument("--name", required=True)
    chosen = parser.parse_args()
    run_service(lambda: main(chosen.name, chosen.slots, chosen.max_length, chosen.pace))
