"""Adapters beside a base model: validated and converted to changes of our fused matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from meshrl.common.base.errors import Refused
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.architecture.projections import (
    FUSED_PROJECTIONS,
    Projection,
    build_projections,
)
from meshrl.common.model.network.lora import parse_adapter_tensor_name

# our matrices that adapters change, in the order of Target in adapters.h
ADAPTER_TARGETS = tuple(FUSED_PROJECTIONS)
MAX_ADAPTERS = 63  # adapters of one engine: each needs a few slots and prefixes


@dataclass(frozen=True)
class LowRankDelta:
    """Low-rank change of a matrix W [outputs, inputs], which acts as W + b a."""

    a: Tensor  # [rank, inputs]
    b: Tensor  # [outputs, rank], with the scale in it

    @property
    def rank(self) -> int:
        """Inner dimension of the product."""
        return self.a.shape[0]


AdapterDeltas = Mapping[tuple[int, str], LowRankDelta]  # by layer and fused matrix


def build_adapter_deltas(
    config: ModelConfig, tensors: Mapping[str, Tensor], scale: float
) -> AdapterDeltas:
    """Convert an adapter's factors by name (`layers.3.adapters.q_proj.a`) to changes, float32.

    Factors of projections that share one of our matrices become one pair, with zeros in b outside a
    projection's rows. Raise Refused if they are no adapter of this model.
    """
    parts = build_projections(config)
    pairs: dict[tuple[int, str], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        found = parse_adapter_tensor_name(name)
        if found is None or found.layer >= config.num_layers or found.projection not in parts:
            raise _rejected_adapter_error(f"the model has no tensor {name}")
        pairs.setdefault((found.layer, found.projection), {})[found.factor] = tensor
    if not pairs:
        raise _rejected_adapter_error("it has no tensors")
    by_matrix: dict[tuple[int, str], list[tuple[Projection, Tensor, Tensor]]] = {}
    for (layer, name), pair in sorted(pairs.items()):
        part = parts[name]
        if part.fused_name in ("gate_up", "down") and layer in config.sparse_layers:
            raise _rejected_adapter_error(f"layer {layer} is a MoE layer, which has no {name}")
        a, b = _check_factors(layer, part, pair, scale)
        by_matrix.setdefault((layer, part.fused_name), []).append((part, a, b))
    outputs = {
        name: sum(p.rows for p in parts.values() if p.fused_name == name)
        for name in ADAPTER_TARGETS
    }
    return {
        (layer, fused): _fuse_factors(own, outputs[fused], scale)
        for (layer, fused), own in by_matrix.items()
    }


def _check_factors(
    layer: int, part: Projection, pair: Mapping[str, Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    what = f"layers.{layer}.adapters.{part.name}"
    if pair.keys() != {"a", "b"}:
        raise _rejected_adapter_error(f"{what} has only one of its two factors")
    a, b = pair["a"], pair["b"]
    if a.dim() != 2 or tuple(a.shape[1:]) != (part.columns,):
        raise _rejected_adapter_error(
            f"{what}.a has shape {list(a.shape)} instead of [rank, {part.columns}]"
        )
    if tuple(b.shape) != (part.rows, a.shape[0]) or not len(a):
        raise _rejected_adapter_error(
            f"{what}.b has shape {list(b.shape)} instead of [{part.rows}, {a.shape[0]}]"
        )
    if not (torch.isfinite(a).all() and torch.isfinite(b.detach() * scale).all()):
        raise _rejected_adapter_error(f"{what} is not finite")
    return a, b


def _fuse_factors(
    own: list[tuple[Projection, Tensor, Tensor]], outputs: int, scale: float
) -> LowRankDelta:
    own.sort(key=lambda one: one[0].start_row)
    down = torch.cat([a.detach().float().cpu() for _, a, _ in own])
    up, at = torch.zeros(outputs, len(down)), 0
    for part, a, b in own:
        up[part.start_row : part.start_row + part.rows, at : at + len(a)] = b.detach() * scale
        at += len(a)
    return LowRankDelta(down, up)


def _rejected_adapter_error(why: str) -> Refused:
    return Refused(
        f"the adapter does not match the model: {why}",
        where="engine",
        fix="Load adapters that were trained on the engine's base model",
    )
