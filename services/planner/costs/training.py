"""What a step of training takes on accelerators of one kind, and the memory that it needs (Libra's
Cost Evaluator, arXiv 2606.03077, but for its fitted terms of layers: those come from
`kernels/cost.py`). Its released pipeline fills and empties in the time of the micro-batches that it
leaves out of between, so that it has no bubble; here it has (docs/planner.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshrl.common.hardware.profiles import Accelerator
from meshrl.common.hardware.shapes import ModelShape
from meshrl.kernels.cost import expected
from meshrl.services.planner.costs.rollout import REDUCES, all_reduce_s, all_to_all_s

OVERLAP, OVERLAP_PIPELINED = 0.3, 0.5  # of gradients' all-reduce behind the way back (Libra)
STATES = 16  # bytes a parameter: 2 itself, 2 gradient, 12 master and moments (Rajbhandari 2020)
UPDATED = 28  # bytes that an update reads and writes a parameter, as `common/job/pace.py`
ACTIVATIONS = 34  # bytes a token, layer and feature, attention recomputed (Korthikanti 2022)


@dataclass(frozen=True, slots=True)
class TrainingLayout:
    """How a step is spread: `data` replicas, each over `tensor` x `pipeline` accelerators, which
    computes a sequence at a time. `sharded`: parameters, gradients and moments are spread
    over replicas, too (FSDP). `recomputed`: layers keep their inputs alone, and are computed once
    more on the way back (Chen et al. 2016); otherwise attention is.
    """

    kind: str
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    sharded: bool = True
    recomputed: bool = False

    @property
    def workers(self) -> int:
        """Accelerators of it."""
        return self.data * self.tensor * self.pipeline


@dataclass(frozen=True, slots=True)
class TrainingWork:
    """The sequences of a step, as their number, their tokens and the squares of their lengths."""

    sequences: int
    tokens: float
    squares: float
    node: int = 8  # accelerators of a host


def step_s(shape: ModelShape, on: Accelerator, layout: TrainingLayout, work: TrainingWork) -> float:
    """Seconds of a step: its micro-batches through the pipeline, gradients between replicas, and
    the update.
    """
    micros = max(1, math.ceil(work.sequences / layout.data))
    forward_s, back_s, between_s = _stage_s(shape, on, layout, work, micros)
    stages = layout.pipeline - 1
    pipeline_s = micros * (forward_s + back_s) + stages * (forward_s + back_s + 2 * between_s)
    part = shape.parameters / (layout.tensor * layout.pipeline)
    # What replicas exchange, beside what computing hides: gradients, and of sharded ones the
    # parameters, gathered on both ways (Rajbhandari 2020: half as much again).
    size, rate = part * shape.dtype_bytes, _bytes_per_s(on, layout, work)
    exchange_s = 1.5 * all_reduce_s(size, layout.data, rate)
    if not layout.sharded:
        exchange_s = all_reduce_s(size, layout.data, rate)
    exchange_s *= 1 - (OVERLAP_PIPELINED if layout.pipeline > 1 else OVERLAP)
    return pipeline_s + exchange_s + update_s(shape, on, layout)


def update_s(shape: ModelShape, on: Accelerator, layout: TrainingLayout) -> float:
    """Seconds of the update."""
    part = shape.parameters / (layout.tensor * layout.pipeline)
    return UPDATED * part / (layout.data if layout.sharded else 1) / on.read_bytes_per_s


def memory_bytes(shape: ModelShape, layout: TrainingLayout, work: TrainingWork) -> float:
    """Bytes of each accelerator: states, and activations of the micro-batches that a first stage
    has under way (one forward, one backward: as many as there are stages). Of sharded states the
    layers that are gathered at a time are on top: two, of which one arrives.
    """
    part = shape.parameters / (layout.tensor * layout.pipeline)
    states = STATES * part / (layout.data if layout.sharded else 1)
    gathered = 2 * shape.dtype_bytes * part / shape.layers if layout.sharded else 0.0
    tokens = work.tokens / max(1, work.sequences)
    layers = shape.layers / layout.pipeline
    under_way = min(layout.pipeline, max(1, work.sequences // layout.data))
    feature = (
        shape.dtype_bytes * layers + ACTIVATIONS if layout.recomputed else ACTIVATIONS * layers
    )
    activations = feature * tokens * shape.hidden / layout.tensor
    return states + gathered + activations * under_way


def bubble(layout: TrainingLayout, sequences: int) -> float:
    """The share of a step in which a stage waits for others (Huang et al. 2019)."""
    micros = max(1, sequences // layout.data)
    return (layout.pipeline - 1) / (micros + layout.pipeline - 1)


def _stage_s(
    shape: ModelShape, on: Accelerator, layout: TrainingLayout, work: TrainingWork, micros: int
) -> tuple[float, float, float]:
    """Seconds of a stage's way forward and way back of a micro-batch, and of handing it on."""
    pieces = min(layout.data, work.sequences) * micros  # a sequence is not divided
    tokens = work.tokens / pieces
    cost = expected(int(shape.active), shape.attention_width, shape.layers)
    matrices = cost.token * tokens / 3
    attention = cost.square * work.squares / pieces / 3
    rate = layout.tensor * layout.pipeline * on.train_flops
    size = tokens * shape.hidden * shape.dtype_bytes
    reduce_s = 0.0
    if layout.tensor > 1:
        one = on.collective_s + all_reduce_s(size, layout.tensor, on.link_bytes_per_s)
        reduce_s = REDUCES * one * shape.layers / layout.pipeline
    ranks, sent_s = math.gcd(shape.experts, min(work.node, layout.data * layout.tensor)), 0.0
    if shape.experts and ranks > 1:  # a mixture's tokens go to their experts and back, in a host
        sent = size * shape.experts_per_token / layout.tensor
        layers = shape.layers / layout.pipeline
        sent_s = 2 * layers * all_to_all_s(sent, ranks, on.link_bytes_per_s)
    forward_s = (matrices + attention) / rate + reduce_s + sent_s
    # Twice as much, and once more what is not kept but computed again.
    back_s = (2 * matrices + 3 * attention) / rate + reduce_s + sent_s
    if layout.recomputed:
        back_s += matrices / rate + reduce_s + sent_s
    handing_s = (
        size / layout.tensor / _bytes_per_s(on, layout, work) if layout.pipeline > 1 else 0.0
    )
    return forward_s, back_s, handing_s


def _bytes_per_s(on: Accelerator, layout: TrainingLayout, work: TrainingWork) -> float:
    """Of replicas and stages among each other: a host's links while they share it."""
    return on.link_bytes_per_s if layout.workers <= work.node else on.network_bytes_per_s
