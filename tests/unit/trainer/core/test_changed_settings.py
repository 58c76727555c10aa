"""A step is repeated with what was in force when it was done, whatever the job says by then."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from meshrl.common.job.changing import as_it_was, in_force
from meshrl.common.job.config import BudgetConfig, OptimizerConfig
from meshrl.services.trainer.arithmetic.learner import Learner
from tests.unit.trainer.steps.groups_under_test import job
from tests.unit.trainer.steps.test_step import as_they_come, groups, learner, step

CHANGES: dict[str, dict[str, Any]] = {
    "learning rates": {"optimizer": OptimizerConfig(muon_lr=0.3, adamw_lr=0.1, clip_norm=0.5)},
    "schedule": {"budget": BudgetConfig(steps=7)},
    "clips": {"algorithm": job(clip_high=0.01, clip_low=0.0).algorithm},
    "aggregation": {"algorithm": job(aggregation="constant", loss_constant=9).algorithm},
}


def weights_of(one: Learner) -> dict[str, torch.Tensor]:
    return dict(one.copied_weights())


@pytest.mark.parametrize("change", CHANGES)
async def test_a_step_is_repeated_with_the_settings_in_its_record(change: str) -> None:
    was = replace(job(), optimizer=OptimizerConfig(muon_lr=0.02, adamw_lr=0.02))
    now = replace(was, **CHANGES[change])
    first = learner(was)
    done = await step(first, was).run(as_they_come())
    record = in_force(was)

    resumed = learner(was)
    resumed.adopt(now.algorithm, now.optimizer)  # as a trainer starts on the changed job
    then = as_it_was(now, record)
    assert then == was
    resumed.adopt(then.algorithm, then.optimizer)
    await step(resumed, then).replay(groups(), done.updates)
    expected = weights_of(first)
    assert all(torch.equal(t, expected[name]) for name, t in weights_of(resumed).items())

    other = learner(was)
    other.adopt(now.algorithm, now.optimizer)
    await step(other, now).replay(groups(), done.updates)
    assert not all(torch.equal(t, expected[name]) for name, t in weights_of(other).items())


def test_what_is_recorded_is_what_a_step_computes_with() -> None:
    recorded = in_force(job())
    assert {"optimizer.muon_lr", "optimizer.final_lr", "budget.steps", "algorithm.clip_high"} <= (
        set(recorded)
    )
    assert not {"training.checkpoint_every", "algorithm.name", "rollout.slots"} & set(recorded)
