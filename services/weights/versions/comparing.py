"""Compares two versions tensor by tensor: which share of the elements differs, and by how much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from meshrl.common.model.files.safetensors_file import NAMES

AT_ONCE = 1 << 22  # elements that are compared together
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """How a tensor differs. Changed are elements with other bits; where the types differ, those
    with another value.
    """

    name: str
    shape: list[int]
    elements: int
    changed: int
    largest: float  # of the absolute changes; nan, where an element is none
    mean: float  # absolute change, over all elements
    note: str = ""  # only in one of them, other shapes, other types


def compare(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Any]:
    """`tensors`: those that both have or one has, most changed first; and in `elements`, `changed`,
    `share` and `largest` those of all that both have in one shape.
    """
    found = [
        _one(name, before.get(name), after.get(name)) for name in dict.fromkeys([*before, *after])
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


def _one(name: str, before: Tensor | None, after: Tensor | None) -> Difference:
    if before is None or after is None:
        there = after if before is None else before
        assert there is not None
        note = "only in the second" if before is None else "only in the first"
        return Difference(name, list(there.shape), there.numel(), 0, 0.0, 0.0, note)
    if before.shape != after.shape:
        note = f"shapes {list(before.shape)} and {list(after.shape)}"
        return Difference(name, list(after.shape), after.numel(), 0, 0.0, 0.0, note)
    changed, largest, total = _figures(before.reshape(-1), after.reshape(-1))
    elements, note = after.numel(), ""
    if before.dtype != after.dtype:
        note = f"types {NAMES[before.dtype]} and {NAMES[after.dtype]}"
    mean = total / max(1, elements)
    return Difference(name, list(after.shape), elements, changed, largest, mean, note)


def _figures(before: Tensor, after: Tensor) -> tuple[int, float, float]:
    """(changed elements, largest and summed absolute change), a part at a time: the copies that
    comparing takes are small.
    """
    changed, largest, total = 0, 0.0, 0.0
    for begin in range(0, len(after), AT_ONCE):
        one, other = before[begin : begin + AT_ONCE], after[begin : begin + AT_ONCE]
        if one.dtype == other.dtype:
            bits = _BITS[one.element_size()]
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
