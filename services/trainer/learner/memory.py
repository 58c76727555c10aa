"""Memory of a sleeping learner: the tensors to offload, and those derived from them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from torch import Tensor

from meshrl.common.base.errors import Refused
from meshrl.common.model.files.tensor_storages import TensorStorages
from meshrl.services.trainer.learner.learner import Learner


class LearnerMemory:
    """Memory of a learner, and `extra_tensors`; `offloaded` has all that cannot be recomputed."""

    def __init__(self, learner: Learner, extra_tensors: Mapping[str, Tensor] | None = None) -> None:
        learner.free_gradients()
        self._learner = learner
        self.offloaded = TensorStorages({**learner.get_tensors(), **(extra_tensors or {})})
        self._derived = TensorStorages(learner.get_derived_tensors())

    @property
    def size_bytes(self) -> int:
        return self.offloaded.total_bytes + self._derived.total_bytes

    def release(self) -> None:
        self._derived.release()
        self.offloaded.release()

    def reallocate(self) -> None:
        """Allocate the memory again, without content; on MemoryError nothing is allocated."""
        self.offloaded.reallocate()
        try:
            self._derived.reallocate()
        except MemoryError:
            self.offloaded.release()
            raise

    def refresh_derived(self) -> None:
        self._learner.refresh()


async def reallocate_memory(
    memory: LearnerMemory, run: Callable[..., Awaitable[Any]], process: str
) -> None:
    """Allocate the memory by `run`, which runs blocking work; Refused without enough memory."""
    try:
        await run(memory.reallocate)
    except MemoryError as error:
        raise Refused(
            f"cannot allocate {memory.size_bytes} bytes of memory: {error}",
            where=process,
            fix="Free memory, for instance by offloading other instances to disk",
        ) from error
