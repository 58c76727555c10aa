"""Comparison of two versions by tensor: the fraction of changed elements, and their changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from meshrl.common.model.files.safetensors_writer import DTYPE_NAMES

BLOCK_ELEMENTS = 1 << 22  # compared at a time
_INTEGER_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class TensorDifference:
    """Difference of one tensor.

    Changed elements have other bits, or other values if the dtypes differ.
    """

    name: str
    shape: list[int]
    elements: int
    changed: int
    largest: float  # absolute change; nan if an element is nan
    mean: float  # absolute change over all elements
    note: str = ""  # missing in one version, other shapes or other types


def compare_versions(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Any]:
    """Compare two versions by tensor.

    `tensors` lists the tensors of either version, most changed first. `elements`, `changed`,
    `share` and `largest` cover the tensors that both have in one shape.
    """
    found = [
        _compare_tensors(name, before.get(name), after.get(name))
        for name in dict.fromkeys([*before, *after])
    ]
    both = [one for one in found if not one.note or one.note.startswith("types")]
    elements, changed = sum(o.elements for o in both), sum(o.changed for o in both)
    found.sort(key=lambda one: (not one.note, -one.changed / max(1, one.elements), one.name))
    return {
        "elements": elements,
        "changed": changed,
        "share": changed / max(1, elements),
        "largest": max((one.largest for one in both), default=0.0),
        "tensors": [asdict(one) for one in found],
    }


def _compare_tensors(name: str, before: Tensor | None, after: Tensor | None) -> TensorDifference:
    if before is None or after is None:
        there = after if before is None else before
        assert there is not None
        note = "only in the second" if before is None else "only in the first"
        return TensorDifference(name, list(there.shape), there.numel(), 0, 0.0, 0.0, note)
    if before.shape != after.shape:
        note = f"shapes {list(before.shape)} and {list(after.shape)}"
        return TensorDifference(name, list(after.shape), after.numel(), 0, 0.0, 0.0, note)
    changed, largest, total = _compute_differences(before.reshape(-1), after.reshape(-1))
    elements, note = after.numel(), ""
    if before.dtype != after.dtype:
        note = f"types {DTYPE_NAMES[before.dtype]} and {DTYPE_NAMES[after.dtype]}"
    mean = total / max(1, elements)
    return TensorDifference(name, list(after.shape), elements, changed, largest, mean, note)


def _compute_differences(before: Tensor, after: Tensor) -> tuple[int, float, float]:
    """Return changed elements, largest and summed absolute change, using small temporary copies."""
    changed, largest, total = 0, 0.0, 0.0
    for begin in range(0, len(after), BLOCK_ELEMENTS):
        one, other = before[begin : begin + BLOCK_ELEMENTS], after[begin : begin + BLOCK_ELEMENTS]
        if one.dtype == other.dtype:
            bits = _INTEGER_TYPES[one.element_size()]
            differs = one.view(bits) != other.view(bits)
        else:
            differs = one.double() != other.double()
        count = int(differs.sum())
        if not count:
            continue
        changed += count
        gaps = (other[differs].double() - one[differs].double()).abs()
        most = float(gaps.max())
        largest = max(largest, most) if most == most and largest == largest else float("nan")
        total += float(gaps.sum())
    return changed, largest, total
