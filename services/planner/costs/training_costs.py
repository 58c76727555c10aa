"""Cost model of a training step on accelerators of one kind: its seconds and its memory.

It follows Libra's Cost Evaluator (arXiv 2606.03077), except for the fitted terms of layers, which
come from `kernels/bin_cost.py`. Libra's released pipeline fills and empties within the time of the
micro-batches that it omits, so it has no bubble. This model includes the bubble
(docs/develop/planner.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshrl.common.hardware.accelerators import Accelerator
from meshrl.common.hardware.model_shapes import ModelShape
from meshrl.kernels.bin_cost import estimate_from_flops
from meshrl.services.planner.costs.rollout_costs import (
    ALL_REDUCES_PER_LAYER,
    predict_all_reduce_s,
    predict_all_to_all_s,
)

OVERLAP, OVERLAP_PIPELINED = (
    0.3,
    0.5,
)  # share of the gradients' all-reduce hidden behind the backward pass (Libra)
STATE_BYTES = (
    16  # bytes a parameter: 2 itself, 2 gradient, 12 master and moments (Rajbhandari 2020)
)
UPDATE_BYTES = 28  # bytes per parameter read and written by an update, as `common/job/emulation.py`
ACTIVATION_BYTES = 34  # bytes per token, layer and feature, attention recomputed (Korthikanti 2022)


@dataclass(frozen=True, slots=True)
class TrainingLayout:
    """Parallel layout of a training step.

    There are `data_parallel` replicas, each over `tensor_parallel` x `pipeline_parallel`
    accelerators, which compute a sequence at a time. `sharded`: parameters, gradients and moments
    are sharded over replicas (FSDP). `recompute`: layers retain only their inputs, and are
    recomputed in the backward pass (Chen et al. 2016); otherwise only attention is recomputed.
    """

    kind: str
    data_parallel: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    sharded: bool = True
    recompute: bool = False

    @property
    def workers(self) -> int:
        """Number of accelerators."""
        return self.data_parallel * self.tensor_parallel * self.pipeline_parallel


@dataclass(frozen=True, slots=True)
class TrainingWork:
    """Sequences of a step: their number, their tokens and the squares of their lengths."""

    sequences: int
    tokens: float
    squared_tokens: float
    accelerators_per_host: int = 8  # accelerators of a host


def predict_step_s(
    shape: ModelShape, accelerator: Accelerator, layout: TrainingLayout, work: TrainingWork
) -> float:
    """Predict the seconds of a step: micro-batches through the pipeline, gradients, and the
    update.
    """
    micros = max(1, math.ceil(work.sequences / layout.data_parallel))
    forward_s, back_s, between_s = _predict_stage_s(shape, accelerator, layout, work, micros)
    stages = layout.pipeline_parallel - 1
    pipeline_s = micros * (forward_s + back_s) + stages * (forward_s + back_s + 2 * between_s)
    part = shape.parameters / (layout.tensor_parallel * layout.pipeline_parallel)
    # Communication of replicas that computation does not hide: gradients, and of sharded ones
    # the parameters, gathered in both passes (Rajbhandari 2020: half as much again).
    size, rate = part * shape.dtype_bytes, _select_bytes_per_s(accelerator, layout, work)
    exchange_s = 1.5 * predict_all_reduce_s(size, layout.data_parallel, rate)
    if not layout.sharded:
        exchange_s = predict_all_reduce_s(size, layout.data_parallel, rate)
    exchange_s *= 1 - (OVERLAP_PIPELINED if layout.pipeline_parallel > 1 else OVERLAP)
    return pipeline_s + exchange_s + predict_update_s(shape, accelerator, layout)


def predict_update_s(shape: ModelShape, accelerator: Accelerator, layout: TrainingLayout) -> float:
    """Predict the seconds of the optimizer update."""
    part = shape.parameters / (layout.tensor_parallel * layout.pipeline_parallel)
    return (
        UPDATE_BYTES
        * part
        / (layout.data_parallel if layout.sharded else 1)
        / accelerator.read_bytes_per_s
    )


def predict_memory_bytes(shape: ModelShape, layout: TrainingLayout, work: TrainingWork) -> float:
    """Predict the bytes on each accelerator: states, and activations of micro-batches in flight at
    the first stage. One forward, one backward keeps as many in flight as there are stages.
    Sharded states add the two gathered layers, one of which is being received.
    """
    part = shape.parameters / (layout.tensor_parallel * layout.pipeline_parallel)
    states = STATE_BYTES * part / (layout.data_parallel if layout.sharded else 1)
    gathered = 2 * shape.dtype_bytes * part / shape.layers if layout.sharded else 0.0
    tokens = work.tokens / max(1, work.sequences)
    layers = shape.layers / layout.pipeline_parallel
    under_way = min(layout.pipeline_parallel, max(1, work.sequences // layout.data_parallel))
    feature = (
        shape.dtype_bytes * layers + ACTIVATION_BYTES
        if layout.recompute
        else ACTIVATION_BYTES * layers
    )
    activations = feature * tokens * shape.hidden / layout.tensor_parallel
    return states + gathered + activations * under_way


def compute_bubble_share(layout: TrainingLayout, sequences: int) -> float:
    """Compute the share of a step that a stage is idle (Huang et al. 2019)."""
    micros = max(1, sequences // layout.data_parallel)
    return (layout.pipeline_parallel - 1) / (micros + layout.pipeline_parallel - 1)


def _predict_stage_s(
    shape: ModelShape,
    accelerator: Accelerator,
    layout: TrainingLayout,
    work: TrainingWork,
    micro_batches: int,
) -> tuple[float, float, float]:
    """Predict a stage's seconds of a micro-batch: forward, backward, and the transfer to the next
    stage.
    """
    pieces = min(layout.data_parallel, work.sequences) * micro_batches  # a sequence is not divided
    tokens = work.tokens / pieces
    cost = estimate_from_flops(int(shape.active), shape.attention_width, shape.layers)
    matrices = cost.per_token * tokens / 3
    attention = cost.per_square * work.squared_tokens / pieces / 3
    rate = layout.tensor_parallel * layout.pipeline_parallel * accelerator.training_flops_per_s
    size = tokens * shape.hidden * shape.dtype_bytes
    reduce_s = 0.0
    if layout.tensor_parallel > 1:
        one = accelerator.collective_s + predict_all_reduce_s(
            size, layout.tensor_parallel, accelerator.link_bytes_per_s
        )
        reduce_s = ALL_REDUCES_PER_LAYER * one * shape.layers / layout.pipeline_parallel
    ranks, sent_s = (
        math.gcd(
            shape.experts,
            min(work.accelerators_per_host, layout.data_parallel * layout.tensor_parallel),
        ),
        0.0,
    )
    if shape.experts and ranks > 1:  # all-to-all of an MoE layer, within a host
        sent = size * shape.experts_per_token / layout.tensor_parallel
        layers = shape.layers / layout.pipeline_parallel
        sent_s = 2 * layers * predict_all_to_all_s(sent, ranks, accelerator.link_bytes_per_s)
    forward_s = (matrices + attention) / rate + reduce_s + sent_s
    # The backward pass takes twice as much, and recomputation once more.
    back_s = (2 * matrices + 3 * attention) / rate + reduce_s + sent_s
    if layout.recompute:
        back_s += matrices / rate + reduce_s + sent_s
    handing_s = (
        size / layout.tensor_parallel / _select_bytes_per_s(accelerator, layout, work)
        if layout.pipeline_parallel > 1
        else 0.0
    )
    return forward_s, back_s, handing_s


def _select_bytes_per_s(
    accelerator: Accelerator, layout: TrainingLayout, work: TrainingWork
) -> float:
    """Return the bandwidth between replicas and stages: a host's links if they share a host."""
    return (
        accelerator.link_bytes_per_s
        if layout.workers <= work.accelerators_per_host
        else accelerator.network_bytes_per_s
    )
