"""The memory of a learner that sleeps: which tensors it goes on from, which follow from these."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from torch import Tensor

from meshrl.common.base.errors import Refused
from meshrl.common.model.files.storages import Storages
from meshrl.services.trainer.arithmetic.learner import Learner


class LearnerMemory:
    """All that a learner has, and gradients `beside`; `kept` is what cannot be got again."""

    def __init__(self, learner: Learner, beside: Mapping[str, Tensor] | None = None) -> None:
        learner.forget_gradients()
        self._learner = learner
        self.kept = Storages({**learner.tensors(), **(beside or {})})
        self._derived = Storages(learner.derived())

    @property
    def bytes(self) -> int:
        return self.kept.bytes + self._derived.bytes

    def give_back(self) -> None:
        self._derived.give_back()
        self.kept.give_back()

    def take_again(self) -> None:
        """Allocate it again, of any content; MemoryError, and nothing is, without enough."""
        self.kept.take_again()
        try:
            self._derived.take_again()
        except MemoryError:
            self.kept.give_back()
            raise

    def filled(self) -> None:
        self._learner.refresh()


async def taken_again(
    memory: LearnerMemory, run: Callable[..., Awaitable[Any]], where: str
) -> None:
    """Allocates it by way of `run`, which runs what blocks; Refused where there is not enough."""
    try:
        await run(memory.take_again)
    except MemoryError as error:
        raise Refused(
            f"no memory for {memory.bytes} bytes: {error}",
            where=where,
            fix="have others sleep first",
        ) from error
