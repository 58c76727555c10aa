"""A quota that the versions of a run cannot keep to is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

from meshrl.job.checks.machine import all_checks
from meshrl.job.model_files import size
from tests.unit.meshrl.job.machine.conftest import read, refusal

GIB = 1 << 30


def test_versions_that_a_run_has_at_a_time_must_have_room(place: Path) -> None:
    of_one = size(read(place).config) * 4 / GIB
    terms = ("budget.steps=40", "training.keep_checkpoints=2", "training.checkpoint_every=4")
    said = refusal(all_checks.quota, place, *terms, f"weights.quota_gb={3.9 * of_one}")
    assert "too few for 4 versions" in said and "training.keep_checkpoints" in said
    all_checks.quota(read(place, *terms, f"weights.quota_gb={4 * of_one}"))
    half = (f"weights.quota_gb={2 * of_one}", 'rollout.dtype="bfloat16"')
    all_checks.quota(read(place, *terms, *half))
    all_checks.quota(read(place, *terms))
