"""Models and accelerators of HeterMoE (arXiv 2504.03871), as profiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from meshrl.common.hardware.model_shapes import ModelShape
from meshrl.common.hardware.zebra.costs import CHECKPOINTED_BACKWARD_FACTOR
from meshrl.common.hardware.zebra.declared_profiles import (
    SCORE_SPEED,
    USABLE_MEMORY_SHARE,
    UTILISATION,
    build_declared_profile,
)
from meshrl.common.hardware.zebra.profile import MixtureProfile

# The source names its models after Mixtral; unpublished values are Mixtral's.
EXPERTS_PER_TOKEN = 2
HEAD_DIM = 128
KV_HEADS = 8
VOCABULARY = 32_000
FFN_MULTIPLE = 512  # an expert's width is a multiple of it
SEQUENCES_PER_ACCELERATOR = 2  # per step and accelerator; the source's batches are not known
V100_BYTES = 16e9  # the smaller type, as in the source


@dataclass(frozen=True, slots=True)
class PaperModel:
    """Model of the source with its published values."""

    name: str
    layers: int
    hidden: int
    experts: int
    parameters: float  # as published: without embeddings, as widths of 3.5 * hidden then fit

    @property
    def attention_parameters(self) -> int:
        """Parameters of a layer's projections and gate."""
        keys = min(KV_HEADS * HEAD_DIM, self.hidden)
        return 2 * self.hidden * (self.hidden + keys) + self.hidden * self.experts

    @property
    def ffn_width(self) -> int:
        """Width of an expert, of three matrices, that fits the parameters."""
        each = (self.parameters / self.layers - self.attention_parameters) / self.experts
        return FFN_MULTIPLE * round(each / (3 * self.hidden) / FFN_MULTIPLE)

    @property
    def shape(self) -> ModelShape:
        expert = 3 * self.hidden * self.ffn_width
        layer = self.attention_parameters + self.experts * expert
        parameters = 2 * VOCABULARY * self.hidden + self.layers * layer
        heads = self.hidden // HEAD_DIM
        return ModelShape(
            layers=self.layers,
            hidden=self.hidden,
            heads=heads,
            kv_heads=min(KV_HEADS, heads),
            head_dim=HEAD_DIM,
            parameters=parameters,
            active=parameters - self.layers * (self.experts - EXPERTS_PER_TOKEN) * expert,
            experts=self.experts,
            experts_per_token=EXPERTS_PER_TOKEN,
        )


@dataclass(frozen=True, slots=True)
class PaperSetup:
    """Numbers of accelerators of two kinds."""

    name: str
    fast: str
    slow: str
    fast_count: int
    slow_count: int
    link_bytes_per_s: float

    @property
    def count(self) -> int:
        return self.fast_count + self.slow_count

    def count_lengths(
        self, length: int, sequences: int = SEQUENCES_PER_ACCELERATOR
    ) -> dict[int, int]:
        return {length: sequences * self.count}


@dataclass(frozen=True, slots=True)
class PaperAssumptions:
    """Assumptions beyond the source and its ratios of kernels."""

    utilisation: float = UTILISATION  # of published peaks
    attention_speed_factor: float = SCORE_SPEED  # of attention, relative to matrices
    link_factor: float = 1.0  # times the setup's bandwidth
    backward_factor: float = CHECKPOINTED_BACKWARD_FACTOR
    sequences: int = SEQUENCES_PER_ACCELERATOR


MODELS = {
    model.name: model
    for model in (
        PaperModel("W1", 4, 2048, 12, 2.2e9),
        PaperModel("W2", 4, 2048, 24, 4.3e9),
        PaperModel("D1", 8, 1024, 24, 2.1e9),
        PaperModel("D2", 6, 1024, 18, 1.2e9),
        PaperModel("D3", 8, 1024, 40, 3.5e9),
    )
}
ROCE_LINK = 100e9 / 8  # bytes per second; 100 Gb/s, taken as each accelerator's
CLOUD_LINK = 200e9 / 8  # as the source emulated the cloud's network
SETUPS = {
    setup.name: setup
    for setup in (
        PaperSetup("O1", "A40", "V100", 6, 6, ROCE_LINK),
        PaperSetup("O2", "A40", "V100", 4, 8, ROCE_LINK),
        PaperSetup("O3", "A40", "V100", 6, 3, ROCE_LINK),
        PaperSetup("C1", "L40S", "T4", 2, 6, CLOUD_LINK),
        PaperSetup("C2", "L40S", "T4", 2, 8, CLOUD_LINK),
    )
}
ON_PREM, CLOUD = ("O1", "O2", "O3"), ("C1", "C2")
DEFAULT_ASSUMPTIONS = PaperAssumptions()


@cache
def build_profile(
    model: str, setup: PaperSetup, assumed: PaperAssumptions = DEFAULT_ASSUMPTIONS
) -> MixtureProfile:
    found = build_declared_profile(
        MODELS[model].shape,
        setup.fast,
        setup.slow,
        link_bytes_per_s=setup.link_bytes_per_s * assumed.link_factor,
        utilisation=assumed.utilisation,
        score_speed=assumed.attention_speed_factor,
    )
    slow = found.slow
    if slow.name == "V100":
        slow = replace(slow, memory_bytes=V100_BYTES * USABLE_MEMORY_SHARE)
    return replace(found, slow=slow, backward=assumed.backward_factor)


def list_grid(setups: Sequence[str]) -> list[tuple[str, str]]:
    """List the models and setups whose slow accelerators divide the experts of a layer evenly, as
    in the source's groups. Which of them the source has run is not known.
    """
    return [
        (model, setup)
        for setup, model in product(setups, MODELS)
        if not MODELS[model].experts % SETUPS[setup].slow_count
    ]
