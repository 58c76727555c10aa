"""Rewards by a model's verdict: the job's own judge, or a server with OpenAI's API."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
from typing import TYPE_CHECKING, Any, Protocol

from meshrl.common.base.errors import ToolFailed
from meshrl.common.grading.answers import extract_answer
from meshrl.common.grading.row_values import find_value, get_value, has_value
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import JudgeConfig
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.model.chat.chat_format import SPECIAL_TOKENS_ANYWHERE
from meshrl.services.rollout.rewards.scoring_client import ScoringClient

if TYPE_CHECKING:
    import aiohttp

FIRST_RETRY_S = 1.0
MAX_RETRY_S = 60.0
RETRY_STATUSES = {408, 409, 425, 429}  # temporary statuses, beside 5xx
MAX_ANSWER_BYTES = 1 << 20  # maximum size of a server's answer
MAX_SHOWN_CHARS = 200  # characters of an answer in an error
_FIELD = re.compile(r"\{([\w.]+)\}")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


class JudgeFailed(ToolFailed):
    """Error raised when the judge gives no verdict: a rejection, another answer, or no
    connection.
    """

    code = "judge_failed"


class RewardJudge(Protocol):
    async def judge_trajectory(self, row: dict[str, Any], turns: list[dict[str, Any]]) -> float:
        """Return the reward of a trajectory; 0 without a request if the model gave no answer. Raise
        ToolFailed if the judge gives no verdict.
        """

    async def close(self) -> None: ...


def create_judge(mesh: Mesh, job: JobData, scoring_client: ScoringClient) -> RewardJudge | None:
    """Create the judge of the job; None if it has none."""
    config = job.config.reward.judge
    if not config.use:
        return None
    prompt = job.config.dataset.prompt
    if config.use == "model":
        anywhere = job.config.environment.special_tokens == SPECIAL_TOKENS_ANYWHERE
        return ModelJudge(config, prompt, scoring_client, special_tokens_anywhere=anywhere)
    return ServerJudge(mesh, config, prompt)


def render_question(
    template: str, prompt: str, row: dict[str, Any], turns: list[dict[str, Any]]
) -> list[str] | None:
    """Return the template with {prompt}, {answer} and keys of the row; other braces are unchanged.
    The result alternates parts of the template and values, starting with the template. Return
    None if the model gave no answer.
    """
    answer = extract_answer(turns, {})
    if answer is None:
        return None
    values = {key: _to_text(value) for key, value in row.items()}
    values |= {"prompt": _to_text(find_value(row, prompt) or ""), "answer": answer}
    parts = [""]
    for place, piece in enumerate(_FIELD.split(template)):
        if place % 2 == 0:
            parts[-1] += piece
        elif piece in values:
            parts += [values[piece], ""]
        elif has_value(row, piece):
            parts += [_to_text(get_value(row, piece)), ""]
        else:
            parts[-1] += f"{{{piece}}}"
    return parts


def _to_text(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(m, dict) and "role" in m for m in value):
        return "\n".join(f"{m['role']}: {m.get('content', '')}" for m in value)
    return str(value)


def parse_verdict(text: str, yes: str, no: str) -> float:
    """Parse a verdict: 1 for yes, 0 for no, or the number in the last line. Raise JudgeFailed for
    anything else.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    verdict = last.rpartition(":")[2].strip(" \t*_`'\".!").casefold()
    if verdict in (yes.casefold(), no.casefold()):
        return float(verdict == yes.casefold())
    if _NUMBER.fullmatch(verdict) and math.isfinite(number := float(verdict)):
        return number
    raise JudgeFailed(
        f"the judge's last line is neither {yes}, {no} nor a number: {last[:MAX_SHOWN_CHARS]!r}",
        fix="Change the template so that it requests a verdict on a line of its own",
    )


class ModelJudge:
    """Judge of [models.reward], by the probability of yes. Only the template contains special
    tokens, unless the job allows them everywhere.
    """

    def __init__(
        self,
        config: JudgeConfig,
        prompt: str,
        scoring_client: ScoringClient,
        *,
        special_tokens_anywhere: bool,
    ) -> None:
        self._config, self._prompt, self._scoring_client = config, prompt, scoring_client
        self._special_tokens_anywhere = special_tokens_anywhere

    async def judge_trajectory(self, row: dict[str, Any], turns: list[dict[str, Any]]) -> float:
        question = render_question(self._config.template, self._prompt, row, turns)
        if question is None:
            return 0.0
        return await self._scoring_client.judge_text(
            ["".join(question)] if self._special_tokens_anywhere else question
        )

    async def close(self) -> None:
        return None


