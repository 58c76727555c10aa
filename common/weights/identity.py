"""The identity of tensors, which depends on their names, types, shapes and bytes alone: not on
chunks, nor on how many ranks hold which rows.

The identity of a tensor is a sum over its rows, so ranks add up what each finds of its own: that of
a row is the xxh3_128 of its bytes, seeded by its number. Against accidents, not against whoever
writes rows to fit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from common.model.safetensors_file import NAMES

MODULUS = 1 << 128
NARROW_BYTES = 64  # rows below are hashed many at a time: a call for each would cost the most
_GOLDEN, _MIX, _STIR = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
)  # of splitmix64 (Steele, Lea, Flood, OOPSLA 2014)
_HALF = np.uint64(0xFFFFFFFF)
_LANES = np.uint64(0), np.uint64(0x632BE59BD9B4E019)


@dataclass(frozen=True)
class Described:
    """A whole tensor, of which somebody holds rows."""

    dtype: str  # safetensors' name
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Described:
        """Also of one on the `meta` device."""
        return cls(NAMES[tensor.dtype], tuple(tensor.shape))


def of_rows(rows: torch.Tensor, first: int) -> int:
    """What rows first .. first + len(rows) of a tensor add to its identity, below 2**128. `rows` is
    in the host's memory; a tensor without dimensions is one row.
    """
    rows = rows.detach().reshape(1) if rows.dim() == 0 else rows.detach()
    if not rows.numel():
        return 0
    content = rows.contiguous().reshape(len(rows), -1).view(torch.uint8).numpy()
    if content.shape[1] < NARROW_BYTES:
        return _of_narrow(content, first)
    seeded = xxhash.xxh3_128_intdigest
    return sum(seeded(row.data, first + place) for place, row in enumerate(content)) % MODULUS


def _of_narrow(content: NDArray[np.uint8], first: int) -> int:
    """The same of rows of few bytes: their words, each stirred with its place."""
    count, width = content.shape
    words = -(-width // 8)
    padded = np.zeros((count, words * 8), np.uint8)
    padded[:, :width] = content
    found = padded.view(np.uint64)
    with np.errstate(over="ignore"):
        places = (np.arange(first, first + count, dtype=np.uint64) * np.uint64(words))[:, None]
        places = places + np.arange(words, dtype=np.uint64)
        low, high = (_total(_stirred(found ^ _stirred(places + lane))) for lane in _LANES)
    return (low + (high << 64)) % MODULUS


def _total(words: NDArray[np.uint64]) -> int:
    """Their sum, not modulo anything: halves of fewer than 2**32 words do not overflow."""
    halves = int((words & _HALF).sum()), int((words >> np.uint64(32)).sum())
    return halves[0] + (halves[1] << 32)


def _stirred(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = words + _GOLDEN
    words = (words ^ (words >> np.uint64(30))) * _MIX
    words = (words ^ (words >> np.uint64(27))) * _STIR
    return words ^ (words >> np.uint64(31))


def added(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """What ranks have found of their rows, by tensor, together."""
    total: dict[str, int] = {}
    for part in parts:
        for name, found in part.items():
            total[name] = (total.get(name, 0) + found) % MODULUS
    return total


def identity(described: Mapping[str, Described], found: Mapping[str, int]) -> str:
    """The identity of all tensors together, as 32 hexadecimal digits; `found` has the sum over all
    rows of each.
    """
    told = [
        [name, one.dtype, list(one.shape), f"{found[name]:032x}"]
        for name, one in sorted(described.items())
    ]
    return xxhash.xxh3_128_hexdigest(json.dumps(told, separators=(",", ":")).encode())
