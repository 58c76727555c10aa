"""Limits of one call of code that the model wrote."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

MIB = 1 << 20


@dataclass(frozen=True)
class JailLimits:
    wall_s: float = 10.0  # less the time that it waited for a core
    cpu_s: float = 10.0
    memory_bytes: int = 512 * MIB  # all its processes with a control group, else each
    processes: int = 32  # threads included
    open_files: int = 128
    scratch_bytes: int = 64 * MIB  # files in its scratch directory, which is in memory
    max_files: int = 4096
    output_bytes: int = 64 * 1024  # standard output and error together

    def to_document(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def lower(self, wall_s: float = 0.0, cpu_s: float = 0.0, memory_bytes: int = 0) -> JailLimits:
        """Return the limits, lowered where a smaller value is given."""
        return replace(
            self,
            wall_s=min(self.wall_s, wall_s or self.wall_s),
            cpu_s=min(self.cpu_s, cpu_s or self.cpu_s),
            memory_bytes=min(self.memory_bytes, memory_bytes or self.memory_bytes),
        )
