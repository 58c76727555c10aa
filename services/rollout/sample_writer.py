"""Samples of the trajectories of each step and each evaluation, for users: `samples.jsonl`.

Samples of a step, the current one when a trajectory ends: each that is the best, the worst or the
longest of the step so far, the first MAX_FAILED_SAMPLES of each kind of failure, and about
RANDOM_SAMPLES of them by a hash of the seed. There are at most MAX_SAMPLES. Samples of an
evaluation, by set: its EVALUATION_SAMPLES best, worst and failed. Texts longer than MAX_TEXT_CHARS
characters are cut in the middle. Each shard has a file on the run host. Only samples are decoded.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshrl.common.base.errors import StorageFull
from meshrl.common.base.files.json_lines import add_check
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.records.line_files import open_line_writer, sample_file_name
from meshrl.services.rollout.trajectories.trajectory import NOT_SAMPLED, Trajectory
from meshrl.services.rollout.trajectories.transcript import Transcript

MAX_SAMPLES = 24  # samples of a step, on one shard
MAX_FAILED_SAMPLES = 3  # of each kind of failure in a step
RANDOM_SAMPLES = 2.0  # expected random samples of a step
EVALUATION_SAMPLES = 3  # of the best, the worst and the failed of a set
MAX_TEXT_CHARS = 8000  # characters of one text: about 2000 tokens
MAX_TURNS = 60  # of a trajectory, the first and the last ones


class SampleWriter:
    """Writer of one shard's samples of a job."""

    def __init__(self, mesh: Mesh, job: JobData, transcript: Transcript) -> None:
        self._mesh, self._transcript, self._seed = mesh, transcript, job.config.seed
        number = int(mesh.name.rpartition("/")[2])
        self._file = open_line_writer(mesh, job, sample_file_name(number))
        algorithm = job.config.algorithm
        self._probability = RANDOM_SAMPLES / (algorithm.group_size * algorithm.groups_per_step)
        self._is_disk_full = False
        self._line_number = 0  # of the next line since the shard started: gaps are not visible
        self._start_step(-1)

    def _start_step(self, step: int) -> None:
        self._step, self._sample_count = step, 0
        self._best, self._worst, self._longest = float("-inf"), float("inf"), 0
        self._failed: Counter[str] = Counter()

    def write_training_sample(
        self, trajectory: Trajectory, row: dict[str, Any], version: int
    ) -> None:
        if version + 1 != self._step:
            self._start_step(version + 1)
        why = self._choose_reasons(trajectory)
        if why and self._sample_count < MAX_SAMPLES:
            self._sample_count += 1
            self._write(self._build_sample(trajectory, row, version + 1, why) | {"set": "train"})

    def _choose_reasons(self, trajectory: Trajectory) -> list[str]:
        assert trajectory.outcome is not None
        reward, why = trajectory.outcome.reward, []
        if reward is None:
            kind = trajectory.outcome.failure_kind or trajectory.outcome.reason
            self._failed[kind] += 1
            why += ["failed"] if self._failed[kind] <= MAX_FAILED_SAMPLES else []
        else:
            why += ["best"] if reward > self._best else []
            why += ["worst"] if reward < self._worst else []
            why += ["longest"] if trajectory.length > self._longest else []
            self._best, self._worst = max(reward, self._best), min(reward, self._worst)
            self._longest = max(trajectory.length, self._longest)
        drawn = hashlib.blake2b(f"{self._seed}/{trajectory.id}".encode(), digest_size=4).digest()
        if int.from_bytes(drawn, "little") < self._probability * (1 << 32):
            why.append("chance")
        return why

    def write_evaluation_samples(
        self,
        tag: str,
        set_name: str,
        step: int,
        trajectories: Sequence[tuple[Trajectory, dict[str, Any]]],
    ) -> None:
        scored = sorted(
            (entry for entry in trajectories if _get_reward(entry[0]) is not None),
            key=lambda entry: (_get_reward(entry[0]), entry[0].id),
        )
        failed = [entry for entry in trajectories if _get_reward(entry[0]) is None]
        best = min(EVALUATION_SAMPLES, (len(scored) + 1) // 2)  # of few, none is both
        chosen = [(t, row, ["best"]) for t, row in scored[::-1][:best]]
        chosen += [
            (t, row, ["worst"]) for t, row in scored[: len(scored) - best][:EVALUATION_SAMPLES]
        ]
        chosen += [(t, row, ["failed"]) for t, row in failed[:EVALUATION_SAMPLES]]
        for t, row, why in chosen:
            self._write(
                self._build_sample(t, row, step, why) | {"set": set_name, "evaluation": tag}
            )

    def _build_sample(
        self, trajectory: Trajectory, row: dict[str, Any], step: int, reasons: list[str]
    ) -> dict[str, Any]:
        assert trajectory.outcome is not None
        sampled = trajectory.versions[trajectory.versions != NOT_SAMPLED]
        versions = [int(sampled.min()), int(sampled.max())] if len(sampled) else []
        turns = self._transcript.build_turns(trajectory, trajectory.outcome.reason)
        if unfinished := self._transcript.decode_unfinished(trajectory):
            unfinished_turn = {"role": "model", "text": unfinished, "stop": "", "truncated": True}
            turns.append(unfinished_turn)
        return {
            "at": self._mesh.clock.wall(),
            "step": step,
            "group": trajectory.group,
            "member": trajectory.member,
            "why": reasons,
            "reward": trajectory.outcome.reward,
            "metrics": trajectory.outcome.metrics,
            "ending": trajectory.outcome.reason,
            "failure": trajectory.outcome.failure_kind,
            "error": trajectory.outcome.error,
            "tokens": trajectory.length,
            "sampled": int(np.count_nonzero(trajectory.versions != NOT_SAMPLED)),
            "versions": versions,
            "staleness": max(0, step - 1 - versions[0]) if versions else 0,
            "row": truncate(row),
            "prompt": truncate(self._transcript.decode_prompt(trajectory)),
            "turns": [truncate(turn) for turn in _truncate_middle(turns)],
        }

    def _write(self, sample: dict[str, Any]) -> None:
        """Append a sample; drop it if the disk is full."""
        content = add_check(json.dumps(sample, ensure_ascii=False, default=str), self._line_number)
        try:
            self._file.write(content)
            self._is_disk_full, self._line_number = False, self._line_number + 1
        except StorageFull as error:
            if not self._is_disk_full:
                self._mesh.telemetry.log.warning("a sample is not saved", error=str(error))
            self._is_disk_full = True

    async def close(self) -> None:
        """Close the file; the next sample opens it again."""
        await self._file.close()


def truncate(value: Any) -> Any:
    """Cut long texts, and long lists of values, in the middle."""
    if isinstance(value, str):
        if len(value) <= MAX_TEXT_CHARS:
            return value
        half = MAX_TEXT_CHARS // 2
        return f"{value[:half]} [... {len(value) - MAX_TEXT_CHARS} characters ...] {value[-half:]}"
    if isinstance(value, dict):
        return {key: truncate(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [truncate(item) for item in _truncate_middle(value)]
    return value


def _truncate_middle(values: Sequence[Any]) -> list[Any]:
    half = MAX_TURNS // 2
    return list(values) if len(values) <= MAX_TURNS else [*values[:half], *values[-half:]]


def _get_reward(trajectory: Trajectory) -> float | None:
    return trajectory.outcome.reward if trajectory.outcome else None
