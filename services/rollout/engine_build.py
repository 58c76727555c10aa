"""The engine that a job asks for, built on this host without weights."""

from __future__ import annotations

import json

from common.jobdata import JobData
from common.model.config import ModelConfig
from common.model.tokenizer import Tokenizer
from services.rollout.engine_service import FLUSH_S, FLUSH_STEPS
from services.rollout.engines.torch_engine import TorchEngine, build


def built(data: JobData) -> TorchEngine:
    """The job's engine, asleep; native code is compiled if this host has none yet."""
    limits = data.config.rollout
    return build(
        model_config(data),
        limits.slots,
        limits.max_tokens,
        path=limits.path,
        dtype=limits.dtype,
        kv_tokens=limits.kv_tokens,
        kv_on_update=limits.kv_on_update,
        steps=FLUSH_STEPS,
        budget_s=FLUSH_S,
        decode=Tokenizer.load(str(data.tokenizer)).decode if limits.stop_text else None,
    )


def model_config(data: JobData) -> ModelConfig:
    """The model of a job, before any weights."""
    if data.config.model.path:
        text = (data.bundle / data.config.model.path / "config.json").read_text()
        return ModelConfig.from_hf(json.loads(text))
    return ModelConfig.from_hf(data.config.model.config)
