"""Interface of tensor memory that is freed and allocated again under its tensors."""

from __future__ import annotations

from typing import Protocol

from meshrl.common.base.files.offloaded_tensors import OffloadSource, OffloadTarget


class ReleasableMemory(OffloadSource, OffloadTarget, Protocol):
    """Accelerator memory of a process's tensors, as named byte ranges that a copy contains."""

    @property
    def total_bytes(self) -> int:
        """Bytes that `release` frees, with tensors that are derived from copied ones."""

    def release(self) -> None:
        """Free the memory under the tensors."""

    def reallocate(self) -> None:
        """Allocate the memory again, with undefined content; on MemoryError none is allocated."""

    def refresh(self) -> None:
        """Complete the content, once all bytes have been written."""
