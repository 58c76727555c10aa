"""Angles of rotary embedding, plain and scaled to more positions than in pretraining.

The formulas are those of `transformers` (`modeling_rope_utils.py`), operation for operation, so
that angles agree to the last bits: at position 2000 a frequency's rounding is 1e-4 of a radian.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from meshrl.common.model.architecture.config import ModelConfig

_YARN_BETA_FAST, _YARN_BETA_SLOW = (
    32.0,
    1.0,
)  # turns between which YaRN's ramp goes from unchanged to stretched (from its paper)


def build_rope_table(config: ModelConfig, positions: int) -> Tensor:
    """Return [positions, 2, head_dim] float32, see `Decoder.rope`.

    The table includes the factor by which scaling multiplies attention.
    """
    frequencies, factor = _compute_frequencies(config)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)


def _compute_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Return frequencies, [head_dim / 2] float32 radians a token, and the factor of cosines and
    sines.
    """
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    wavelengths = config.rope_theta**half
    frequencies = 1.0 / wavelengths
    scaling = config.rope_scaling or {}
    match scaling.get("rope_type"):
        case "linear":
            return frequencies / scaling["factor"], 1.0
        case "llama3":
            return _scale_llama3(frequencies, scaling), 1.0
        case "yarn":
            return _scale_yarn(
                wavelengths, config.rope_theta, scaling
            ), _compute_yarn_attention_factor(scaling)
        case _:  # dynamic scaling begins beyond max_positions, which no sequence reaches
            return frequencies, 1.0


def _scale_llama3(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Stretch long wavelengths by `factor`, keep short ones, with a ramp between (Llama 3.1)."""
    trained, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    waves = 2 * math.pi / frequencies
    unscaled_share = (trained / waves - low) / (high - low)
    ramp = (1 - unscaled_share) * frequencies / factor + unscaled_share * frequencies
    stretched = torch.where(waves > trained / low, frequencies / factor, frequencies)
    between = (waves >= trained / high) & (waves <= trained / low)
    return torch.where(between, ramp, stretched)


def _scale_yarn(wavelengths: Tensor, theta: float, scaling: Mapping[str, Any]) -> Tensor:
    """Keep high frequencies, stretch low ones by `factor`, with a ramp over dimensions between.

    Source: YaRN, arXiv 2309.00071, section 3.2.
    """
    half = len(wavelengths)
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]

    def dimension(turns: float) -> float:
        """Return the dimension whose frequency makes `turns` turns over the original positions."""
        return 2 * half * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(scaling.get("beta_fast") or _YARN_BETA_FAST)
    high = dimension(scaling.get("beta_slow") or _YARN_BETA_SLOW)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    if low == high:
        high += 0.001
    unscaled_share = 1 - ((torch.arange(half, dtype=torch.float32) - low) / (high - low)).clamp(
        0, 1
    )
    scaled: Tensor = (
        1.0 / (factor * wavelengths) * (1 - unscaled_share) + 1.0 / wavelengths * unscaled_share
    )
    return scaled


def _compute_yarn_attention_factor(scaling: Mapping[str, Any]) -> float:
    """Return the factor by which YaRN multiplies queries and keys (its section 3.3)."""
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    factor = scaling["factor"]
    mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")

    def scale(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    return scale(mscale) / scale(all_dim) if mscale and all_dim else scale(1.0)
