"""Bytes of a process by kind."""

from __future__ import annotations

from dataclasses import dataclass, fields

TOLERANCE = 0.15  # share by which estimated bytes may differ from the measured peak
# Taken by CUDA itself in each process, before its first tensor.
CONTEXT_BYTES = {"cpu": 0, "cuda": 512 << 20}


@dataclass(frozen=True)
class MemoryKinds:
    """Bytes of a process on its worker's device, by kind."""

    weights: int = 0  # in the type of passes or of generation, beside masters
    masters: int = 0  # float32 parameters
    moments: int = 0  # of the optimizer
    gradients: int = 0  # float32 sums
    # Saved by a pass for its backward pass, with logits; or buffers of the update if these are more
    activations: int = 0
    cache: int = 0  # keys and values
    context: int = 0  # CUDA's context

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes by the name of their kind."""
        return {field.name: getattr(self, field.name) for field in fields(MemoryKinds)}

    @property
    def total_bytes(self) -> int:
        """Bytes of all kinds."""
        return sum(self.bytes_by_kind.values())


@dataclass(frozen=True)
class ProcessMemory(MemoryKinds):
    """Estimated bytes of each of `count` processes."""

    process: str = ""
    count: int = 1
    least_cache: int = 0  # part of `cache` without which no sequence fits
    reserved: int = 0  # part of `activations` without which an engine refuses to start
    # parts of `activations` that a pass needs, and the optimizer's update
    forward_backward: int = 0
    optim_step: int = 0

    @property
    def required_bytes(self) -> int:
        """Bytes with the smallest cache: a cache takes the memory that is left."""
        return self.total_bytes - (self.cache - self.least_cache)

    @property
    def least_bytes(self) -> int:
        """Bytes without which the process cannot run, even if activations are overestimated."""
        return self.required_bytes - self.activations + self._least_activations

    def count_function_bytes(self, computed_bytes: int) -> int:
        """Return the bytes of all tensors, with what one function computes beside them."""
        least = min(computed_bytes, self._least_activations)
        return self.required_bytes - self.activations + least

    @property
    def state_bytes(self) -> int:
        """Bytes of the state that a sleeping core offloads."""
        return self.masters + self.moments

    @property
    def _least_activations(self) -> int:
        excess = min(round(TOLERANCE * self.activations), self.activations - self.reserved)
        return self.activations - excess


def describe_bytes(size_bytes: float) -> str:
    """Return a size in the largest binary unit in which it is at least 1."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.1f} {unit}"
    return f"{size_bytes:.0f} bytes"
