"""Writes a version of a job as a directory that Hugging Face's tools read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from common.job.job_data import JobData
from common.model.config import ModelConfig
from common.model.hf import load_model, save_model
from common.model.lora import is_adapter, load_adapter, merged, save_adapter

ADAPTER, BASE = "adapter", "base"


def read_version(
    config: ModelConfig, like: Mapping[str, Tensor], directory: Path
) -> dict[str, Tensor]:
    """What `write_version` was given, in the order of `like`, whose tensors have the same names,
    types and shapes; ConfigError when the directory cannot be read. The frozen weights beneath
    adapters are those of `like` where they were not written.
    """
    adapters = [name for name in like if is_adapter(name)]
    base = directory / BASE if adapters else directory
    found = dict(like)
    if base.is_dir():
        found |= load_model(base)[1].state_dict()
    if adapters:
        found |= load_adapter(directory / ADAPTER, config, {name: like[name] for name in adapters})
    return {name: found[name] for name in like}


def write_version(
    data: JobData, config: ModelConfig, tensors: Mapping[str, Tensor], out: Path, final: Path
) -> None:
    """Writes config.json, safetensors and tokenizer to `out`, which is to become `final`; for a run
    with adapters merged, with the adapters in PEFT's layout in `out/adapter`.
    """
    lora = data.config.lora
    whole = merged(config, tensors, lora.scale)
    save_model(out, config, whole, data.tokenizer, origin=data.origin)
    adapters = {name: tensor for name, tensor in tensors.items() if is_adapter(name)}
    if not adapters:
        return
    if data.origin is not None and not data.config.warm_start.demonstrations:
        base = data.origin
    else:  # nobody else has what the adapters were trained on
        plain = {name: tensor for name, tensor in tensors.items() if name not in adapters}
        save_model(out / BASE, config, plain, data.tokenizer, origin=data.origin)
        base = final / BASE
    save_adapter(out / ADAPTER, config, adapters, lora.alpha, str(base))
