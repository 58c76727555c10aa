"""Check that a supervised job has rows to learn; it prints how many, and what is left out."""

from __future__ import annotations

import sys

from meshrl.job import demonstrations
from meshrl.job.job_file import HELD_OUT_KEY, JobFile


def check_usable_rows(job: JobFile) -> None:
    """Count the rows of each supervised dataset, unless the environment is the author's.

    Raises ConfigError if none can be learned.
    """
    if not job.uses_row_prompts:
        return
    for source in job.datasets:
        key = source.key
        if not job.is_supervised(key):
            continue
        with job.locate_errors(key):
            counts = demonstrations.count_rows(job.config, source)
        text = f"{key}: {counts.describe()}"
        if not counts.usable_count and key != HELD_OUT_KEY:
            raise job.make_error(
                key,
                text,
                "Raise rollout.max_tokens, which counts prompt and answer together, or name rows "
                "with answers",
            )
        print(text, file=sys.stderr)
