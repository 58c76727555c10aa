"""Reads the shape of a job's model, before there are any weights."""

from __future__ import annotations

import json

from common.job.job_data import JobData
from common.model.config import ModelConfig


def model_config(data: JobData) -> ModelConfig:
    """The shape of the model that the job trains, from its bundled config.json or from its job
    file.
    """
    if data.config.model.path:
        text = (data.bundle / data.config.model.path / "config.json").read_text()
        return ModelConfig.from_hf(json.loads(text))
    return ModelConfig.from_hf(data.config.model.config)
