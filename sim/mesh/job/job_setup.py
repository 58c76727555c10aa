"""Job of a virtual mesh: short trajectories, small groups, frequent checkpoints."""

from __future__ import annotations

import json
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
    PoolConfig,
    RolloutConfig,
    TrackingConfig,
    TrainedModelConfig,
    TrainingConfig,
)
from meshrl.common.model.tokens.tokenizer import build_character_tokenizer
from meshrl.sim.mesh.job.emulated_workload import EmulatedWorkload
from meshrl.sim.mesh.job.vector_arithmetic import MODEL_CONFIG

JOB_NAME = "simulated"
MAX_STALENESS = 2
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,:;+-*/=()[]{}<>?!#$%&@^_"


def list_run_dirs(root: Path, jobs: int) -> dict[str, Path]:
    """List the jobs of a mesh by name with their run directories; a single job uses the root."""
    if jobs == 1:
        return {JOB_NAME: root}
    names = [JOB_NAME, *(f"{JOB_NAME}-{number}" for number in range(2, jobs + 1))]
    return {name: root / "runs" / name for name in names}


def build_config(
    workers: int,
    shards: int,
    ranks: int,
    steps: int,
    name: str = JOB_NAME,
    seed: int = 0,
    max_staleness: int = MAX_STALENESS,
    colocated: bool = False,
) -> JobConfig:
    return JobConfig(
        name=name,
        seed=seed,
        cache="",
        mesh=MeshConfig(workers=workers),
        model=TrainedModelConfig(config=MODEL_CONFIG),
        dataset=DatasetConfig(train="train.jsonl", held_out="held_out.jsonl", shuffle=False),
        environment=EnvironmentConfig(
            use="meshrl.sim.mesh.job.task_environments:QuestionEnvironment", step_deadline_s=10.0
        ),
        rollout=RolloutConfig(shards=shards, slots=8, max_tokens=64, max_turns=2, stop=["#"]),
        algorithm=AlgorithmConfig(
            group_size=3, groups_per_step=3, max_staleness=max_staleness, min_group=2
        ),
        training=TrainingConfig(
            bin_tokens=160,
            checkpoint_every=3,
            keep_checkpoints=2,
            bin_deadline_s=8.0,
            ranks=ranks,
            rank_deadline_s=20.0,
        ),
        evaluation=EvaluationConfig(every=5, problems=2, max_wait_s=60.0),
        budget=BudgetConfig(steps=steps),
        planner=PlannerConfig(interval_s=5.0),
        pool=PoolConfig(colocate="always" if colocated else "auto"),
        tracking=TrackingConfig(trace=1.0),
    )


def write_job(
    config: JobConfig, root: Path, workload: EmulatedWorkload | None = None
) -> dict[str, Any]:
    """Write the job as it is submitted, with its bundle, below `root`, its run directory."""
    bundle = root / "bundle"
    (bundle / "modules").mkdir(parents=True)
    build_character_tokenizer(CHARACTERS, str(bundle / "tokenizer.json"))
    for name, count in (("train", 64), ("held_out", 8)):
        rows = [json.dumps({"prompt": f"{name} {n}?"}) for n in range(count)]
        (bundle / f"{name}.jsonl").write_text("\n".join(rows))
    if workload is not None:
        workload.write_rows(bundle)
    return config.to_document() | {"bundle": {"dir": str(bundle), "digest": "0"}}
