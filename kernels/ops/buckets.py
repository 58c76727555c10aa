"""Operators that gather rows into a bucket's buffer of static shape, and scatter them back."""

import torch
from torch import Tensor

from kernels.backends import reference
from kernels.ops.dispatch import offer


@torch.library.custom_op("meshrl::bucket_pack", mutates_args=())
def bucket_pack(rows: Tensor, index: Tensor) -> Tensor:
    """Gathers rows [n, ...] by index [b] int64 into [b, ...]; a lane whose index is -1 is zeros.

    IndexError on a CPU if an index is n or more.
    """
    _check_pack(rows, index)
    return reference.bucket_pack(rows, index)


@torch.library.custom_op("meshrl::bucket_scatter", mutates_args={"rows"})
def bucket_scatter(packed: Tensor, index: Tensor, rows: Tensor) -> None:
    """Writes lanes packed [b, ...] back in place: rows[index[i]] = packed[i]; -1 is skipped.

    Of two lanes with one index either may win. IndexError on a CPU if an index is n or more; lanes
    before it may have been written.
    """
    _check_scatter(packed, index, rows)
    reference.bucket_scatter(packed, index, rows)


def _check_pack(rows: Tensor, index: Tensor) -> None:
    if rows.dim() < 1 or index.dim() != 1 or index.dtype != torch.int64:
        raise ValueError(f"rows {list(rows.shape)}, index {list(index.shape)} of {index.dtype}")


def _check_scatter(packed: Tensor, index: Tensor, rows: Tensor) -> None:
    _check_pack(rows, index)
    if list(packed.shape) != [index.shape[0], *rows.shape[1:]] or packed.dtype != rows.dtype:
        raise ValueError(
            f"packed {list(packed.shape)} of {packed.dtype} for {index.shape[0]} lanes of "
            f"rows {list(rows.shape)} of {rows.dtype}"
        )


def _packed(rows: Tensor, index: Tensor) -> Tensor:
    return rows.new_empty(index.shape[0], *rows.shape[1:])


offer(bucket_pack, _check_pack, _packed)
offer(bucket_scatter, _check_scatter, lambda packed, index, rows: None)
