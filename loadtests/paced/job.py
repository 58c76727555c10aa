"""Writer of the files of an emulated job for the real mesh.

The job has a small random model, forced lengths, rows with the duration of a tool call, and a
reward that a hash decides.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from statistics import NormalDist

from meshrl.common.model.tokens.tokenizer import build_character_tokenizer
from meshrl.sim.mesh.job.emulated_workload import EXTRA_STEPS, EmulatedWorkload
from meshrl.sim.mesh.job.job_setup import CHARACTERS

PROMPT = 2  # tokens of a row's
ENGINE_SLOTS = 256
MODULE = '''"""An environment whose grader is a tool that takes its time."""

import time
import zlib


class Graded:
    def open(self, row):
        self._row = row
        return row["prompt"]

    def step(self, text):
        return {"done": True, "reward": self.cut(text)}

    def cut(self, text):
        time.sleep(self._row["tool_s"])
        if self._row["alike"]:
            return 1.0
        return float(zlib.crc32(text.encode()) & 1)

    def close(self):
        return None
'''
JOB = Path(__file__).with_name("paced.toml.template")


def write(folder: Path, job: EmulatedWorkload, seed: int, most: int) -> Path:
    """Write the job file of a workload of one turn, with all that it names."""
    folder.mkdir(parents=True)
    (folder / "graded.py").write_text(MODULE)
    build_character_tokenizer(CHARACTERS, str(folder / "tokenizer.json"))
    job.write_rows(folder)
    rows = [json.dumps({"prompt": "?", "tool_s": 0.0, "alike": False})]
    (folder / "held_out.jsonl").write_text("\n".join(rows))
    path = folder / "job.toml"
    path.write_text(
        JOB.read_text().format(
            seed=seed,
            workers=job.workers,
            threads=EXTRA_STEPS * job.groups_per_step * job.group_size,
            slots=ENGINE_SLOTS,
            max_tokens=PROMPT + most,
            decode=job.engine_speed,
            lengths=lengths(job, seed, most),
            group_size=job.group_size,
            groups_per_step=job.groups_per_step,
            filters=str(job.equal_reward_share.final > 0).lower(),
            bin_tokens=max(PROMPT + most, job.bin_tokens),
            training=job.training_speed,
            checkpoint_every=max(8, job.steps),
            steps=job.steps,
        )
    )
    return path


def lengths(job: EmulatedWorkload, seed: int, most: int) -> list[int]:
    """Return the tokens of each trajectory's completion, in the order in which groups are opened.

    Each step has the same quantiles of its lognormal, in an order of its own, so that no draw is
    lucky.
    """
    rng = random.Random(seed)
    batch = job.groups_per_step * job.group_size
    normals = [NormalDist().inv_cdf((i + 0.5) / batch) for i in range(batch)]
    found: list[int] = []
    for step in range(job.steps + EXTRA_STEPS):
        share = job.compute_progress(step)
        median, sigma = job.median_tokens.get_value(share), job.log_sigma.get_value(share)
        drawn = [round(median * math.exp(sigma * z)) for z in normals]
        found += rng.sample([min(most, max(1, n)) for n in drawn], batch)
    return found
