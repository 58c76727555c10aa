"""A client of the job's frozen models: log-probabilities of trajectories, and verdicts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from meshrl.common.api.calls.interface import Call
from meshrl.common.api.scoring import JudgeBatch, ScoreBatch, Scoring, scoring_name
from meshrl.common.base.errors import MeshError, RemoteFailure, ToolFailed
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.mesh.runtime.calls.batcher import Batcher
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.patience import patiently
from meshrl.services.rollout.trajectories.trajectory import Trajectory

Q = TypeVar("Q")
R = TypeVar("R")
Floats = NDArray[np.float32]
ScoresByRole = dict[str, Floats]  # by role, one number for each token of one trajectory

ROLES = ("reference", "teacher")  # roles that read trajectories
BATCH = 32  # sequences of one call
CALL_S = 30.0  # for a call, beside what its tokens take
SLOWEST = 50.0  # tokens a second: below, a model is not slow but stuck
PATIENCE_S = 3600.0  # the process may be away so long: its host may have been lost


class ScoringFailed(ToolFailed):
    """A frozen model cannot read a trajectory, or was away too long."""

    code = "scoring_failed"


class Scorer:
    """Asks the one process that hosts them, in batches, and waits while it is away."""

    def __init__(self, mesh: Mesh, job: JobData) -> None:
        self._mesh, self._name = mesh, scoring_name(job.id)
        self.roles = [role for role in ROLES if role in job.config.models.declared]
        self._judge = job.config.reward.judge
        self._sequences: Batcher[NDArray[np.int32], ScoresByRole] = Batcher(
            lambda batch: _each(self._scored, batch), limit=BATCH, in_flight=2
        )
        self._texts: Batcher[list[str], float] = Batcher(
            lambda batch: _each(self._judged, batch), limit=BATCH, in_flight=2
        )

    async def score(self, tokens: NDArray[np.int32]) -> ScoresByRole:
        """The scores of each role that the job has, float32 [n]; ScoringFailed when they cannot be
        had.
        """
        return await self._sequences.put(tokens) if self.roles else {}

    async def verdict(self, text: list[str]) -> float:
        """The probability, from 0 to 1, that the judge says yes to a text in parts (`JudgeBatch`);
        ScoringFailed without any.
        """
        return await self._texts.put(text)

    async def _scored(self, batch: list[NDArray[np.int32]]) -> list[ScoresByRole | Exception]:
        lengths = np.array([len(tokens) for tokens in batch], np.int32)
        request = ScoreBatch(self.roles, lengths, np.concatenate(batch))
        deadline_s = CALL_S + len(self.roles) * len(request.tokens) / SLOWEST
        answer = await self._ask(Scoring.score, request, deadline_s)
        cuts = np.cumsum(lengths)[:-1]
        parts = {found.role: np.split(found.logprobs, cuts) for found in answer.scores}
        errors = {found.role: found.errors for found in answer.scores}
        scored: list[ScoresByRole | Exception] = []
        for i in range(len(batch)):
            one = {role: parts[role][i] for role in self.roles}
            wrong = [f"{role}: {errors[role][i]}" for role in self.roles if errors[role][i]]
            wrong += [
                f"{role}: a log-probability is not finite"
                for role, logprobs in one.items()
                if not np.isfinite(logprobs).all()
            ]
            scored.append(_failure(wrong) if wrong else one)
        return scored

    async def _judged(self, batch: list[list[str]]) -> list[float | Exception]:
        request = JudgeBatch(batch, self._judge.yes, self._judge.no)
        deadline_s = CALL_S + 2 * sum(len(part) for text in batch for part in text) / SLOWEST
        answer = await self._ask(Scoring.judge, request, deadline_s)
        judged: list[float | Exception] = []
        for verdict, error in zip(answer.yes.tolist(), answer.errors, strict=True):
            if error or not np.isfinite(verdict):
                judged.append(_failure([error or f"the verdict is {verdict}"]))
            else:
                judged.append(verdict)
        return judged

    async def _ask(self, method: Call[Q, R], request: Q, deadline_s: float) -> R:
        """The answer, waited for while nobody is there to give it; RemoteFailure when the request
        has broken the process.
        """
        ref, clock = self._mesh.ref(self._name), self._mesh.job_clock
        try:
            with self._mesh.wait(f"{method.name} by frozen models", on=self._name):
                return await patiently(
                    clock,
                    lambda: ref.call(method, request, deadline_s=deadline_s),
                    for_s=PATIENCE_S,
                )
        except RemoteFailure:
            raise
        except MeshError as error:
            raise ScoringFailed(f"{self._name}: {error}") from error

    async def close(self) -> None:
        await self._sequences.close()
        await self._texts.close()


def beside(members: Sequence[Trajectory], role: str) -> Floats:
    """What a role made of all members' tokens, 0 for members that it has not read."""
    parts = [t.scores.get(role, np.zeros(t.length, np.float32)) for t in members]
    return np.concatenate(parts)


async def _each(
    ask: Callable[[list[Q]], Awaitable[list[R | Exception]]], batch: list[Q]
) -> list[R | Exception]:
    """Answers to a batch. If it breaks the process, each is asked about once more, alone: what
    broke it fails, and the others do not.
    """
    try:
        return await ask(batch)
    except RemoteFailure:
        answers: list[R | Exception] = []
    for one in batch:
        try:
            answers += await ask([one])
        except RemoteFailure as error:
            answers.append(ScoringFailed(f"it breaks the process of the frozen models: {error}"))
        except ScoringFailed as error:
            answers.append(error)
    return answers


def _failure(errors: Sequence[str]) -> ScoringFailed:
    return ScoringFailed(
        "; ".join(errors), fix="see max_tokens and the tokenizer of the job's frozen models"
    )
