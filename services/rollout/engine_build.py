"""The engine that a job asks for, built on this host without weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from common.engines import home, interpreter
from common.jobdata import JobData
from common.mesh import Mesh
from common.model.tokenizer import Tokenizer
from common.pace import profile
from services.rollout.engine_service import FLUSH_S, FLUSH_STEPS
from services.rollout.engines.base import Engine
from services.rollout.engines.paced import PacedEngine
from services.rollout.engines.torch_engine import TorchEngine, build
from services.rollout.jobmodel import model_config

if TYPE_CHECKING:
    from services.rollout.engines.sglang_engine.engine import SGLangEngine

BUILD_S = 300.0  # some 10 s on a quiet core; engines of one host wait for each other


async def opened(mesh: Mesh, data: JobData, gang: str) -> Engine:
    """The job's engine, asleep; native code is compiled if this host has none yet.

    From the main thread: a server that an engine needs dies with the thread that starts it.
    """
    if data.config.rollout.engine == "sglang":
        engine: Engine = await _sglang(mesh, data, gang)
    else:
        engine = await mesh.host.run_blocking(_torch, data, deadline_s=BUILD_S)
    pace = data.config.rollout.pace
    return PacedEngine(engine, profile(pace), mesh.clock) if pace else engine


async def _sglang(mesh: Mesh, data: JobData, gang: str) -> SGLangEngine:
    from services.rollout.engines import sglang

    limits = data.config.rollout
    model = model_config(data)
    how = sglang.launch(
        limits.sglang_python or str(interpreter(home("sglang"))),
        model,
        data.run_dir / "sglang" / gang,
        limits.slots,
        limits.max_tokens,
        kv_tokens=limits.kv_tokens,
        dtype=limits.dtype,
        device="cuda" if torch.cuda.is_available() else "cpu",
        seed=data.config.seed,
        kv_on_update=limits.kv_on_update,
        options=tuple(limits.sglang_options),
    )
    server = await sglang.start(mesh.host, mesh.clock, how, limits.sglang_weights)
    return sglang.attach(
        server,
        model,
        limits.slots,
        limits.max_tokens,
        weights=limits.sglang_weights,
        kv_on_update=limits.kv_on_update,
        decode=_decode(data),
        clock=mesh.clock,
    )


def _decode(data: JobData) -> Callable[[Sequence[int]], str] | None:
    stop_text = data.config.rollout.stop_text
    return Tokenizer.load(str(data.tokenizer)).decode if stop_text else None


def _torch(data: JobData) -> TorchEngine:
    limits = data.config.rollout
    return build(
        model_config(data),
        limits.slots,
        limits.max_tokens,
        path=limits.path,
        dtype=limits.dtype,
        kv_tokens=limits.kv_tokens,
        kv_on_update=limits.kv_on_update,
        steps=1 if limits.pace else FLUSH_STEPS,
        budget_s=FLUSH_S,
        decode=_decode(data),
    )
