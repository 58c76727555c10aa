"""A client of an OpenAI-compatible judge, which asks again while it is away, overloaded or slow."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import aiohttp

from common.job.config import JudgeConfig
from common.mesh.runtime.mesh import Mesh
from services.rollout.rewards.judge import SAID, JudgeFailed, parsed, question

FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 60.0
AGAIN = {408, 409, 425, 429}  # statuses, beside 5xx, that pass
ANSWER_BYTES = 1 << 20  # most that a server may answer


class _Again(Exception):
    """The server may answer later; after `pause_s` if it said so."""

    def __init__(self, why: str, pause_s: float = 0.0) -> None:
        super().__init__(why)
        self.pause_s = pause_s


class ServerJudge:
    """A model behind `chat/completions`, asked again while it is away, overloaded or slow."""

    def __init__(self, mesh: Mesh, config: JudgeConfig, prompt: str) -> None:
        self._mesh, self._config, self._prompt = mesh, config, prompt
        self._url = config.use.rstrip("/") + "/chat/completions"
        self._room = asyncio.Semaphore(config.in_flight)
        self._session: aiohttp.ClientSession | None = None

    async def verdict(self, row: dict[str, Any], turns: list[dict[str, Any]]) -> float:
        """Waiting for room among the requests under way is not the server's time."""
        asked = question(self._config.template, self._prompt, row, turns)
        if asked is None:
            return 0.0
        clock = self._mesh.job_clock
        until, pause_s = clock.monotonic() + self._config.patience_s, FIRST_RETRY_S
        with self._mesh.wait("a verdict", on=self._config.use):
            while True:
                queued_at = clock.monotonic()
                try:
                    async with self._room:
                        until += clock.monotonic() - queued_at
                        said = await self._ask("".join(asked))
                    return parsed(said, self._config.yes, self._config.no)
                except _Again as error:
                    wait_s = max(error.pause_s, pause_s * (0.5 + self._mesh.random.random()))
                    if clock.monotonic() + wait_s >= until:
                        raise JudgeFailed(
                            f"no verdict in {self._config.patience_s:g} s; at last: {error}",
                            where=self._config.use,
                        ) from error
                await clock.sleep(wait_s)
                pause_s = min(2 * pause_s, LONGEST_RETRY_S)

    async def _ask(self, asked: str) -> str:
        """What the server's model says."""
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers())
        body = {
            "model": self._config.model,
            "messages": [{"role": "user", "content": asked}],
            "temperature": 0,
            "max_tokens": self._config.max_tokens,
        }
        try:
            async with (
                asyncio.timeout(self._config.deadline_s),
                self._session.post(self._url, json=body) as answer,
            ):
                content = await self._read(answer)
                status, pause = answer.status, answer.headers.get("Retry-After", "")
        except TimeoutError as error:
            raise _Again(f"no answer in {self._config.deadline_s:g} s") from error
        except aiohttp.ClientError as error:
            raise _Again(f"{type(error).__name__}: {error}") from error
        text = content.decode(errors="replace")
        if status in AGAIN or status >= 500:
            raise _Again(f"status {status}: {text[:SAID]}", float(pause) if pause.isdigit() else 0)
        if status != 200:
            raise JudgeFailed(f"status {status}: {text[:SAID]}", where=self._config.use)
        return self._said(text)

    async def _read(self, answer: aiohttp.ClientResponse) -> bytes:
        content = bytearray()
        async for part in answer.content.iter_any():
            content += part
            if len(content) > ANSWER_BYTES:
                raise JudgeFailed(f"an answer of over {ANSWER_BYTES} bytes", where=self._config.use)
        return bytes(content)

    def _said(self, text: str) -> str:
        choice = _choice(text)
        message = choice["message"]
        if choice.get("finish_reason") == "length":
            raise JudgeFailed(
                "the judge's answer was cut", where=self._config.use, fix="raise its max_tokens"
            )
        said = message.get("content")
        if message.get("refusal") or not isinstance(said, str) or not said.strip():
            why = message.get("refusal") or text
            raise JudgeFailed(f"the judge refused: {str(why)[:SAID]}", where=self._config.use)
        return said

    def _headers(self) -> dict[str, str]:
        name = self._config.key
        if not name:
            return {}
        key = os.environ.get(name, "")
        if not key:
            raise JudgeFailed(
                f"the environment of {self._mesh.name} has no variable {name}",
                fix="set it where the mesh is started",
            )
        return {"Authorization": f"Bearer {key}"}

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def _choice(text: str) -> dict[str, Any]:
    """The first choice of a completion; JudgeFailed for what is none."""
    try:
        choice: dict[str, Any] = json.loads(text)["choices"][0]
        choice["message"].get("content")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise JudgeFailed(f"the judge's answer is no completion: {text[:SAID]}") from error
    return choice
