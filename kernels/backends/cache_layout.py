"""Layout of the paged cache: blocks of 16 tokens, as csrc/attention.h reads them.

Within a block, keys are transposed: [width, 16]; values are not: [16, width]. In bf16, two
neighbours along the summed dimension of a product are adjacent, because processors and GPUs read
them as one word: keys [width / 2, 16, 2], values [8, width, 2].
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_TOKENS = 16  # tokens


def get_cache_shapes(
    blocks: int, kv_heads: int, width: int, dtype: torch.dtype
) -> tuple[list[int], list[int]]:
    """Return the shapes of a cache's keys and values; width is even. TypeError for other dtypes."""
    if dtype == torch.float32:
        return [blocks, kv_heads, width, BLOCK_TOKENS], [blocks, kv_heads, BLOCK_TOKENS, width]
    if dtype == torch.bfloat16:
        return (
            [blocks, kv_heads, width // 2, BLOCK_TOKENS, 2],
            [blocks, kv_heads, BLOCK_TOKENS // 2, width, 2],
        )
    raise TypeError(f"a paged cache must be float32 or bfloat16, not {dtype}")


def unpack_cache(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values as [blocks, kv_heads, 16, width]; more dimensions may come first."""
    if keys.dtype == torch.bfloat16:
        return keys.transpose(-3, -2).flatten(-2), values.transpose(-2, -1).flatten(-3, -2)
    return keys.transpose(-2, -1), values


def check_cache(keys: Tensor, values: Tensor, kv_heads: int, width: int) -> None:
    """Raise ValueError unless keys and values are a cache of that many heads of that width."""
    expected = get_cache_shapes(keys.shape[0], kv_heads, width, keys.dtype)
    shapes = [list(keys.shape), list(values.shape)]
    if shapes != list(expected) or keys.dtype != values.dtype:
        raise ValueError(f"keys and values have shapes {shapes}, expected {list(expected)}")
