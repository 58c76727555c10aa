"""Named tensors that are asked for some at a time, so that nobody has to hold all of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import torch

Ask = Callable[[Sequence[str]], Awaitable[dict[str, torch.Tensor]]]

BATCH_BYTES = 64 << 20  # of tensors that are asked for together: as much as a chunk of the store


class Source(Protocol):
    """Where tensors come from; they are the same whenever they are asked for."""

    @property
    def outline(self) -> Mapping[str, torch.Tensor]:
        """All of them in their order, of which only types and shapes are looked at."""

    async def some(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Those that are named, whole, in the host's memory."""


class Held:
    """All of them lie in this process's memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.all = dict(tensors)

    @property
    def outline(self) -> Mapping[str, torch.Tensor]:
        """See `Source`."""
        return self.all

    async def some(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """See `Source`; no copies."""
        return {name: self.all[name] for name in names}


class RequestedSource:
    """Somebody gives them when they are asked for."""

    def __init__(self, outline: Mapping[str, torch.Tensor], ask: Ask) -> None:
        self.outline, self._ask = outline, ask

    async def some(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """See `Source`."""
        return await self._ask(names)


def batches(outline: Mapping[str, torch.Tensor], most: int = BATCH_BYTES) -> list[list[str]]:
    """Names, in order, together as many as have at most so many bytes; a larger tensor is alone."""
    found: list[list[str]] = []
    filled = 0
    for name, tensor in outline.items():
        if not found or filled + nbytes(tensor) > most:
            found.append([])
            filled = 0
        found[-1].append(name)
        filled += nbytes(tensor)
    return found


def nbytes(tensor: torch.Tensor) -> int:
    """Also of one on the `meta` device."""
    return tensor.numel() * tensor.element_size()
