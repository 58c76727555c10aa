"""The ways to train that a job's processes can run, with the time of each: what `allocation.py`
chooses of. Libra's outer enumeration (arXiv 2606.03077), pruned as there by memory and by the
bubbles of pipelines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from meshrl.common.hardware.accelerators import Accelerator
from meshrl.common.hardware.model_shapes import ModelShape
from meshrl.services.planner.costs.rollout_costs import WORKSPACE_BYTES
from meshrl.services.planner.costs.training_costs import (
    TrainingLayout,
    TrainingWork,
    compute_bubble_share,
    predict_memory_bytes,
    predict_step_s,
)
from meshrl.services.planner.layouts.allocation import TrainingOption
from meshrl.services.planner.layouts.layout_nodes import LayoutNode

MAX_BUBBLE = 0.5  # share of a step at most in which a stage waits


@dataclass(frozen=True, slots=True)
class TrainingCapabilities:
    """What processes that train can do. As it stands: what ours can, a core of sharded ranks and
    helpers, over which packed bins are spread whatever their number.
    """

    tensor: tuple[int, ...] = (1,)  # degrees
    pipeline: tuple[int, ...] = (1,)  # stages
    sharded: bool = True
    min_workers: int = 1  # accelerators, as of a core's ranks
    max_workers: int = 0  # 0: as many as there are
    worker_multiple: int = 1  # accelerators that are added at a time; 8 of large clusters

    def generate_layouts(self, kind: str, workers: int) -> Iterator[TrainingLayout]:
        """Those on up to so many accelerators of a kind."""
        most = min(workers, self.max_workers or workers)
        for tensor, stages in product(self.tensor, self.pipeline):
            for data in range(1, most // (tensor * stages) + 1):
                count = data * tensor * stages
                if count < self.min_workers or count % self.worker_multiple:
                    continue
                for again in (False, True):  # whether layers are computed once more
                    yield TrainingLayout(kind, data, tensor, stages, self.sharded, again)


@dataclass(frozen=True, slots=True)
class TrainingCandidates:
    """A job's training: its model, the work of a step, and what is known of the hardware."""

    shape: ModelShape
    work: TrainingWork
    profiles: Mapping[str, Accelerator]
    capabilities: TrainingCapabilities = TrainingCapabilities()

    def list_candidates(self, nodes: Sequence[LayoutNode]) -> list[TrainingOption]:
        """Those that fit on accelerators of nodes, each on one kind."""
        total: Counter[str] = Counter()
        largest: Counter[str] = Counter()
        for node in nodes:
            total[node.kind] += node.free_accelerators
            largest[node.kind] = max(largest[node.kind], node.free_accelerators)
        return [
            TrainingOption(
                layout, predict_step_s(self.shape, self.profiles[kind], layout, self.work)
            )
            for kind, workers in total.items()
            for layout in self.capabilities.generate_layouts(kind, workers)
            if layout.tensor_parallel <= largest[kind] and self._is_feasible(layout)
        ]

    def _is_feasible(self, layout: TrainingLayout) -> bool:
        """Whether it divides the model, and has the memory, and computes most of the time."""
        shape, room = self.shape, self.profiles[layout.kind].memory_bytes - WORKSPACE_BYTES
        return (
            shape.can_split(layout.tensor_parallel)
            and not shape.layers % layout.pipeline_parallel
            and compute_bubble_share(layout, self.work.sequences) <= MAX_BUBBLE
            and predict_memory_bytes(shape, layout, self.work) <= room
        )
