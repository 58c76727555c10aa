"""The operator for causal attention within sequences that lie one behind the other."""

import torch
from torch import Tensor

from kernels.backends import reference
from kernels.ops.dispatch import offer


@torch.library.custom_op("meshrl::varlen_prefill", mutates_args=())
def varlen_prefill(
    queries: Tensor, keys: Tensor, values: Tensor, starts: Tensor, scale: float, window: int = 0
) -> Tensor:
    """Attention of queries [t, heads, width] to keys, values [t, kv_heads, width] -> like queries.

    A token sees the last `window` of its sequence up to itself; 0: all.

    starts [s + 1] int32 are 0 and the cumulative lengths of s sequences; rows behind the last of
    them are padding: zeros. IndexError on a CPU if the starts fall or pass t.
    """
    _check(queries, keys, values, starts, scale, window)
    return reference.varlen_prefill(queries, keys, values, starts, scale, window)


def _check(
    queries: Tensor, keys: Tensor, values: Tensor, starts: Tensor, scale: float, window: int = 0
) -> None:
    if window < 0:
        raise ValueError(f"a window of {window} tokens")
    shapes = [list(tensor.shape) for tensor in (queries, keys, values)]
    if queries.dim() != 3 or keys.dim() != 3 or keys.shape != values.shape:
        raise ValueError(f"queries, keys and values of shapes {shapes}")
    if queries.shape[::2] != keys.shape[::2] or queries.shape[1] % keys.shape[1]:
        raise ValueError(f"queries, keys and values of shapes {shapes}")
    if not queries.dtype == keys.dtype == values.dtype in (torch.float32, torch.bfloat16):
        raise ValueError(f"queries, keys, values of {queries.dtype}, {keys.dtype}, {values.dtype}")
    if starts.dim() != 1 or starts.shape[0] < 1 or starts.dtype != torch.int32:
        raise ValueError(f"starts {list(starts.shape)} of {starts.dtype}")


offer(varlen_prefill, _check, lambda queries, *_: queries.new_empty(queries.shape))
