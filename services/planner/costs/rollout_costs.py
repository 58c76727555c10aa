"""Cost model of a generating gang: its decode steps, its prefill, and its KV capacity.

It follows Libra's Cost Evaluator (arXiv 2606.03077, released as infra/cost_model/model.py). Two of
its released formulas count the degree of tensor parallelism t twice. A decode step there reads
`weights / t + tokens * kv`, which is one rank's part, at t times a rank's bandwidth. The KV
capacity is that of all ranks over the bytes of a token on one rank. Here each rank reads its part
at its own bandwidth, and has its own capacity. docs/develop/planner.md lists the effects.

This model adds three terms. The matrices of a step take the time of their arithmetic if it exceeds
the time of their bytes, as for large batches. A step of an MoE model reads the experts that its
batch is routed to. An all-reduce takes the time of its bytes beside its latency, which matters over
PCIe.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshrl.common.hardware.accelerators import Accelerator
from meshrl.common.hardware.model_shapes import ModelShape
from meshrl.common.state.pool.demand.measurements import DecodeCurve
from meshrl.kernels.bin_cost import estimate_from_flops

FRAGMENTATION_SHARE = 0.04  # share of the KV capacity lost to partly filled blocks (Libra)
WORKSPACE_BYTES = 1e9  # bytes of a rank's activations (Libra)
MAX_SLOTS = 256  # maximum sequences at a time, unless the engine sets another number (Libra)
PREFILL_CHUNK_TOKENS = 1024  # tokens per prefill chunk (Libra)
ALL_REDUCES_PER_LAYER = 2  # per layer: after attention, and after the MLP (Shoeybi et al. 2019)
TYPICAL_BATCH = 64  # number of sequences up to which a curve should fit


def predict_all_reduce_s(size_bytes: float, ranks: int, bytes_per_s: float) -> float:
    """Predict the seconds of a ring all-reduce of `size_bytes` per rank (Patarasuk and Yuan 2009).
    It is a reduce-scatter followed by an all-gather.
    """
    return 2.0 * predict_all_to_all_s(size_bytes, ranks, bytes_per_s)


def predict_all_to_all_s(size_bytes: float, ranks: int, bytes_per_s: float) -> float:
    """Predict the seconds of an all-to-all of `size_bytes` per rank, spread evenly. An all-gather
    of `size_bytes` in total takes as long.
    """
    return (ranks - 1) / ranks * size_bytes / bytes_per_s


@dataclass(frozen=True, slots=True)
class EngineGang:
    """Model split over `degree` accelerators of one kind."""

    shape: ModelShape
    accelerator: Accelerator
    degree: int = 1

    def compute_kv_capacity(self) -> float:
        """Compute the KV capacity in tokens; negative if the weights alone do not fit."""
        weights = self.shape.parameter_bytes / self.degree
        room = self.accelerator.memory_bytes - weights - WORKSPACE_BYTES
        return room * (1 - FRAGMENTATION_SHARE) / self.shape.compute_kv_bytes_per_token(self.degree)

    def can_fit(self, tokens: float) -> bool:
        """Return True if the evenly split weights and a sequence of `tokens` tokens fit."""
        return self.shape.can_split(self.degree) and self.compute_kv_capacity() >= max(tokens, 1)

    def predict_decode_step_s(self, batch: float, context: float) -> float:
        """Predict the seconds of a decode step of `batch` sequences with `context` tokens each."""
        shape, on, degree = self.shape, self.accelerator, self.degree
        weights = shape.count_read_parameters(batch) * shape.dtype_bytes / degree
        reads_s = weights / on.read_bytes_per_s
        cache_s = batch * context * shape.compute_kv_bytes_per_token(degree) / on.read_bytes_per_s
        return (
            max(reads_s, batch * self.token_compute_s)
            + cache_s
            + self._predict_all_reduces_s(batch)
        )

    @property
    def token_compute_s(self) -> float:
        """Seconds of a token's matrix arithmetic, two operations per parameter."""
        return 2.0 * self.shape.active / (self.degree * self.accelerator.prefill_flops_per_s)

    def predict_prefill_s(self, tokens: float, prefix_tokens: float = 0.0) -> float:
        """Predict the seconds of a forward pass of `tokens` tokens after `prefix_tokens` others."""
        shape = self.shape
        cost = estimate_from_flops(int(shape.active), shape.attention_width, shape.layers)
        pairs = (prefix_tokens + tokens) ** 2 - prefix_tokens**2
        forward = (
            cost.per_token * tokens + cost.per_square * pairs
        ) / 3  # a third of the way there and back
        chunks_s = self._predict_all_reduces_s(PREFILL_CHUNK_TOKENS) * tokens / PREFILL_CHUNK_TOKENS
        return forward / (self.degree * self.accelerator.prefill_flops_per_s) + chunks_s

    def predict_curve(
        self, batch: float = TYPICAL_BATCH, context: float = PREFILL_CHUNK_TOKENS
    ) -> DecodeCurve:
        """Predict the curve that an engine of this gang would measure. It is a line through decode
        steps of one sequence and of `batch`, and the prefill rate of a prompt of `context`
        tokens.
        """
        one, many = self.predict_decode_step_s(1, 0), self.predict_decode_step_s(max(batch, 2.0), 0)
        sequence_s = (many - one) / (max(batch, 2.0) - 1)
        return DecodeCurve(
            accelerator_kind=self.accelerator.kind,
            tensor_parallel=self.degree,
            base_s=one - sequence_s,
            sequence_s=sequence_s,
            context_s=self.shape.compute_kv_bytes_per_token(self.degree)
            / self.accelerator.read_bytes_per_s,
            prefill_tokens_per_s=context / self.predict_prefill_s(context),
        )

    def _predict_all_reduces_s(self, tokens: float) -> float:
        """Predict the seconds of a pass's all-reduces of `tokens` tokens."""
        if self.degree == 1:
            return 0.0
        size = tokens * self.shape.hidden * self.shape.dtype_bytes
        one = self.accelerator.collective_s + predict_all_reduce_s(
            size, self.degree, self.accelerator.link_bytes_per_s
        )
        return ALL_REDUCES_PER_LAYER * self.shape.layers * one
