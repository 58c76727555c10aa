"""The ways to train that a job's processes can run, with the time of each: what `allocation.py`
chooses of. Libra's outer enumeration (arXiv 2606.03077), pruned as there by memory and by the
bubbles of pipelines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from meshrl.common.hardware.profiles import Accelerator
from meshrl.common.hardware.shapes import ModelShape
from meshrl.services.planner.costs.rollout import WORKSPACE
from meshrl.services.planner.costs.training import (
    TrainingLayout,
    TrainingWork,
    bubble,
    memory_bytes,
    step_s,
)
from meshrl.services.planner.layouts.allocation import Timed
from meshrl.services.planner.layouts.nodes import LayoutNode

BUBBLE = 0.5  # share of a step at most in which a stage waits


@dataclass(frozen=True, slots=True)
class Trainable:
    """What processes that train can do. As it stands: what ours can, a core of sharded ranks and
    helpers, over which packed bins are spread whatever their number.
    """

    tensor: tuple[int, ...] = (1,)  # degrees
    pipeline: tuple[int, ...] = (1,)  # stages
    sharded: bool = True
    least: int = 1  # accelerators, as of a core's ranks
    most: int = 0  # 0: as many as there are
    grain: int = 1  # accelerators that are added at a time; 8 of large clusters

    def layouts(self, kind: str, workers: int) -> Iterator[TrainingLayout]:
        """Those on up to so many accelerators of a kind."""
        most = min(workers, self.most or workers)
        for tensor, stages in product(self.tensor, self.pipeline):
            for data in range(1, most // (tensor * stages) + 1):
                count = data * tensor * stages
                if count < self.least or count % self.grain:
                    continue
                for again in (False, True):  # whether layers are computed once more
                    yield TrainingLayout(kind, data, tensor, stages, self.sharded, again)


@dataclass(frozen=True, slots=True)
class TrainingWays:
    """A job's training: its model, the work of a step, and what is known of the hardware."""

    shape: ModelShape
    work: TrainingWork
    profiles: Mapping[str, Accelerator]
    by: Trainable = Trainable()

    def ways(self, nodes: Sequence[LayoutNode]) -> list[Timed]:
        """Those that fit on accelerators of nodes, each on one kind."""
        total: Counter[str] = Counter()
        largest: Counter[str] = Counter()
        for node in nodes:
            total[node.kind] += node.free
            largest[node.kind] = max(largest[node.kind], node.free)
        return [
            Timed(layout, step_s(self.shape, self.profiles[kind], layout, self.work))
            for kind, workers in total.items()
            for layout in self.by.layouts(kind, workers)
            if layout.tensor <= largest[kind] and self._fits(layout)
        ]

    def _fits(self, layout: TrainingLayout) -> bool:
        """Whether it divides the model, and has the memory, and computes most of the time."""
        shape, room = self.shape, self.profiles[layout.kind].memory_bytes - WORKSPACE
        return (
            shape.splits(layout.tensor)
            and not shape.layers % layout.pipeline
            and bubble(layout, self.work.sequences) <= BUBBLE
            and memory_bytes(shape, layout, self.work) <= room
        )