class _RetryableError(Exception):
    """Error of a server that may answer later; after `pause_s` if the server sent a delay."""

    def __init__(self, reason: str, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class ServerJudge:
    """Judge behind `chat/completions`, retried while the server is unavailable, overloaded or
    slow.
    """

    def __init__(self, mesh: Mesh, config: JudgeConfig, prompt: str) -> None:
        self._mesh, self._config, self._prompt = mesh, config, prompt
        self._url = config.use.rstrip("/") + "/chat/completions"
        self._request_slots = asyncio.Semaphore(config.in_flight)
        self._session: aiohttp.ClientSession | None = None

    async def judge_trajectory(self, row: dict[str, Any], turns: list[dict[str, Any]]) -> float:
        """Return the reward; waiting for a free request slot does not count against the server's
        time limit.
        """
        question = render_question(self._config.template, self._prompt, row, turns)
        if question is None:
            return 0.0
        clock = self._mesh.job_clock
        until, pause_s = clock.monotonic() + self._config.retry_timeout_s, FIRST_RETRY_S
        with self._mesh.wait("a verdict", on=self._config.use):
            while True:
                queued_at = clock.monotonic()
                try:
                    async with self._request_slots:
                        until += clock.monotonic() - queued_at
                        reply = await self._request_verdict("".join(question))
                    return parse_verdict(reply, self._config.yes, self._config.no)
                except _RetryableError as error:
                    wait_s = max(error.retry_after_s, pause_s * (0.5 + self._mesh.random.random()))
                    if clock.monotonic() + wait_s >= until:
                        raise JudgeFailed(
                            f"no verdict within {self._config.retry_timeout_s:g} s; last "
                            f"error: {error}",
                            where=self._config.use,
                        ) from error
                await clock.sleep(wait_s)
                pause_s = min(2 * pause_s, MAX_RETRY_S)

    async def _request_verdict(self, question: str) -> str:
        import aiohttp  # imported only here, as the import is slow

        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._build_headers())
        body = {
            "model": self._config.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": self._config.max_tokens,
        }
        try:
            async with (
                asyncio.timeout(self._config.deadline_s),
                self._session.post(self._url, json=body) as answer,
            ):
                content = await self._read_answer(answer)
                status, pause = answer.status, answer.headers.get("Retry-After", "")
        except TimeoutError as error:
            raise _RetryableError(f"no answer within {self._config.deadline_s:g} s") from error
        except aiohttp.ClientError as error:
            raise _RetryableError(f"{type(error).__name__}: {error}") from error
        text = content.decode(errors="replace")
        if status in RETRY_STATUSES or status >= 500:
            raise _RetryableError(
                f"status {status}: {text[:MAX_SHOWN_CHARS]}", float(pause) if pause.isdigit() else 0
            )
        if status != 200:
            raise JudgeFailed(f"status {status}: {text[:MAX_SHOWN_CHARS]}", where=self._config.use)
        try:
            choice = json.loads(text)["choices"][0]
            message = choice["message"]
            verdict = message.get("content")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise JudgeFailed(
                f"the judge's answer is not a chat completion: {text[:MAX_SHOWN_CHARS]}"
            ) from error
        if choice.get("finish_reason") == "length":
            raise JudgeFailed(
                "the judge's answer was truncated",
                where=self._config.use,
                fix="Raise its max_tokens",
            )
        if message.get("refusal") or not isinstance(verdict, str) or not verdict.strip():
            why = message.get("refusal") or text
            raise JudgeFailed(
                f"the judge gave no verdict: {str(why)[:MAX_SHOWN_CHARS]}", where=self._config.use
            )
        return verdict

    async def _read_answer(self, answer: aiohttp.ClientResponse) -> bytes:
        content = bytearray()
        async for part in answer.content.iter_any():
            content += part
            if len(content) > MAX_ANSWER_BYTES:
                raise JudgeFailed(
                    f"the judge's answer has more than {MAX_ANSWER_BYTES} bytes",
                    where=self._config.use,
                )
        return bytes(content)

    def _build_headers(self) -> dict[str, str]:
        name = self._config.key
        if not name:
            return {}
        key = os.environ.get(name, "")
        if not key:
            raise JudgeFailed(
                f"the environment of {self._mesh.name} has no variable {name}",
                fix="Set it in the shell that starts the mesh",
            )
        return {"Authorization": f"Bearer {key}"}

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
