"""A job as the planner reads it from its row."""

from dataclasses import replace

from common.job.config import (
    AlgorithmConfig,
    FrozenModelConfig,
    JobConfig,
    MeshConfig,
    ModelsConfig,
    PlannerConfig,
    TrainingConfig,
)
from common.state.jobs import COUNTS, JobRow
from services.planner.job import PlannedJob, planned


def row(config: JobConfig) -> JobRow:
    whole = ("lineage", "version", "steps_done", "cursor", "admitted")
    text = dict.fromkeys(("run_dir", "manifest", "checkpoint", "error"), "")
    return JobRow(
        id="job",
        phase="training",
        document=config.document(),
        **text,
        **dict.fromkeys((*whole, *COUNTS), 4),
    )


def test_a_job_needs_what_its_file_says() -> None:
    config = JobConfig(
        mesh=MeshConfig(workers=5),
        training=TrainingConfig(ranks=2),
        algorithm=AlgorithmConfig(groups_per_step=12),
        planner=PlannerConfig(cooldown_steps=9),
    )
    expected = PlannedJob("job", "training", 4, 5, 2, True, False, 12, config.planner)
    assert planned(row(config)) == expected


def test_frozen_models_and_supervision_show() -> None:
    frozen = ModelsConfig(reference=FrozenModelConfig(path="initial"))
    supervised = AlgorithmConfig(name="sft")
    found = planned(row(replace(JobConfig(), models=frozen, algorithm=supervised)))
    assert found.scoring and not found.samples
