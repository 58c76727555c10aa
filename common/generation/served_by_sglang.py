"""The shape that an SGLang server is given of a model: one that it computes as we do, or none."""

from __future__ import annotations

from dataclasses import replace

from common.errors import ConfigError
from common.model.config import ModelConfig

_OTHERWISE = "set rollout.engine to the built-in one"
_YARN = ("attention_factor", "mscale", "mscale_all_dim")  # which its YaRN passes over


def served_by_sglang(config: ModelConfig, max_length: int) -> ModelConfig:
    """What SGLang is to serve for sequences of up to `max_length` tokens: without windows that are
    wider and without scaling that begins later. ConfigError for a model that it computes otherwise.
    """
    if config.architecture == "smollm3":
        raise ConfigError(
            "SGLang has no model of its own for smollm3", where="rollout.engine", fix=_OTHERWISE
        )
    if config.sliding_layers and config.sliding_window < max_length:
        raise ConfigError(
            f"SGLang would compute this model without its window of {config.sliding_window} "
            f"tokens, which sequences of {max_length} exceed",
            where="rollout.engine",
            fix=f"{_OTHERWISE}, or rollout.max_tokens to {config.sliding_window} at most",
        )
    scaling = config.rope_scaling or {}
    ignored = [key for key in _YARN if scaling.get(key) is not None]
    if not scaling.get("truncate", True):
        ignored.append("truncate")
    if ignored:
        raise ConfigError(
            f"SGLang passes over {', '.join(ignored)} of the model's rotary scaling",
            where="rollout.engine",
            fix=_OTHERWISE,
        )
    kept = None if scaling.get("rope_type") == "dynamic" else config.rope_scaling
    return replace(config, sliding_window=0, sliding_layers=(), rope_scaling=kept)
