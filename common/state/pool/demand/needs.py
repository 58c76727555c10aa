"""What a job asks of the pool, and how far it is."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.hardware.shapes import ModelShape
from common.job.config import PlannerConfig
from common.state.jobs import Phase
from common.state.pool.demand.measured import Measured
from common.state.pool.workers.rows import Apart


@dataclass(frozen=True, slots=True)
class Need:
    """What a job asks for. `least` and `most` are workers of all its roles together."""

    ranks: int = 1  # of its core, a worker each
    # the first of them, with attention, which want faster accelerators than the others, which have
    # a mixture's experts; 0: all are alike
    attention: int = 0
    divides: bool = False  # whether the planner finds how many these are
    apart: Apart | None = None  # what it has found; None: nothing, or it is not asked
    kinds: tuple[str, ...] = ()  # of the accelerators that it has found that for
    rolls_out: bool = True  # whether anything is generated for it
    alternates: bool = True  # whether its engines can compute by turns with its core
    scoring: bool = False  # whether it has frozen models, which one worker hosts
    shards: int = 1
    sandboxes: int = 0
    # The isolation that a host has which its sandboxes are on, where its model's code runs in them;
    # empty: any.
    tier: str = ""
    least: int = 0  # workers that it runs with at least; 0: its floor
    most: int = 0  # 0: as many as there are
    priority: int = 0  # higher ones take from lower ones
    share: float = 1.0  # weight beside jobs of the same priority
    bytes: int = 0  # of its trained model's parameters in float32; 0: not known
    adapters: bool = False  # low-rank adapters are trained in place of the model
    moments: int = 2  # of the optimizer, each as large as what is trained
    helped: bool = True  # whether others than its core can compute gradients for it
    half: bool = False  # its engines have the parameters in 16 bits
    degrees: tuple[int, ...] = (1,)  # rising; workers of one host that an engine of it may have

    @property
    def floor(self) -> int:
        """Workers for the core, the smallest engine and the frozen models, each of its own."""
        return self.ranks + self.smallest * int(self.rolls_out) + int(self.scoring)

    @property
    def smallest(self) -> int:
        """Workers of its smallest engine."""
        return self.degrees[0]


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A job of the mesh as the planner sees it."""

    id: str
    phase: Phase
    need: Need = Need()
    config: PlannerConfig = field(default_factory=PlannerConfig)  # of its split's policy
    groups_per_step: int = 1
    group_size: int = 1
    max_staleness: int = 2
    slots: int = 64  # sequences that an engine decodes together
    bin_tokens: int = 0  # of a bin, which one worker computes; 0: not known
    steps: int = 0  # that it is to make; 0: not known
    rejected: int = 0  # trajectories so far that came back too old
    submitted_ms: int = 0
    steps_done: int = 0
    held: str = ""  # `waiting: WHY` or `paused: WHY`; empty: it runs
    checkpointed: bool = False  # whether a committed checkpoint holds all that it would go on from
    measured: Measured = field(default_factory=Measured)
    pace: str = ""  # that its engines imitate; empty: their own
    training_pace: str = ""  # that who trains it imitates; empty: their own
    model: str = ""  # that its workers compute, by which their speeds are remembered
    shape: ModelShape | None = None  # of that model; None: not known
    progress: dict[str, int] = field(default_factory=dict)  # what each resident has done so far
    recomputes: bool = False  # whether training keeps no activations, and computes them again
