"""Declared profiles of accelerators, for setups without measurements.

A forward has two kinds of arithmetic: matrices (projections, experts, head) and attention scores.
Matrices run at a kind's public peak times `UTILISATION`, scores at `SCORE_SPEED` of that. Old kinds
are described by the slowdown of their kernels against those of new ones, which HeterMoE (arXiv
2504.03871) has measured for V100 and T4. `MEASURED_RATIOS` has these ratios, and none of its
throughputs.

The paper's attention times include projections. Without the projections (by the ratio of matrices),
T4's ratios at 4K and at 64K tokens give the same ratio for scores, 14.25 and 14.22. Between the
measured lengths the ratio of scores is linear in the logarithm of the length, and beyond them
constant.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.accelerators import TRAINING_SHARE, load_accelerators
from meshrl.common.hardware.model_shapes import ModelShape
from meshrl.common.hardware.zebra.profile import AcceleratorCosts, CostCurve, MixtureProfile

UTILISATION = TRAINING_SHARE  # of public peaks; an assumption, as for all training here
SCORE_SPEED = 1.0  # of the speed of matrices; an assumption
# a parameter: weight and gradient in 16 bits, Adam in 32 (ZeRO, arXiv 1910.02054)
STATE_BYTES_PER_PARAMETER = 16
GRADIENT_BYTES_PER_PARAMETER = 2
USABLE_MEMORY_SHARE = 0.9  # the rest is for buffers and the memory of one task
LATENCY_S = 50e-6  # of a collective between hosts
LENGTHS = tuple(quarter << power for power in range(6, 16) for quarter in (4, 5, 6, 7))
ROWS = (1,)  # time is proportional to rows: a curve through one point

# Assumed shape of the measured attention: 2,048 wide with 8 key-value heads of 128, like the
# source's models W1 and W2 if they resemble Mixtral.
PROJECTION_FLOPS = 2 * 2 * (2048 * 2048 + 2048 * 1024)  # of a token
SCORE_FLOPS = 2 * 2048  # of a token, for each token of its sequence


class SpeedRatio(NamedTuple):
    """Time ratios of a kind against a reference kind."""

    reference_kind: str
    matrices: float
    attention: tuple[tuple[int, float], ...]  # (length, times)


MEASURED_RATIOS = {
    "V100": SpeedRatio("A40", 1 / 0.8, ((65536, 3.7),)),
    "T4": SpeedRatio("L40S", 7.0, ((4096, 9.9), (65536, 13.6))),
}


@dataclass(frozen=True, slots=True)
class DeclaredSpeed:
    """Operations a second that a kind reaches."""

    matrix_flops_per_s: float
    score_flops_per_s: tuple[tuple[int, float], ...]  # (length, operations a second)

    def interpolate_score_flops_per_s(self, length: float) -> float:
        """Return the operations a second of attention scores in sequences of a length."""
        at = bisect_left(self.score_flops_per_s, (length,))
        if at in (0, len(self.score_flops_per_s)):
            return self.score_flops_per_s[min(at, len(self.score_flops_per_s) - 1)][1]
        (short, low), (long, high) = self.score_flops_per_s[at - 1 : at + 1]
        share = math.log(length / short) / math.log(long / short)
        return 1 / ((1 - share) / low + share / high)


def compute_speed(
    kind: str, utilisation: float = UTILISATION, score_speed: float = SCORE_SPEED
) -> DeclaredSpeed:
    """Return the speed of a kind of `common/hardware/accelerators.toml`; ConfigError if it is
    unknown.
    """
    ratio = MEASURED_RATIOS.get(kind)
    known = load_accelerators().get(ratio.reference_kind if ratio else kind)
    if known is None:
        raise ConfigError(
            f"there is no profile of {kind}",
            where="declared profiles",
            fix=f"Measure it, or choose one of {', '.join(load_accelerators())}",
        )
    peak = known.flops * utilisation
    if ratio is None:
        return DeclaredSpeed(peak, ((1, peak * score_speed),))
    return DeclaredSpeed(
        peak / ratio.matrices,
        tuple(
            (length, peak * score_speed / _compute_score_ratio(ratio, length, times, score_speed))
            for length, times in ratio.attention
        ),
    )


def build_declared_profile(
    shape: ModelShape,
    fast: str,
    slow: str,
    *,
    link_bytes_per_s: float = 0.0,
    utilisation: float = UTILISATION,
    score_speed: float = SCORE_SPEED,
) -> MixtureProfile:
    """Return the profile of a mixture on two kinds.

    Without `link_bytes_per_s` the bandwidth is that of the slower network.
    """
    networks = [load_accelerators()[kind].network_bytes_per_s for kind in (fast, slow)]
    expert = _count_expert_parameters(shape)
    rest = shape.parameters - shape.moe_layers * shape.experts * expert
    row_bytes = shape.hidden * shape.dtype_bytes
    return MixtureProfile(
        fast=_compute_accelerator_costs(shape, fast, compute_speed(fast, utilisation, score_speed)),
        slow=_compute_accelerator_costs(shape, slow, compute_speed(slow, utilisation, score_speed)),
        layers=shape.moe_layers,
        experts=shape.experts,
        experts_per_token=shape.experts_per_token,
        row_bytes=row_bytes,
        link_bytes_per_s=link_bytes_per_s or min(networks),
        link_latency_s=LATENCY_S,
        attention_bytes=rest * STATE_BYTES_PER_PARAMETER,
        expert_bytes=expert * STATE_BYTES_PER_PARAMETER,
        attention_gradient_bytes=rest * GRADIENT_BYTES_PER_PARAMETER,
        expert_gradient_bytes=expert * GRADIENT_BYTES_PER_PARAMETER,
        # A piece is recomputed from its inputs: the residual, and rows of experts.
        attention_token_bytes=(shape.layers + 1) * (1 + shape.experts_per_token) * row_bytes,
        expert_row_bytes=row_bytes,
    )


def _compute_accelerator_costs(
    shape: ModelShape, kind: str, speed: DeclaredSpeed
) -> AcceleratorCosts:
    expert = 2 * _count_expert_parameters(shape)
    # Of a layer: queries and output, keys and values.
    attention = 2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads)
    gate = shape.hidden * shape.experts
    layers: float = shape.layers * (attention + gate)
    layers += shape.moe_layers * shape.experts * _count_expert_parameters(shape)
    head = shape.parameters - layers  # embeddings are as large, without computation

    def attention_s(length: int) -> float:
        scores = 2 * length * shape.attention_width / speed.interpolate_score_flops_per_s(length)
        return length * (2 * (attention + gate) / speed.matrix_flops_per_s + scores)

    return AcceleratorCosts(
        name=kind,
        memory_bytes=load_accelerators()[kind].memory_bytes * USABLE_MEMORY_SHARE,
        experts=CostCurve(ROWS, (expert / speed.matrix_flops_per_s,)),
        attention=CostCurve(LENGTHS, tuple(map(attention_s, LENGTHS))),
        head=CostCurve(ROWS, (head / speed.matrix_flops_per_s,)),
    )


def _compute_score_ratio(ratio: SpeedRatio, length: int, times: float, share: float) -> float:
    """Return the time ratio of scores from the time ratio of attention as a whole."""
    scores = SCORE_FLOPS * length / share
    return (times * (PROJECTION_FLOPS + scores) - ratio.matrices * PROJECTION_FLOPS) / scores


def _count_expert_parameters(shape: ModelShape) -> float:
    """Return the parameters of one expert of one layer; ConfigError for a dense model."""
    idle = shape.experts - shape.experts_per_token
    if idle < 1:
        raise ConfigError(
            f"the model routes a token to {shape.experts_per_token} of {shape.experts} experts",
            where="declared profiles",
            fix="Choose a MoE model",
        )
    return (shape.parameters - shape.active) / (shape.moe_layers * idle)
