"""Candidate training layouts of a job's processes with their times, for `allocation.py`. It is
Libra's outer enumeration (arXiv 2606.03077), pruned by memory and by pipeline bubbles.
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

MAX_BUBBLE = 0.5  # maximum share of a step in which a stage waits


@dataclass(frozen=True, slots=True)
class TrainingCapabilities:
    """Capabilities of training processes. The defaults are MeshRL's: a core of sharded ranks and
    hybrids, with any number of packed bins.
    """

    tensor: tuple[int, ...] = (1,)  # degrees
    pipeline: tuple[int, ...] = (1,)  # stages
    sharded: bool = True
    min_workers: int = 1  # minimum accelerators, as of a core's ranks
    max_workers: int = 0  # 0: no limit
    worker_multiple: int = 1  # unit of accelerators; 8 on large clusters

    def generate_layouts(self, kind: str, workers: int) -> Iterator[TrainingLayout]:
        """Yield the layouts on up to `workers` accelerators of a kind."""
        most = min(workers, self.max_workers or workers)
        for tensor, stages in product(self.tensor, self.pipeline):
            for data in range(1, most // (tensor * stages) + 1):
                count = data * tensor * stages
                if count < self.min_workers or count % self.worker_multiple:
                    continue
                for again in (False, True):  # whether layers are recomputed
                    yield TrainingLayout(kind, data, tensor, stages, self.sharded, again)


@dataclass(frozen=True, slots=True)
class TrainingCandidates:
    """Training of a job: its model, the work of a step, and the hardware profiles."""

    shape: ModelShape
    work: TrainingWork
    profiles: Mapping[str, Accelerator]
    capabilities: TrainingCapabilities = TrainingCapabilities()

    def list_candidates(self, nodes: Sequence[LayoutNode]) -> list[TrainingOption]:
        """List the options that fit on accelerators of nodes, each on one kind."""
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
        """Return True if the layout divides the model, fits in memory, and has a small bubble."""
        shape, room = self.shape, self.profiles[layout.kind].memory_bytes - WORKSPACE_BYTES
        return (
            shape.can_split(layout.tensor_parallel)
            and not shape.layers % layout.pipeline_parallel
            and compute_bubble_share(layout, self.work.sequences) <= MAX_BUBBLE
            and predict_memory_bytes(shape, layout, self.work) <= room
        )
