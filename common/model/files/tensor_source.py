"""Named tensors that are read in batches, so that no process needs all of them in memory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

ReadTensors = Callable[[Sequence[str]], Awaitable[dict[str, torch.Tensor]]]

BATCH_BYTES = 64 << 20  # size of a batch: equal to a chunk of the store


@dataclass(frozen=True)
class TensorSource:
    """Immutable tensors that `read_tensors` reads by name, as a whole, into host memory."""

    meta_tensors: Mapping[str, torch.Tensor]  # all tensors in order, with dtypes and shapes
    read_tensors: ReadTensors


def batch_by_bytes(
    meta_tensors: Mapping[str, torch.Tensor], max_bytes: int = BATCH_BYTES
) -> list[list[str]]:
    """Return batches of names, in order, of at most `max_bytes`; a larger tensor is alone."""
    found: list[list[str]] = []
    filled = 0
    for name, tensor in meta_tensors.items():
        if not found or filled + count_bytes(tensor) > max_bytes:
            found.append([])
            filled = 0
        found[-1].append(name)
        filled += count_bytes(tensor)
    return found


def count_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor, also of one on the `meta` device."""
    return tensor.numel() * tensor.element_size()
