"""The engine that a job asks for, built on this host without weights."""

from __future__ import annotations

import json

from common.clock import Clock
from common.jobdata import JobData
from common.model.config import ModelConfig
from common.model.tokenizer import Tokenizer
from common.pace import profile
from services.rollout.engine_service import FLUSH_S, FLUSH_STEPS
from services.rollout.engines.base import Engine
from services.rollout.engines.paced import PacedEngine
from services.rollout.engines.torch_engine import TorchEngine, build


def built(data: JobData, clock: Clock) -> Engine:
    """The job's engine, asleep; native code is compiled if this host has none yet."""
    pace = data.config.rollout.pace
    return PacedEngine(_torch(data), profile(pace), clock) if pace else _torch(data)


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
        decode=Tokenizer.load(str(data.tokenizer)).decode if limits.stop_text else None,
    )


def model_config(data: JobData) -> ModelConfig:
    """The model of a job, before any weights."""
    if data.config.model.path:
        text = (data.bundle / data.config.model.path / "config.json").read_text()
        return ModelConfig.from_hf(json.loads(text))
    return ModelConfig.from_hf(data.config.model.config)
