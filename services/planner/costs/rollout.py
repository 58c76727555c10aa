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

from meshrl.common.hardware.profiles import Accelerator
from meshrl.common.hardware.shapes import ModelShape
from meshrl.common.state.pool.demand.measured import Curve
from meshrl.kernels.cost import expected

FRAGMENTED = 0.04  # share of the room for keys and values that is lost to blocks half full (Libra)
WORKSPACE = 1e9  # bytes of a rank's activations (Libra)
SLOTS = 256  # sequences at a time at most, unless the engine says another number (Libra)
CHUNK = 1024  # tokens of a prefill at a time (Libra)
REDUCES = 2  # of a layer: behind attention, and behind its matrices (Shoeybi et al. 2019)
TYPICAL = 64  # sequences up to which a curve is to be close


def all_reduce_s(size: float, ranks: int, bytes_per_s: float) -> float:
    """Seconds until each of so many ranks has the sum of `size` bytes of each, as rings do it
    (Patarasuk and Yuan 2009): each rank's part is summed, and gathered.
    """
    return 2.0 * all_to_all_s(size, ranks, bytes_per_s)


def all_to_all_s(size: float, ranks: int, bytes_per_s: float) -> float:
    """Seconds until `size` bytes of each rank are where they belong, spread evenly over all; the
    same until each has the whole of what is spread over them.
    """
    return (ranks - 1) / ranks * size / bytes_per_s


@dataclass(frozen=True, slots=True)
class EngineGang:
    """A model on accelerators of one kind, split over `degree` of them."""

    shape: ModelShape
    on: Accelerator
    degree: int = 1

    def capacity(self) -> float:
        """Tokens whose keys and values fit; below 0: not even the weights do."""
        weights = self.shape.bytes / self.degree
        room = self.on.memory_bytes - weights - WORKSPACE
        return room * (1 - FRAGMENTED) / self.shape.kv_bytes(self.degree)

    def fits(self, tokens: float) -> bool:
        """Whether the weights fit, evenly split, and a sequence of so many tokens beside them."""
        return self.shape.splits(self.degree) and self.capacity() >= max(tokens, 1)

    def step_s(self, batch: float, context: float) -> float:
        """Seconds of a decode step of `batch` sequences with so many tokens of context each."""
        shape, on, degree = self.shape, self.on, self.degree
        weights = shape.read_parameters(batch) * shape.dtype_bytes / degree
        reads_s = weights / on.read_bytes_per_s
        cache_s = batch * context * shape.kv_bytes(degree) / on.read_bytes_per_s
        return max(reads_s, batch * self.busy_s) + cache_s + self._reduces_s(batch)

    @property
    def busy_s(self) -> float:
        """Seconds of a token's arithmetic in its matrices, two operations a parameter."""
        return 2.0 * self.shape.active / (self.degree * self.on.busy_flops)

    def prefill_s(self, tokens: float, before: float = 0.0) -> float:
        """Seconds of the forward pass of so many tokens behind `before` others."""
        shape = self.shape
        cost = expected(int(shape.active), shape.attention_width, shape.layers)
        pairs = (before + tokens) ** 2 - before**2
        forward = (
            cost.token * tokens + cost.square * pairs
        ) / 3  # a third of the way there and back
        chunks_s = self._reduces_s(CHUNK) * tokens / CHUNK
        return forward / (self.degree * self.on.busy_flops) + chunks_s

    def curve(self, batch: float = TYPICAL, context: float = CHUNK) -> Curve:
        """What an engine would measure of such a gang: a line through its decode steps of one
        sequence and of `batch`, and its prefill of a prompt of `context` tokens.
        """
        one, many = self.step_s(1, 0), self.step_s(max(batch, 2.0), 0)
        sequence_s = (many - one) / (max(batch, 2.0) - 1)
        return Curve(
            kind=self.on.kind,
            degree=self.degree,
            base_s=one - sequence_s,
            sequence_s=sequence_s,
            context_s=self.shape.kv_bytes(self.degree) / self.on.read_bytes_per_s,
            prefill_tokens_per_s=context / self.prefill_s(context),
        )

    def _reduces_s(self, tokens: float) -> float:
        """Seconds of a pass's all-reduces of so many tokens."""
        if self.degree == 1:
            return 0.0
        size = tokens * self.shape.hidden * self.shape.dtype_bytes
        one = self.on.collective_s + all_reduce_s(size, self.degree, self.on.link_bytes_per_s)
        return REDUCES * self.shape.layers * one
