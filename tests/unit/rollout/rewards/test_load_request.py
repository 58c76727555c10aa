"""What a sandbox is told of a job, each time that it imports the job's code."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshrl.common.base.errors import Damaged
from meshrl.common.job.bundle import bundle_files
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import JobConfig
from meshrl.services.rollout.rewards.sandboxes import load_request


def test_code_that_was_changed_since_it_was_packed_is_not_imported_again(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    module = bundle / "modules" / "mine.py"
    module.parent.mkdir(parents=True)
    module.write_text("def reward(row, turns):\n    return 1.0\n")
    job = JobData("job", JobConfig(name="job"), bundle, tmp_path, bundle_files.listed(bundle))
    assert load_request(job).bundle_dir == str(module.parent)
    module.write_text("")
    with pytest.raises(Damaged, match=r"mine\.py has 0 bytes"):
        load_request(job)
