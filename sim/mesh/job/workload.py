"""A paced workload of a virtual mesh: how long its trajectories are, what they wait for, how fast
its accelerators are, and how that drifts along the run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meshrl.common.job.config import (
    AlgorithmConfig,
    BudgetConfig,
    DatasetConfig,
    EnvironmentConfig,
    EvaluationConfig,
    JobConfig,
    MeshConfig,
    ModelConfigSection,
    PlannerConfig,
    RolloutConfig,
    TrainingConfig,
)
from meshrl.sim.drift import Drift
from meshrl.sim.mesh.job.arithmetic import MODEL

LONGEST = 256  # tokens of a trajectory; a longer one is cut there
SLOTS = 64  # of an engine: its pace, not its slots, says how many are worth it
AHEAD = 4  # steps beyond the last one that groups may be opened of
AT_ONCE = 256  # environments that wait at a time


def still(value: float) -> Drift:
    return Drift(value, value)


@dataclass(frozen=True)
class PacedWorkload:
    """A job of its own; `decode` and `training` are paces as `rollout.pace` and `training.pace`
    take them.
    """

    workers: int = 4
    steps: int = 24
    groups_per_step: int = 4
    group_size: int = 6
    turns: int = 1
    median: Drift = field(default_factory=lambda: Drift(30.0, 30.0))  # tokens of a turn
    sigma: Drift = field(default_factory=lambda: Drift(0.6, 0.6))  # deviation of their logarithm
    tool_s: Drift = field(default_factory=lambda: Drift(0.0, 0.0))  # after every turn
    alike: Drift = field(
        default_factory=lambda: Drift(0.0, 0.0)
    )  # share of groups without variance, which are not trained
    decode: str = "200/8/4000"
    training: str = "300/500"
    bin_tokens: int = 96  # a longer trajectory has a bin of its own
    moves: bool = True  # whether the planner moves gangs
    helping: int = 0  # gangs that help the core in the first split
    planner: tuple[tuple[str, Any], ...] = ()  # further keys of `[planner]`

    def held(self, helping: int) -> PacedWorkload:
        return replace(self, moves=False, helping=helping)

    def beginning(self, helping: int) -> PacedWorkload:
        return replace(self, moves=True, helping=helping)

    def of_steps(self, steps: int) -> PacedWorkload:
        return replace(self, steps=steps)

    def paced(self, training: str) -> PacedWorkload:
        return replace(self, training=training)

    @property
    def splits(self) -> range:
        """Helpers of every static split: an engine is needed, and the core."""
        return range(self.workers - 1)

    def share(self, version: float) -> float:
        """How much of the run is over at a version of the weights."""
        return max(0, version) / max(1, self.steps - 1)

    def overrides(self) -> list[str]:
        """Its keys of `[planner]`, as of `--set`."""
        keys = {"moves": str(self.moves).lower(), "training": 1 + self.helping}
        return [f"planner.{key}={value}" for key, value in (keys | dict(self.planner)).items()]

    def config(self, name: str, seed: int) -> JobConfig:
        return JobConfig(
            name=name,
            seed=seed,
            cache="",
            mesh=MeshConfig(workers=self.workers),
            model=ModelConfigSection(config=MODEL),
            dataset=DatasetConfig(train="train.jsonl", held_out="held_out.jsonl"),
            environment=EnvironmentConfig(
                use="meshrl.sim.mesh.job.task:Talk", step_deadline_s=120.0, threads=AT_ONCE
            ),
            rollout=RolloutConfig(
                slots=SLOTS,
                max_tokens=LONGEST,
                max_turns=self.turns + 1,
                stop=["#"],
                pace=self.decode,
            ),
            algorithm=AlgorithmConfig(
                group_size=self.group_size,
                groups_per_step=self.groups_per_step,
                filter_zero_variance=self.alike.last > 0,
            ),
            training=TrainingConfig(
                bin_tokens=self.bin_tokens,
                checkpoint_every=max(8, self.steps),
                bin_deadline_s=120.0,
                pace=self.training,
            ),
            evaluation=EvaluationConfig(every=0, before=False, after=False, problems=1),
            budget=BudgetConfig(steps=self.steps),
            planner=PlannerConfig(
                moves=self.moves, training=1 + self.helping, **dict(self.planner)
            ),
        )

    def rows(self) -> list[dict[str, Any]]:
        """Of its dataset, in the order in which they are sampled: tools slow down along them, and
        more and more groups have rewards that are all alike.
        """
        count = (self.steps + AHEAD) * self.groups_per_step
        share = [self.share(n // self.groups_per_step) for n in range(count)]
        alike = [round(1e6 * sum(map(self.alike.at, share[: n + 1]))) for n in range(count)]
        return [
            {
                "prompt": f"{n % 10}?",
                "turns": self.turns,
                "tool_s": self.tool_s.at(share[n]),
                "alike": alike[n] // 1_000_000 > (alike[n - 1] // 1_000_000 if n else 0),
            }
            for n in range(count)
        ]

    def write(self, bundle: Path) -> None:
        """Its rows, where its job finds them."""
        lines = "\n".join(json.dumps(row) for row in self.rows())
        (bundle / "train.jsonl").write_text(lines)
