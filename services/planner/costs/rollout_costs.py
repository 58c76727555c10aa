"""What a gang of engines' workers takes to generate: its decode steps, its prefill, its room for
keys and values (Libra's Cost Evaluator: arXiv 2606.03077, released as infra/cost_model/model.py).

Two of its released formulas count the degree of tensor parallelism t twice. A decode step there
reads `weights / t + tokens * kv`, which is one rank's part, at t times a rank's bandwidth; and the
room for keys and values is that of all ranks over the bytes of a token on one. Here each rank reads
its part at its own bandwidth, and has its own room. What that changes is in docs/planner.md.

What Libra's does not have: a step's matrices take their arithmetic when that is longer than their
bytes, as of large batches; a mixture's step reads the experts that its batch is sent to; and an
all-reduce takes its bytes beside its latency, which decides where accelerators meet over PCIe.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshrl.common.hardware.accelerators import Accelerator
from meshrl.common.hardware.model_shapes import ModelShape
from meshrl.common.state.pool.demand.measurements import DecodeCurve
from meshrl.kernels.bin_cost import estimate_from_flops

FRAGMENTATION_SHARE = (
    0.04  # share of the room for keys and values that is lost to blocks half full (Libra)
)
WORKSPACE_BYTES = 1e9  # bytes of a rank's activations (Libra)
MAX_SLOTS = 256  # sequences at a time at most, unless the engine says another number (Libra)
PREFILL_CHUNK_TOKENS = 1024  # tokens of a prefill at a time (Libra)
ALL_REDUCES_PER_LAYER = (
    2  # of a layer: behind attention, and behind its matrices (Shoeybi et al. 2019)
)
TYPICAL_BATCH = 64  # sequences up to which a curve is to be close


def predict_all_reduce_s(size_bytes: float, ranks: int, bytes_per_s: float) -> float:
    """Seconds until each of so many ranks has the sum of `size` bytes of each, as rings do it
    (Patarasuk and Yuan 2009): each rank's part is summed, and gathered.
    """
    return 2.0 * predict_all_to_all_s(size_bytes, ranks, bytes_per_s)


def predict_all_to_all_s(size_bytes: float, ranks: int, bytes_per_s: float) -> float:
    """Seconds until `size` bytes of each rank are where they belong, spread evenly over all; the
    same until each has the whole of what is spread over them.
    """
    return (ranks - 1) / ranks * size_bytes / bytes_per_s


@dataclass(frozen=True, slots=True)
class EngineGang:
    """A model on accelerators of one kind, split over `degree` of them."""

    shape: ModelShape
    accelerator: Accelerator
    degree: int = 1

    def compute_kv_capacity(self) -> float:
        """Tokens whose keys and values fit; below 0: not even the weights do."""
        weights = self.shape.parameter_bytes / self.degree
        room = self.accelerator.memory_bytes - weights - WORKSPACE_BYTES
        return room * (1 - FRAGMENTATION_SHARE) / self.shape.compute_kv_bytes_per_token(self.degree)

    def can_fit(self, tokens: float) -> bool:
        """Whether the weights fit, evenly split, and a sequence of so many tokens beside them."""
        return self.shape.can_split(self.degree) and self.compute_kv_capacity() >= max(tokens, 1)

    def predict_decode_step_s(self, batch: float, context: float) -> float:
        """Seconds of a decode step of `batch` sequences with so many tokens of context each."""
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
        """Seconds of a token's arithmetic in its matrices, two operations a parameter."""
        return 2.0 * self.shape.active / (self.degree * self.accelerator.prefill_flops_per_s)

    def predict_prefill_s(self, tokens: float, prefix_tokens: float = 0.0) -> float:
        """Seconds of the forward pass of so many tokens behind `before` others."""
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
        """What an engine would measure of such a gang: a line through its decode steps of one
        sequence and of `batch`, and its prefill of a prompt of `context` tokens.
        """
        one, many = self.predict_decode_step_s(1, 0), self.predict_decode_step_s(max(batch, 2.0), 0)
        sequence_s = (many - one) / (max(batch, 2.0) - 1)
        return DecodeCurve(
            kind=self.accelerator.kind,
            degree=self.degree,
            base_s=one - sequence_s,
            sequence_s=sequence_s,
            context_s=self.shape.compute_kv_bytes_per_token(self.degree)
            / self.accelerator.read_bytes_per_s,
            prefill_tokens_per_s=context / self.predict_prefill_s(context),
        )

    def _predict_all_reduces_s(self, tokens: float) -> float:
        """Seconds of a pass's all-reduces of so many tokens."""
        if self.degree == 1:
            return 0.0
        size = tokens * self.shape.hidden * self.shape.dtype_bytes
        one = self.accelerator.collective_s + predict_all_reduce_s(
            size, self.degree, self.accelerator.link_bytes_per_s
        )
        return ALL_REDUCES_PER_LAYER * self.shape.layers * one
