"""Model shapes for SGLang servers: only those that SGLang computes as this product does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from meshrl.common.base.errors import ConfigError
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.weight_files import EMBEDDING, UNEMBEDDING

if TYPE_CHECKING:
    from torch import Tensor  # the command line reads this module, and imports no torch

_USE_BUILTIN_FIX = "Set rollout.engine to the built-in one"
VOCABULARY_MATRICES = (EMBEDDING, UNEMBEDDING)  # matrices with a row for each id
# SGLang's YaRN ignores this key
_IGNORED_YARN_KEYS = ("attention_factor", "mscale", "mscale_all_dim")


def to_sglang_config(config: ModelConfig, max_length: int) -> ModelConfig:
    """Return the configuration that SGLang serves for sequences of up to `max_length` tokens.

    It omits windows that are wider and scaling that begins later, and its vocabulary ends with the
    tokenizer's. Raise ConfigError for a model that SGLang computes differently.
    """
    if config.architecture == "smollm3":
        raise ConfigError(
            "SGLang has no model of its own for smollm3",
            where="rollout.engine",
            fix=_USE_BUILTIN_FIX,
        )
    if config.sliding_layers and config.sliding_window < max_length:
        raise ConfigError(
            f"SGLang would ignore the model's window of {config.sliding_window} tokens, which "
            f"sequences of {max_length} exceed",
            where="rollout.engine",
            fix=f"{_USE_BUILTIN_FIX}, or rollout.max_tokens to {config.sliding_window} at most",
        )
    scaling = config.rope_scaling or {}
    ignored = [key for key in _IGNORED_YARN_KEYS if scaling.get(key) is not None]
    if not scaling.get("truncate", True):
        ignored.append("truncate")
    if ignored:
        raise ConfigError(
            f"SGLang ignores {', '.join(ignored)} of the model's rotary scaling",
            where="rollout.engine",
            fix=_USE_BUILTIN_FIX,
        )
    if any(end < config.vocab_size for _, end in config.absent_ids):
        first, end = config.absent_ids[0]
        raise ConfigError(
            f"the tokenizer has no ids {first} to {end - 1}, but has higher ones: SGLang would "
            "sample ids without a token",
            where="rollout.engine",
            fix=_USE_BUILTIN_FIX,
        )
    rope_scaling = None if scaling.get("rope_type") == "dynamic" else config.rope_scaling
    served = replace(config, sliding_window=0, sliding_layers=(), rope_scaling=rope_scaling)
    return replace(served, vocab_size=config.token_id_end, absent_ids=())


def trim_vocabulary_rows(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by Hugging Face names for a server of the trimmed vocabulary, as views.

    The vocabulary's matrices lose the rows behind the tokenizer's last id.
    """
    cut = {
        name: tensors[name][: config.token_id_end]
        for name in VOCABULARY_MATRICES
        if name in tensors
    }
    return {**tensors, **cut}
