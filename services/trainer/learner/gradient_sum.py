"""Sums of the gradients of rounds, whose additions depend on the plan of a step alone.

A block is a fixed number of successive rounds. One process sums a block's rounds in their order:
the core or a hybrid. The blocks are then added in their order. So every process that computes a
block gets the same bits, and so does the sum of the step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshrl.common.base.errors import Refused

PIECE_NUMBERS = 1 << 24  # of a block's sum that are copied from host memory at a time


class BlockSum:
    """Sum of a block's first rounds."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.rounds = 0

    def add(self, gradient: Tensor) -> None:
        """Add the next round's gradient, and take the tensor over."""
        self.total = gradient if self.total is None else self.total.add_(gradient)
        self.rounds += 1

    def close(self, dtype: torch.dtype) -> Tensor:
        """Return the sum of all rounds, rounded to `dtype`."""
        assert self.total is not None, "a block has at least one round"
        return self.total.to(dtype)


class GradientSum:
    """Gradient sum of a step.

    Threads may add different blocks at the same time: a sum is added by the thread that pops it.
    """

    def __init__(
        self, block_rounds: int = 1, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> None:
        """Create the sum, on `device`, of blocks of `block_rounds` rounds, each rounded to
        `dtype`.
        """
        self._block_rounds, self._dtype, self._device = block_rounds, dtype, device
        self._sum: Tensor | None = None
        self._added_blocks = 0
        self._first_calls: dict[int, object] = {}  # the call that added a round first
        self._open: dict[int, BlockSum] = {}  # blocks of which some rounds are computed here
        self._pending: dict[int, Tensor] = {}  # sums of blocks after a missing one

    def add(self, round_index: int, gradient: Tensor) -> None:
        """Add a round's gradient after the earlier ones of its block.

        A second gradient of the same round changes nothing.
        """
        block, position = divmod(round_index, self._block_rounds)
        if not self._is_first_call(round_index):
            return
        if position == 0:
            self._open[block] = BlockSum()
        partial = self._open.get(block)
        if partial is None or partial.rounds != position:
            return  # the block is there, or `get_total` reports that it is incomplete
        partial.add(gradient)
        if partial.rounds == self._block_rounds:
            self._close(block)

    def add_block(self, block: int, total: Tensor) -> None:
        """Add the sum of a block that another process has computed, in place of its rounds.

        In host memory it takes none of the device while an earlier block is missing.
        """
        if self._is_first_call(block * self._block_rounds):
            self._append(block, total.to(self._dtype))

    def get_tensors(self) -> dict[str, Tensor]:
        """Return views of all retained tensors; to measure them, at any time from any thread."""
        found = {f"block.{index}": tensor for index, tensor in list(self._pending.items())}
        for index, partial in list(self._open.items()):
            if partial.total is not None:
                found[f"open.{index}"] = partial.total
        return found if self._sum is None else {"sum": self._sum, **found}

    def get_total(self, rounds: int) -> Tensor:
        """Return the sum of rounds 0 .. `rounds` - 1; Refused if one of them is missing."""
        last, remainder = divmod(rounds, self._block_rounds)
        partial = self._open.get(last)
        if partial is not None and partial.rounds == remainder:
            self._close(last)
        if self._sum is None or self._added_blocks != last + bool(remainder):
            arrived = min(rounds, self._added_blocks * self._block_rounds)
            raise Refused(f"{arrived} of {rounds} rounds have arrived", where="trainer")
        return self._sum

    def _is_first_call(self, round_index: int) -> bool:
        call = object()
        return self._first_calls.setdefault(round_index, call) is call

    def _close(self, block: int) -> None:
        self._append(block, self._open.pop(block).close(self._dtype))

    def _append(self, block: int, total: Tensor) -> None:
        self._pending[block] = total
        while (following := self._pending.pop(self._added_blocks, None)) is not None:
            if self._sum is None:
                self._sum = following.to(self._device, torch.float32)
            else:
                pieces = torch.split(self._sum, PIECE_NUMBERS)
                for piece, more in zip(pieces, torch.split(following, PIECE_NUMBERS), strict=True):
                    piece.add_(more.to(piece.device))
            self._added_blocks += 1
