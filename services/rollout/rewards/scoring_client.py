"""Client of the job's frozen models: log-probabilities of trajectories, and verdicts."""

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
from meshrl.common.mesh.runtime.retry_policy import retry
from meshrl.services.rollout.trajectories.trajectory import Trajectory

Q = TypeVar("Q")
R = TypeVar("R")
Floats = NDArray[np.float32]
ScoresByRole = dict[str, Floats]  # by role, one number per token of one trajectory

ROLES = ("reference", "teacher")  # roles that score trajectories
BATCH_SEQUENCES = 32  # sequences per call
CALL_TIMEOUT_S = 30.0  # for a call, plus the time of its tokens
MIN_TOKENS_PER_S = 50.0  # tokens per second: below this rate a model counts as stuck
UNAVAILABLE_TIMEOUT_S = 3600.0  # limit for an unavailable process, whose host may be lost


class ScoringFailed(ToolFailed):
    """Error raised when a frozen model cannot score a trajectory, or is unavailable too long."""

    code = "scoring_failed"


class ScoringClient:
    """Client of the process of the frozen models, with batches, and retries while it is
    unavailable.
    """

    def __init__(self, mesh: Mesh, job: JobData) -> None:
        self._mesh, self._name = mesh, scoring_name(job.id)
        self.roles = [role for role in ROLES if role in job.config.models.models_by_role]
        self._judge = job.config.reward.judge
        self._sequence_batcher: Batcher[NDArray[np.int32], ScoresByRole] = Batcher(
            lambda batch: _answer_each(self._score_batch, batch),
            max_batch_size=BATCH_SEQUENCES,
            max_in_flight=2,
        )
        self._text_batcher: Batcher[list[str], float] = Batcher(
            lambda batch: _answer_each(self._judge_batch, batch),
            max_batch_size=BATCH_SEQUENCES,
            max_in_flight=2,
        )

    async def score(self, tokens: NDArray[np.int32]) -> ScoresByRole:
        """Return the scores of each role of the job, float32 [n]. Raise ScoringFailed if they are
        unavailable.
        """
        return await self._sequence_batcher.submit(tokens) if self.roles else {}

    async def judge_text(self, text: list[str]) -> float:
        """Return the probability, from 0 to 1, that the judge answers yes to a text in parts
        (`JudgeBatch`). Raise ScoringFailed without an answer.
        """
        return await self._text_batcher.submit(text)

    async def _score_batch(self, batch: list[NDArray[np.int32]]) -> list[ScoresByRole | Exception]:
        lengths = np.array([len(tokens) for tokens in batch], np.int32)
        request = ScoreBatch(self.roles, lengths, np.concatenate(batch))
        deadline_s = CALL_TIMEOUT_S + len(self.roles) * len(request.tokens) / MIN_TOKENS_PER_S
        answer = await self._call_with_retries(Scoring.score_sequences, request, deadline_s)
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
            scored.append(_make_scoring_error(wrong) if wrong else one)
        return scored

    async def _judge_batch(self, batch: list[list[str]]) -> list[float | Exception]:
        request = JudgeBatch(batch, self._judge.yes, self._judge.no)
        deadline_s = (
            CALL_TIMEOUT_S
            + 2 * sum(len(part) for text in batch for part in text) / MIN_TOKENS_PER_S
        )
        answer = await self._call_with_retries(Scoring.judge_texts, request, deadline_s)
        judged: list[float | Exception] = []
        for verdict, error in zip(answer.yes_probabilities.tolist(), answer.errors, strict=True):
            if error or not np.isfinite(verdict):
                judged.append(_make_scoring_error([error or f"the verdict is {verdict}"]))
            else:
                judged.append(verdict)
        return judged

    async def _call_with_retries(self, method: Call[Q, R], request: Q, deadline_s: float) -> R:
        """Call with retries while the process is unavailable. Raise RemoteFailure if the request
        has crashed it.
        """
        ref, clock = self._mesh.ref(self._name), self._mesh.job_clock
        try:
            with self._mesh.wait(f"{method.name} by the frozen models", on=self._name):
                return await retry(
                    clock,
                    lambda: ref.call(method, request, deadline_s=deadline_s),
                    limit_s=UNAVAILABLE_TIMEOUT_S,
                )
        except RemoteFailure:
            raise
        except MeshError as error:
            raise ScoringFailed(f"{self._name}: {error}") from error

    async def close(self) -> None:
        await self._sequence_batcher.close()
        await self._text_batcher.close()


def concatenate_scores(members: Sequence[Trajectory], role: str) -> Floats:
    """Concatenate a role's scores of all members' tokens, 0 for members without scores."""
    parts = [t.scores.get(role, np.zeros(t.length, np.float32)) for t in members]
    return np.concatenate(parts)


async def _answer_each(
    answer_batch: Callable[[list[Q]], Awaitable[list[R | Exception]]], batch: list[Q]
) -> list[R | Exception]:
    """Answer each request of a batch. If the batch crashes the process, send each request alone, so
    that only the faulty request fails.
    """
    try:
        return await answer_batch(batch)
    except RemoteFailure:
        answers: list[R | Exception] = []
    for one in batch:
        try:
            answers += await answer_batch([one])
        except RemoteFailure as error:
            answers.append(
                ScoringFailed(f"the request makes the process of the frozen models fail: {error}")
            )
        except ScoringFailed as error:
            answers.append(error)
    return answers


def _make_scoring_error(errors: Sequence[str]) -> ScoringFailed:
    return ScoringFailed(
        "; ".join(errors), fix="Check max_tokens and the tokenizer of the job's frozen models"
    )
