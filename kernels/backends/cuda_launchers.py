"""Launchers of the CUDA kernels, called with tensors through ctypes.

A launch depends on shapes alone, never on the contents of a tensor, so that a CUDA graph can
capture it. Each method computes what the function of that name in reference.py does, or raises
KernelUnsupported.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from meshrl.kernels.backends.cache_layout import BLOCK_TOKENS
from meshrl.kernels.backends.kernel_unsupported import (
    KernelUnsupported,
    bfloat16_flag,
    require_contiguous,
)

HEAD_WIDTHS = (32, 64, 128)  # head widths that paged_decode.cu is compiled for
MAX_WRITE_WIDTH = 1024  # maximum head width of paged_write: a thread for each feature
MAX_QUERIES_PER_BLOCK = 8  # maximum query heads of one key-value head in a thread block
BLOCKS_PER_MULTIPROCESSOR = (
    4  # thread blocks of paged_decode.cu on a multiprocessor, at its 128 registers
)
# cache blocks of a split: 256 tokens; smaller splits cost more to join than they save
MIN_SPLIT_CACHE_BLOCKS = 16

C_POINTER, C_INT, C_INT64, C_FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
SIGNATURES: dict[str, list[type]] = {
    "bucket_launch": [C_INT, *[C_POINTER] * 2, *[C_INT64] * 3, *[C_POINTER] * 2],
    "paged_write_launch": [
        C_INT,
        *[C_POINTER] * 6,
        C_INT64,
        C_INT,
        C_INT64,
        *[C_INT] * 2,
        C_POINTER,
    ],
    "paged_decode_launch": [
        *[C_INT, *[C_POINTER] * 5, *[C_INT] * 3, C_INT64, *[C_INT] * 4],
        *[C_FLOAT, *[C_POINTER] * 3],
    ],
}


@dataclass(frozen=True)
class Launchers:
    """Launchers of one library on one device."""

    library: ctypes.CDLL
    num_multiprocessors: int  # multiprocessors of the device
    get_stream: Callable[[], int]  # the stream to launch on

    def bucket_pack(self, rows: Tensor, index: Tensor) -> Tensor:
        """Compute the reference's operator; KernelUnsupported: rows are not contiguous."""
        require_contiguous(rows)
        packed = rows.new_empty(index.shape[0], *rows.shape[1:])
        self._move_rows(1, rows, index.contiguous(), rows, packed)
        return packed

    def bucket_scatter(self, packed: Tensor, index: Tensor, rows: Tensor) -> None:
        """Compute the reference's operator; KernelUnsupported: rows are not contiguous."""
        require_contiguous(rows)
        self._move_rows(0, packed.contiguous(), index.contiguous(), rows, rows)

    def _move_rows(
        self, into_bucket: int, source: Tensor, index: Tensor, rows: Tensor, target: Tensor
    ) -> None:
        row_bytes = rows.element_size() * rows.shape[1:].numel()
        if index.shape[0] and row_bytes:
            sizes = (index.shape[0], rows.shape[0], row_bytes)
            self._launch("bucket_launch", into_bucket, source, index, *sizes, target)

    def paged_write(
        self,
        keys: Tensor,
        values: Tensor,
        new_keys: Tensor,
        new_values: Tensor,
        table: Tensor,
        positions: Tensor,
    ) -> None:
        """Compute the reference's operator.

        KernelUnsupported: the cache is not contiguous, or a head is too wide.
        """
        n, kv_heads, width = new_keys.shape
        require_contiguous(keys, values)
        if width > MAX_WRITE_WIDTH:
            raise KernelUnsupported
        rows = [tensor.contiguous() for tensor in (new_keys, new_values, table, positions)]
        sizes = (n, width, keys.shape[0], kv_heads, table.shape[1])
        if new_keys.numel():
            self._launch("paged_write_launch", bfloat16_flag(keys), keys, values, *rows, *sizes)

    def paged_decode(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        table: Tensor,
        lengths: Tensor,
        scale: float,
        window: int = 0,
    ) -> Tensor:
        """Compute the reference's operator.

        KernelUnsupported: no kernel of this width, or the cache is not aligned.
        """
        n, heads, width = queries.shape
        kv_heads, table_width = keys.shape[1], table.shape[1]
        require_contiguous(keys, values)
        if width not in HEAD_WIDTHS or keys.data_ptr() % 16 or values.data_ptr() % 16:
            raise KernelUnsupported
        out = queries.new_empty(queries.shape)
        if out.numel() == 0:
            return out
        groups = n * kv_heads * -(-heads // kv_heads // MAX_QUERIES_PER_BLOCK)
        count = choose_num_splits(groups, table_width, self.num_multiprocessors)
        room = n * heads * count * (width + 2) if count > 1 else 0
        partial = torch.empty(room, dtype=torch.float32, device=queries.device)
        tensors = (queries.contiguous(), keys, values, table.contiguous(), lengths.contiguous())
        visible_tokens = min(window, table_width * BLOCK_TOKENS)  # a wider window has no effect
        sizes = (n, heads, width, keys.shape[0], kv_heads, table_width, count, visible_tokens)
        arguments = (*tensors, *sizes, scale, partial, out)
        self._launch("paged_decode_launch", bfloat16_flag(keys), *arguments)
        return out

    def _launch(self, name: str, *arguments: Tensor | int | float) -> None:
        devices = {str(a.device) for a in arguments if isinstance(a, Tensor)}
        if len(devices) > 1:
            raise ValueError(f"{name}: tensors on {sorted(devices)}")
        launcher = getattr(self.library, name)
        launcher.argtypes = SIGNATURES[name]
        plain = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
        status = launcher(*plain, self.get_stream())
        if status != 0:
            raise RuntimeError(f"{name}: CUDA error {status}")


def choose_num_splits(groups: int, table_width: int, num_multiprocessors: int) -> int:
    """Return the number of splits of each sequence's context.

    It is large enough to fill the GPU's multiprocessors if `groups` thread blocks (sequences times
    key-value heads) do not, but no split has less than 256 tokens at the table's full width.
    """
    desired = -(-num_multiprocessors * BLOCKS_PER_MULTIPROCESSOR // groups)
    return max(1, min(desired, table_width // MIN_SPLIT_CACHE_BLOCKS))
