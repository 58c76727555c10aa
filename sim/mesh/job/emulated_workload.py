"""Emulated workload of a virtual mesh: lengths of trajectories, waits, speeds of accelerators, and
their drift along the run.
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
    PlannerConfig,
    RolloutConfig,
    TrainedModelConfig,
    TrainingConfig,
)
from meshrl.sim.drift import LinearDrift
from meshrl.sim.mesh.job.vector_arithmetic import MODEL_CONFIG

MAX_TOKENS = 256  # tokens of a trajectory, which is cut there
ENGINE_SLOTS = 64  # of an engine: its emulated speed limits the useful number, not its slots
EXTRA_STEPS = 4  # steps beyond the last one whose groups may be opened
ENVIRONMENT_THREADS = 256  # environments that wait concurrently


def constant_drift(value: float) -> LinearDrift:
    return LinearDrift(value, value)


@dataclass(frozen=True)
class EmulatedWorkload:
    """Workload of one job; `engine_speed` and `training_speed` have the format of
    `rollout.emulate` and `training.emulate`.
    """

    workers: int = 4
    steps: int = 24
    groups_per_step: int = 4
    group_size: int = 6
    turns: int = 1
    # tokens of a turn
    median_tokens: LinearDrift = field(default_factory=lambda: LinearDrift(30.0, 30.0))
    # standard deviation of their logarithm
    log_sigma: LinearDrift = field(default_factory=lambda: LinearDrift(0.6, 0.6))
    tool_s: LinearDrift = field(default_factory=lambda: LinearDrift(0.0, 0.0))  # after every turn
    # share of groups without variance, which are not trained
    equal_reward_share: LinearDrift = field(default_factory=lambda: LinearDrift(0.0, 0.0))
    engine_speed: str = "200/8/4000"
    training_speed: str = "300/500"
    bin_tokens: int = 96  # a longer trajectory has its own bin
    allows_moves: bool = True  # True if the planner moves gangs
    hybrid_count: int = 0  # hybrid gangs in the first split
    planner_options: tuple[tuple[str, Any], ...] = ()  # further keys of `[planner]`

    def with_static_split(self, hybrid_count: int) -> EmulatedWorkload:
        return replace(self, allows_moves=False, hybrid_count=hybrid_count)

    def with_initial_split(self, hybrid_count: int) -> EmulatedWorkload:
        return replace(self, allows_moves=True, hybrid_count=hybrid_count)

    def with_steps(self, steps: int) -> EmulatedWorkload:
        return replace(self, steps=steps)

    def with_training_speed(self, training_speed: str) -> EmulatedWorkload:
        return replace(self, training_speed=training_speed)

    @property
    def static_splits(self) -> range:
        """Numbers of hybrids of all static splits, which leave an engine and the core."""
        return range(self.workers - 1)

    def compute_progress(self, version: float) -> float:
        """Compute the progress of the run at a version of the weights, 0 to 1."""
        return max(0, version) / max(1, self.steps - 1)

    def format_overrides(self) -> list[str]:
        """Format its keys of `[planner]` as arguments of `--set`."""
        keys = {"moves": str(self.allows_moves).lower(), "training": 1 + self.hybrid_count}
        return [
            f"planner.{key}={value}" for key, value in (keys | dict(self.planner_options)).items()
        ]

    def build_config(self, name: str, seed: int) -> JobConfig:
        return JobConfig(
            name=name,
            seed=seed,
            cache="",
            mesh=MeshConfig(workers=self.workers),
            model=TrainedModelConfig(config=MODEL_CONFIG),
            dataset=DatasetConfig(train="train.jsonl", held_out="held_out.jsonl", shuffle=False),
            environment=EnvironmentConfig(
                use="meshrl.sim.mesh.job.task_environments:ToolTurnsEnvironment",
                step_deadline_s=120.0,
                threads=ENVIRONMENT_THREADS,
            ),
            rollout=RolloutConfig(
                slots=ENGINE_SLOTS,
                max_tokens=MAX_TOKENS,
                max_turns=self.turns + 1,
                stop=["#"],
                emulate=self.engine_speed,
            ),
            algorithm=AlgorithmConfig(
                group_size=self.group_size,
                groups_per_step=self.groups_per_step,
                filter_zero_variance=self.equal_reward_share.final > 0,
            ),
            training=TrainingConfig(
                bin_tokens=self.bin_tokens,
                checkpoint_every=max(8, self.steps),
                bin_deadline_s=120.0,
                emulate=self.training_speed,
            ),
            evaluation=EvaluationConfig(every=0, before=False, after=False, problems=1),
            budget=BudgetConfig(steps=self.steps),
            planner=PlannerConfig(
                moves=self.allows_moves,
                training=1 + self.hybrid_count,
                **dict(self.planner_options),
            ),
        )

    def build_rows(self) -> list[dict[str, Any]]:
        """Build the rows of its dataset in the order of sampling. Tools slow down along them, and
        the share of groups with equal rewards grows.
        """
        count = (self.steps + EXTRA_STEPS) * self.groups_per_step
        share = [self.compute_progress(n // self.groups_per_step) for n in range(count)]
        equal_counts = [
            round(1e6 * sum(map(self.equal_reward_share.get_value, share[: n + 1])))
            for n in range(count)
        ]
        return [
            {
                "prompt": f"{n % 10}?",
                "turns": self.turns,
                "tool_s": self.tool_s.get_value(share[n]),
                "alike": equal_counts[n] // 1_000_000
                > (equal_counts[n - 1] // 1_000_000 if n else 0),
            }
            for n in range(count)
        ]

    def write_rows(self, bundle: Path) -> None:
        """Write its rows into the bundle of its job."""
        lines = "\n".join(json.dumps(row) for row in self.build_rows())
        (bundle / "train.jsonl").write_text(lines)
