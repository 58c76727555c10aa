"""Rewards by a model's verdict: the job's own judge, or a server that speaks OpenAI's API."""

from __future__ import annotations

import math
import re
from typing import Any, Protocol

from common.base.errors import ToolFailed
from common.grading.answers import answer_of
from common.job.bundle.job_data import JobData
from common.job.config import JudgeConfig
from common.mesh.runtime.mesh import Mesh
from common.model.chat.chat import ANYWHERE
from services.rollout.rewards.scoring import Scorer

SAID = 200  # characters of an answer that an error shows
_FIELD = re.compile(r"\{(\w+)\}")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


class JudgeFailed(ToolFailed):
    """The judge gave no verdict: it refused, said something else, or could not be reached."""

    code = "judge_failed"


class RewardJudge(Protocol):
    async def verdict(self, row: dict[str, Any], turns: list[dict[str, Any]]) -> float:
        """Return the reward of a trajectory: 0, unasked, if the model gave no answer. ToolFailed,
        never a number, when the judge gives no verdict.
        """

    async def close(self) -> None: ...


def judge_of(mesh: Mesh, job: JobData, scorer: Scorer) -> RewardJudge | None:
    """The judge that the job asks for, if it does."""
    config = job.config.reward.judge
    if not config.use:
        return None
    prompt = job.config.dataset.prompt
    if config.use == "model":
        anywhere = job.config.environment.special_tokens == ANYWHERE
        return ModelJudge(config, prompt, scorer, anywhere=anywhere)
    # Its HTTP client is slow to import.
    from services.rollout.rewards.judge_server import ServerJudge

    return ServerJudge(mesh, config, prompt)


def question(
    template: str, prompt: str, row: dict[str, Any], turns: list[dict[str, Any]]
) -> list[str] | None:
    """Return the template with {prompt}, {answer} and keys of the row, other braces as they are:
    parts of the template and values in turns, the template's first. None if the model gave no
    answer.
    """
    answer = answer_of(turns, {})
    if answer is None:
        return None
    values = {key: _plain(value) for key, value in row.items()}
    values |= {"prompt": _plain(row.get(prompt, "")), "answer": answer}
    parts = [""]
    for place, piece in enumerate(_FIELD.split(template)):
        if place % 2 == 0:
            parts[-1] += piece
        elif piece in values:
            parts += [values[piece], ""]
        else:
            parts[-1] += f"{{{piece}}}"
    return parts


def _plain(value: Any) -> str:
    """A value of a row as text; of messages, what each says."""
    if isinstance(value, list) and all(isinstance(m, dict) and "role" in m for m in value):
        return "\n".join(f"{m['role']}: {m.get('content', '')}" for m in value)
    return str(value)


def parsed(text: str, yes: str, no: str) -> float:
    """1 for yes, 0 for no, or the number that the last line is; JudgeFailed for anything else."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    verdict = last.rpartition(":")[2].strip(" \t*_`'\".!").casefold()
    if verdict in (yes.casefold(), no.casefold()):
        return float(verdict == yes.casefold())
    if _NUMBER.fullmatch(verdict) and math.isfinite(number := float(verdict)):
        return number
    raise JudgeFailed(
        f"the judge's last line is neither {yes}, {no} nor a number: {last[:SAID]!r}",
        fix="let the template ask for a verdict on a line of its own",
    )


class ModelJudge:
    """[models.reward], by how likely it goes on with yes. The template alone writes special tokens,
    unless the job wants them anywhere.
    """

    def __init__(self, config: JudgeConfig, prompt: str, scorer: Scorer, *, anywhere: bool) -> None:
        self._config, self._prompt, self._scorer = config, prompt, scorer
        self._anywhere = anywhere

    async def verdict(self, row: dict[str, Any], turns: list[dict[str, Any]]) -> float:
        asked = question(self._config.template, self._prompt, row, turns)
        if asked is None:
            return 0.0
        return await self._scorer.verdict(["".join(asked)] if self._anywhere else asked)

    async def close(self) -> None:
        return None
