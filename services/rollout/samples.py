"""Keeps a few trajectories of each step and each evaluation for people to read: `samples.jsonl`.

Of a step, which is the one under way when a trajectory ends: each that is the best, the worst or
the longest of the step so far, the first FAILED of each kind of failure, and about CHANCE of them
by a hash of the seed; MOST in all. Of an evaluation, by set: its EVALUATED best, worst and failed.
Texts longer than TEXT characters are cut in the middle. Each shard has a file at the run's home.
Only what is kept is decoded.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshrl.common.base.errors import StorageFull
from meshrl.common.base.files.lines import line_of
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.records.run_lines import lines_of, sample_file
from meshrl.services.rollout.trajectories.trajectory import NOT_SAMPLED, Trajectory
from meshrl.services.rollout.trajectories.transcript import Transcript

MOST = 24  # trajectories of a step, on one shard
FAILED = 3  # of each kind of failure in a step
CHANCE = 2.0  # trajectories of a step that are kept whatever they are
EVALUATED = 3  # of the best, the worst and the failed of a set
TEXT = 8000  # characters of one text: some 2000 tokens, more than anyone reads
TURNS = 60  # of a trajectory, the first and the last ones


class Samples:
    """What one shard keeps of a job's trajectories."""

    def __init__(self, mesh: Mesh, job: JobData, transcript: Transcript) -> None:
        self._mesh, self._transcript, self._seed = mesh, transcript, job.config.seed
        number = int(mesh.name.rpartition("/")[2])
        self._file = lines_of(mesh, job, sample_file(number))
        algorithm = job.config.algorithm
        self._chance = CHANCE / (algorithm.group_size * algorithm.groups_per_step)
        self._full = False
        self._number = 0  # of the next line since this shard has begun: it tells no gaps
        self._begin(-1)

    def _begin(self, step: int) -> None:
        self._step, self._kept = step, 0
        self._best, self._worst, self._longest = float("-inf"), float("inf"), 0
        self._failed: Counter[str] = Counter()

    def ended(self, t: Trajectory, row: dict[str, Any], version: int) -> None:
        if version + 1 != self._step:
            self._begin(version + 1)
        why = self._why(t)
        if why and self._kept < MOST:
            self._kept += 1
            self._write(self._sample(t, row, version + 1, why) | {"set": "train"})

    def _why(self, t: Trajectory) -> list[str]:
        assert t.ending is not None
        reward, why = t.ending.reward, []
        if reward is None:
            kind = t.ending.kind or t.ending.reason
            self._failed[kind] += 1
            why += ["failed"] if self._failed[kind] <= FAILED else []
        else:
            why += ["best"] if reward > self._best else []
            why += ["worst"] if reward < self._worst else []
            why += ["longest"] if t.length > self._longest else []
            self._best, self._worst = max(reward, self._best), min(reward, self._worst)
            self._longest = max(t.length, self._longest)
        drawn = hashlib.blake2b(f"{self._seed}/{t.id}".encode(), digest_size=4).digest()
        if int.from_bytes(drawn, "little") < self._chance * (1 << 32):
            why.append("chance")
        return why

    def evaluated(
        self,
        tag: str,
        name: str,
        step: int,
        drawn: Sequence[tuple[Trajectory, dict[str, Any]]],
    ) -> None:
        scored = sorted(
            (entry for entry in drawn if _reward(entry[0]) is not None),
            key=lambda entry: (_reward(entry[0]), entry[0].id),
        )
        failed = [entry for entry in drawn if _reward(entry[0]) is None]
        best = min(EVALUATED, (len(scored) + 1) // 2)  # of few, none is both
        chosen = [(t, row, ["best"]) for t, row in scored[::-1][:best]]
        chosen += [(t, row, ["worst"]) for t, row in scored[: len(scored) - best][:EVALUATED]]
        chosen += [(t, row, ["failed"]) for t, row in failed[:EVALUATED]]
        for t, row, why in chosen:
            self._write(self._sample(t, row, step, why) | {"set": name, "evaluation": tag})

    def _sample(
        self, t: Trajectory, row: dict[str, Any], step: int, why: list[str]
    ) -> dict[str, Any]:
        assert t.ending is not None
        sampled = t.versions[t.versions != NOT_SAMPLED]
        versions = [int(sampled.min()), int(sampled.max())] if len(sampled) else []
        turns = self._transcript.turns(t, t.ending.reason)
        if unfinished := self._transcript.unfinished(t):
            broken = t.ending.reason != "done"  # else it was given, and learned as a whole
            told = {"role": "model", "text": unfinished, "stop": "", "truncated": broken}
            turns.append(told)
        return {
            "at": self._mesh.clock.wall(),
            "step": step,
            "group": t.group,
            "member": t.member,
            "why": why,
            "reward": t.ending.reward,
            "ending": t.ending.reason,
            "failure": t.ending.kind,
            "error": t.ending.error,
            "tokens": t.length,
            "sampled": int(np.count_nonzero(t.versions != NOT_SAMPLED)),
            "versions": versions,
            "staleness": max(0, step - 1 - versions[0]) if versions else 0,
            "row": bounded(row),
            "prompt": bounded(self._transcript.prompt(t)),
            "turns": [bounded(turn) for turn in _ends(turns)],
        }

    def _write(self, sample: dict[str, Any]) -> None:
        """Appends it; what a full disk has no room for is left out."""
        content = line_of(json.dumps(sample, ensure_ascii=False, default=str), self._number)
        try:
            self._file.write(content)
            self._full, self._number = False, self._number + 1
        except StorageFull as error:
            if not self._full:
                self._mesh.telemetry.log.warning("a sample is not kept", error=str(error))
            self._full = True

    async def close(self) -> None:
        """Closes the file; the next sample opens it again."""
        await self._file.close()


def bounded(value: Any) -> Any:
    """The value with long texts, and long lists of values, cut in the middle."""
    if isinstance(value, str):
        if len(value) <= TEXT:
            return value
        half = TEXT // 2
        return f"{value[:half]} [... {len(value) - TEXT} characters ...] {value[-half:]}"
    if isinstance(value, dict):
        return {key: bounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [bounded(item) for item in _ends(value)]
    return value


def _ends(values: Sequence[Any]) -> list[Any]:
    half = TURNS // 2
    return list(values) if len(values) <= TURNS else [*values[:half], *values[-half:]]


def _reward(t: Trajectory) -> float | None:
    return t.ending.reward if t.ending else None
