"""Sums the gradients of rounds as they come."""

from __future__ import annotations

from torch import Tensor

from meshrl.common.base.errors import Refused


class GradientSum:
    """Added in the order of rounds, by who takes a gradient out: threads need no lock."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._added_rounds = 0
        self._first_calls: dict[int, object] = {}  # which call brought a round first
        self._pending: dict[int, Tensor] = {}  # gradients that wait for their turn

    def add(self, round_index: int, gradient: Tensor) -> None:
        """A round's gradient; that of a round which is there already changes nothing."""
        call = object()
        if self._first_calls.setdefault(round_index, call) is not call:
            return
        self._pending[round_index] = gradient
        while (following := self._pending.pop(self._added_rounds, None)) is not None:
            self._sum = following if self._sum is None else self._sum.add_(following)
            self._added_rounds += 1

    def get_tensors(self) -> dict[str, Tensor]:
        """All that is kept, as it lies in memory; nobody may bring any meanwhile."""
        waiting = {f"round.{index}": tensor for index, tensor in self._pending.items()}
        return waiting if self._sum is None else {"sum": self._sum, **waiting}

    def get_total(self, rounds: int) -> Tensor:
        """The sum of rounds 0 .. rounds - 1; Refused if one of them is missing."""
        if self._sum is None or self._added_rounds != rounds:
            raise Refused(f"{self._added_rounds} of {rounds} rounds are there", where="trainer")
        return self._sum
