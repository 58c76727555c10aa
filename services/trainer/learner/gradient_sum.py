"""Sum of the gradients of rounds in a fixed order."""

from __future__ import annotations

from torch import Tensor

from meshrl.common.base.errors import Refused


class GradientSum:
    """Gradient sum in the order of rounds; the thread that pops a gradient adds it, lock-free."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._added_rounds = 0
        self._first_calls: dict[int, object] = {}  # the call that added a round first
        self._pending: dict[int, Tensor] = {}  # gradients of rounds after a missing one

    def add(self, round_index: int, gradient: Tensor) -> None:
        """Add a round's gradient; a second one of the same round changes nothing."""
        call = object()
        if self._first_calls.setdefault(round_index, call) is not call:
            return
        self._pending[round_index] = gradient
        while (following := self._pending.pop(self._added_rounds, None)) is not None:
            self._sum = following if self._sum is None else self._sum.add_(following)
            self._added_rounds += 1

    def get_tensors(self) -> dict[str, Tensor]:
        """Return views of all retained tensors; no gradient may be added at the same time."""
        waiting = {f"round.{index}": tensor for index, tensor in self._pending.items()}
        return waiting if self._sum is None else {"sum": self._sum, **waiting}

    def get_total(self, rounds: int) -> Tensor:
        """Return the sum of rounds 0 .. `rounds` - 1; Refused if one of them is missing."""
        if self._sum is None or self._added_rounds != rounds:
            raise Refused(f"{self._added_rounds} of {rounds} rounds have arrived", where="trainer")
        return self._sum
