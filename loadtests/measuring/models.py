"""Engines of small models as members of a mesh."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from meshrl.common.api.engine import SamplingParams, SubmitRequests
from meshrl.common.generation.engine_contract import TokenEngine
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.services.engine.role_process import SWITCH_INTERVAL_S, ThreadDriver
from meshrl.services.engine.service import EngineService
from meshrl.services.engine.stepping.emulation import EmulatedSteps


async def serve(
    mesh: Mesh,
    engine: TokenEngine,
    stats: Callable[[EngineService], dict[str, Any]] = lambda _: {},
    emulated: EmulatedSteps | None = None,
) -> EngineService:
    """Join the mesh as an engine process does, which steps on a thread of its own."""
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    driver = ThreadDriver(asyncio.get_running_loop())
    service = EngineService(mesh, engine, driver.call_on_loop, emulation=emulated)
    driver.start(service)
    await mesh.join(service, stats=lambda: stats(service))
    return service


def submission(
    mesh: Mesh,
    prompts: Sequence[Sequence[int]],
    ids: Sequence[int],
    max_new: int,
    temperature: float = 1.0,
    sessions: Sequence[int] | None = None,
    ended: Sequence[int] = (),
) -> SubmitRequests:
    """Return requests for tokens after these prompts, of this process as a shard."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    return SubmitRequests(
        owner=mesh.name,
        incarnation=mesh.incarnation,
        request_ids=np.array(ids, np.int64),
        sessions=np.array(ids if sessions is None else sessions, np.int64),
        lengths=lengths,
        tokens=np.array([token for prompt in prompts for token in prompt], np.int32),
        turn_starts=lengths,
        max_new_tokens=np.full(len(prompts), max_new, np.int32),
        temperature=np.full(len(prompts), temperature, np.float32),
        top_p=np.ones(len(prompts)),
        seeds=np.array(ids, np.int64),
        sampling=SamplingParams([], []),
        ended_sessions=np.array(ended, np.int64),
    )
