"""Interface of a job's frozen models: log-probabilities of given tokens, and verdicts on texts.

A sequence or question that cannot be scored is an outcome of its own, never an error of its batch.
"""

from __future__ import annotations

from meshrl.common.api.calls.interface import Call
from meshrl.common.api.calls.role import RoleControl
from meshrl.common.base.encoding.messages import Array, message


def scoring_name(job: str) -> str:
    """Return the registry name of the process that hosts the frozen models of a job."""
    return f"scoring/{job}"


@message
class ScoreBatch:
    """Sequences one after the other, for each of `roles`."""

    roles: list[str]  # some of reference, teacher
    lengths: Array  # int32 [n]
    tokens: Array  # int32


@message
class RoleLogprobs:
    """Log-probabilities of one frozen model for the sequences of a ScoreBatch."""

    role: str
    logprobs: Array  # float32, of each token at temperature 1; 0 at the start of a sequence
    errors: list[str]  # one for each sequence; empty: no error


@message
class ScoredBatch:
    """Answer to ScoreBatch."""

    scores: list[RoleLogprobs]  # in the order of the roles


@message
class JudgeBatch:
    """Texts for the reward model, each to be continued by `yes` or `no`.

    Every second part of a text is untrusted, and encoded without special tokens.
    """

    texts: list[list[str]]
    yes: str
    no: str


@message
class Verdicts:
    """Answer to JudgeBatch."""

    yes_probabilities: Array  # float64 [n], probability of `yes` against `no`; NaN: see errors
    errors: list[str]


class Scoring(RoleControl):
    """Methods of the process that hosts a job's frozen models."""

    score_sequences = Call(ScoreBatch, ScoredBatch, deadline_s=120.0, idempotent=True)
    judge_texts = Call(JudgeBatch, Verdicts, deadline_s=120.0, idempotent=True)
