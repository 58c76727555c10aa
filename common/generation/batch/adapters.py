"""Adapters beside a base model: checked against its shape, and laid out as changes of our fused
matrices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from meshrl.common.base.errors import Refused
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.architecture.projections import FUSED, Projection, projections
from meshrl.common.model.network.lora import factor_of

TARGETS = tuple(FUSED)  # our matrices that adapters change, in the order of Target in adapters.h
MOST_ADAPTERS = 63  # of one engine: of its slots and prefixes a few each


@dataclass(frozen=True)
class Change:
    """A matrix W [outputs, inputs] acts as W + b a."""

    a: Tensor  # [rank, inputs]
    b: Tensor  # [outputs, rank], with the scale in it

    @property
    def rank(self) -> int:
        """The inner dimension of the product."""
        return self.a.shape[0]


Changes = Mapping[tuple[int, str], Change]  # by layer and fused matrix


def changes_of(config: ModelConfig, tensors: Mapping[str, Tensor], scale: float) -> Changes:
    """What an adapter of factors by name (`layers.3.adapters.q_proj.a`) changes, float32.

    The factors of projections that share one of our matrices become one pair, with zeros in b where
    a projection's rows are not another's. Refused when they are not an adapter of this model.
    """
    parts = projections(config)
    pairs: dict[tuple[int, str], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        found = factor_of(name)
        if found is None or found.layer >= config.layers or found.projection not in parts:
            raise _refused(f"{name} is none of its tensors")
        pairs.setdefault((found.layer, found.projection), {})[found.factor] = tensor
    if not pairs:
        raise _refused("it has no tensors")
    by_matrix: dict[tuple[int, str], list[tuple[Projection, Tensor, Tensor]]] = {}
    for (layer, name), pair in sorted(pairs.items()):
        part = parts[name]
        if part.fused in ("gate_up", "down") and layer in config.sparse_layers:
            raise _refused(f"layer {layer} is a mixture of experts, which takes no {name}")
        a, b = _checked(layer, part, pair, scale)
        by_matrix.setdefault((layer, part.fused), []).append((part, a, b))
    outputs = {name: sum(p.rows for p in parts.values() if p.fused == name) for name in TARGETS}
    return {
        (layer, fused): _fused(own, outputs[fused], scale)
        for (layer, fused), own in by_matrix.items()
    }


def _checked(
    layer: int, part: Projection, pair: Mapping[str, Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    what = f"layers.{layer}.adapters.{part.name}"
    if pair.keys() != {"a", "b"}:
        raise _refused(f"{what} lacks one of its two factors")
    a, b = pair["a"], pair["b"]
    if a.dim() != 2 or tuple(a.shape[1:]) != (part.columns,):
        raise _refused(f"{what}.a is {list(a.shape)} in place of [rank, {part.columns}]")
    if tuple(b.shape) != (part.rows, a.shape[0]) or not len(a):
        raise _refused(f"{what}.b is {list(b.shape)} in place of [{part.rows}, {a.shape[0]}]")
    if not (torch.isfinite(a).all() and torch.isfinite(b.detach() * scale).all()):
        raise _refused(f"{what} is not finite")
    return a, b


def _fused(own: list[tuple[Projection, Tensor, Tensor]], outputs: int, scale: float) -> Change:
    own.sort(key=lambda one: one[0].start)
    down = torch.cat([a.detach().float().cpu() for _, a, _ in own])
    up, at = torch.zeros(outputs, len(down)), 0
    for part, a, b in own:
        up[part.start : part.start + part.rows, at : at + len(a)] = b.detach() * scale
        at += len(a)
    return Change(down, up)


def _refused(why: str) -> Refused:
    return Refused(
        f"the adapter does not fit the model: {why}",
        where="engine",
        fix="load adapters that were trained on the base that the engine has",
    )
