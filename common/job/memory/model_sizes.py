"""Numbers of a model's parameters, by the parts that processes hold and update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.architecture.projections import build_projections, resolve_targets

MatrixShape = tuple[int, ...]


@dataclass(frozen=True)
class ModelSizes:
    """Parts of a decoder, in numbers of parameters."""

    shape: ModelConfig

    @property
    def total(self) -> int:
        """All parameters."""
        return self.shape.num_parameters

    @property
    def embedding(self) -> int:
        """The embedding alone."""
        return self.shape.vocab_size * self.shape.hidden_size

    @property
    def embeddings(self) -> int:
        """Embedding and unembedding."""
        return self.embedding * (1 if self.shape.tie_embeddings else 2)

    @property
    def layers(self) -> int:
        """All layers, and the final norm."""
        return self.total - self.embeddings

    @property
    def experts(self) -> int:
        """Matrices of the experts of all layers."""
        expert = 3 * self.shape.hidden_size * self.shape.expert_ffn_size
        return len(self.shape.sparse_layers) * self.shape.num_experts * expert

    @cached_property
    def layer_kinds(self) -> dict[bool, int]:
        """Number of layers with experts (True) and without, as far as the model has any."""
        sparse = len(self.shape.sparse_layers)
        kinds = {True: sparse, False: self.shape.num_layers - sparse}
        return {kind: count for kind, count in kinds.items() if count}

    @cached_property
    def matrices(self) -> Counter[MatrixShape]:
        """Shapes of the matrices that Muon updates, with their numbers."""
        found: Counter[MatrixShape] = Counter()
        for is_sparse, count in self.layer_kinds.items():
            for matrix in self._list_layer_matrices(is_sparse):
                found[matrix] += count
        return found

    @property
    def largest_matrix(self) -> int:
        """Largest matrix of a layer, or stack of matrices of its experts."""
        return max(map(prod, self.matrices))

    @property
    def largest_layer(self) -> int:
        """Matrices of the largest layer."""
        return max(sum(map(prod, self._list_layer_matrices(kind))) for kind in self.layer_kinds)

    @property
    def rotary_table(self) -> int:
        """Table of rotary embeddings, which is no parameter."""
        return 2 * self.shape.max_positions * self.shape.head_dim

    def count_adapters(self, rank: int, targets: Sequence[str]) -> int:
        """Return the parameters of adapters of this rank; 0 for rank 0."""
        if not rank:
            return 0
        parts = build_projections(self.shape)
        names = resolve_targets(self.shape, targets)
        widths = sum(parts[name].rows + parts[name].columns for name in names)
        return rank * self.shape.num_layers * widths

    def _list_layer_matrices(self, is_sparse: bool) -> list[MatrixShape]:
        c, d = self.shape, self.shape.hidden_size
        queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        found: list[MatrixShape] = [(queries + 2 * keys, d), (d, queries)]
        if not is_sparse:
            return [*found, (2 * c.ffn_size, d), (d, c.ffn_size)]
        found += [(c.num_experts, 2 * c.expert_ffn_size, d), (c.num_experts, d, c.expert_ffn_size)]
        if wide := c.shared_expert_ffn_size:
            found += [(2 * wide, d), (d, wide)]
        return found
