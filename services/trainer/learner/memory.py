"""Kinds of a learner's tensors, which its process moves between tiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from meshrl.common.mesh.instances.kind_controller import TensorsOfKind
from meshrl.common.model.files.tensor_storages import TensorStorages
from meshrl.common.state.pool.workers.rows import TensorKind
from meshrl.services.trainer.learner.learner import Learner


def make_learner_kinds(
    find_learner: Callable[[], Learner | None], get_gradients: Callable[[], Mapping[str, Tensor]]
) -> dict[str, TensorsOfKind]:
    """Return the sources of a learner's kinds.

    `find_learner` returns None while there is no learner. `get_gradients` returns the retained
    sums.
    """

    def collect_parameters() -> TensorStorages:
        if (learner := find_learner()) is None:
            return TensorStorages({})
        learner.free_gradients()
        derived = learner.get_derived_tensors()
        return TensorStorages(learner.get_parameters(), derived, learner.refresh)

    def collect_optimizer() -> TensorStorages:
        if (learner := find_learner()) is None:
            return TensorStorages({})
        if moments := learner.get_moments():
            learner.get_meta_tensors(True)  # which needs views of the tensors
        return TensorStorages(moments)

    def collect_gradients() -> TensorStorages:
        if (learner := find_learner()) is not None:
            learner.free_gradients()  # parameters still reference the last one
        return TensorStorages(get_gradients())

    def measure_parameters() -> int:
        if (learner := find_learner()) is None:
            return 0
        return _count_bytes(learner.get_parameters()) + _count_bytes(learner.get_derived_tensors())

    def measure_optimizer() -> int:
        learner = find_learner()
        return 0 if learner is None else _count_bytes(learner.get_moments())

    def measure_gradients() -> int:
        return _count_bytes(get_gradients())

    return {
        TensorKind.PARAMETERS: TensorsOfKind(collect_parameters, measure_parameters),
        TensorKind.GRADIENTS: TensorsOfKind(collect_gradients, measure_gradients),
        TensorKind.OPTIMIZER: TensorsOfKind(collect_optimizer, measure_optimizer),
    }


def _count_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
