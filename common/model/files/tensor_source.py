"""Named tensors that are asked for some at a time, so that nobody has to hold all of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

ReadTensors = Callable[[Sequence[str]], Awaitable[dict[str, torch.Tensor]]]

BATCH_BYTES = 64 << 20  # of tensors that are asked for together: as much as a chunk of the store


@dataclass(frozen=True)
class TensorSource:
    """Tensors that `some` reads by name, whole, into the host's memory; they never change."""

    meta_tensors: Mapping[
        str, torch.Tensor
    ]  # all of them in their order, for their types and shapes
    read_tensors: ReadTensors


def batch_by_bytes(
    meta_tensors: Mapping[str, torch.Tensor], max_bytes: int = BATCH_BYTES
) -> list[list[str]]:
    """Names, in order, together as many as have at most so many bytes; a larger tensor is alone."""
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
    """Also of one on the `meta` device."""
    return tensor.numel() * tensor.element_size()
