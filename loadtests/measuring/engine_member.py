"""An engine with random weights as a member of a mesh, for load tests.

python -m loadtests.measuring.engine_member --name engine/g0 --pace 6/16/30000
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

import torch

from common.generation.builtin.build import build
from common.generation.contract import TokenEngine
from common.job.pace import profile
from common.mesh.runtime.mesh import Mesh, MeshSettings, run
from common.model.architecture.config import ModelConfig
from common.model.network.decoder import Decoder
from services.engine.running import SWITCH_S, ThreadDriver
from services.engine.service import FLUSH_S, FLUSH_STEPS, EngineService
from services.engine.stepping.emulation import EmulatedSteps

MODEL = ModelConfig(
    architecture="qwen3",
    vocab_size=64,
    hidden_size=64,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=32,
    ffn_size=128,
    qk_norm=True,
    max_positions=8192,
)


def engine(slots: int, max_length: int, pace: str) -> TokenEngine:
    """The built-in engine by its best path, the same weights in every process."""
    model = Decoder(MODEL)
    model.initialise(torch.Generator().manual_seed(0))
    steps = 1 if pace else FLUSH_STEPS
    built = build(MODEL, slots, max_length, steps=steps, budget_s=FLUSH_S)
    built.wake(model.state_dict(), 0)
    return built


async def main(name: str, slots: int, max_length: int, pace: str) -> None:
    mesh = await Mesh.open(name, "engine", MeshSettings.from_env())
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_S)
    driver = ThreadDriver(asyncio.get_running_loop())
    built = engine(slots, max_length, pace)
    emulated = EmulatedSteps(built, profile(pace), mesh.clock) if pace else None
    service = EngineService(mesh, built, driver.deliver, emulated=emulated)

    def stats() -> dict[str, Any]:
        return {
            "requests": service.shards.requests,
            "prefill_tokens_per_s": service.steps.prefill_tokens_per_s,
            "cache_bytes_per_token": service.engine.cache_bytes_per_token,
            "plateau": service.throughput.plateau,
        }

    driver.start(service)
    await mesh.join(service, stats=stats)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--max-length", type=int, default=4096)
    parser.add_argument("--pace", default="")
    chosen = parser.parse_args()
    run(lambda: main(chosen.name, chosen.slots, chosen.max_length, chosen.pace))
