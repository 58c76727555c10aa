"""Tensors to publish: like those of a model, drawn from a seed, no two of them alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from meshrl.common.weights.layout.identity import Described, Tree, identity

WIDTH = 1024  # elements of a row
TENSOR_BYTES = 16 << 20  # of a tensor, about a layer's projection
DRAWN = TENSOR_BYTES // 2  # elements that are drawn: a tensor's, so that no two chunks are alike
SPREAD = 0.02  # standard deviation of a model's weights
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
Tensors = dict[str, torch.Tensor]


def shapes(size: int, dtype: torch.dtype, each: int = TENSOR_BYTES) -> Iterator[tuple[str, int]]:
    """Name and rows of tensors that have `size` bytes together; the last one has what is left."""
    row = WIDTH * dtype.itemsize
    rows, most = size // row, each // row
    for number in range(-(-rows // most)):
        yield f"layers.{number}.weight", min(most, rows - number * most)


def drawn(size: int, dtype: torch.dtype, seed: int = 0, each: int = TENSOR_BYTES) -> Tensors:
    """Tensors of `size` bytes together, normally distributed."""
    generator = torch.Generator().manual_seed(seed)
    base = SPREAD * torch.randn(DRAWN, generator=generator)
    found: Tensors = {}
    for number, (name, rows) in enumerate(shapes(size, dtype, each)):
        count = rows * WIDTH
        turned = torch.roll(base, 7919 * number)
        scaled = turned[:count] * (1 + number / 1024)
        found[name] = scaled.to(dtype).reshape(rows, WIDTH).contiguous()
    return found


def empty(size: int, dtype: torch.dtype, each: int = TENSOR_BYTES) -> Tensors:
    """As many tensors of the same shapes, whose pages are there."""
    return {name: torch.ones(rows, WIDTH, dtype=dtype) for name, rows in shapes(size, dtype, each)}


def change(tensors: Mapping[str, torch.Tensor], share: float, seed: int) -> int:
    """Moves so large a share of the elements of bfloat16 tensors, anywhere, to the next number, as
    an optimizer's small step does; how many.
    """
    generator = torch.Generator().manual_seed(seed)
    changed = 0
    for tensor in tensors.values():
        flat = tensor.view(torch.int16).reshape(-1)
        chosen = torch.rand(len(flat), generator=generator) < share
        places = chosen.nonzero()[:, 0]
        away = torch.randint(0, 2, (len(places),), generator=generator) * 2 - 1
        flat[places] += away.to(torch.int16)
        changed += len(places)
    return changed


def identity_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Of all of them together, by `meshrl.common.weights.layout.identity`."""
    described = {name: Described.of(tensor) for name, tensor in tensors.items()}
    trees = {name: Tree() for name in tensors}
    for name, tensor in tensors.items():
        trees[name].add_rows(tensor, 0)
    return identity(described, trees)
