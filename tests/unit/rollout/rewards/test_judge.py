"""Judge client against a server on a socket that speaks the OpenAI API and fails on demand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import ToolFailed
from meshrl.common.base.random import Random
from meshrl.common.job.config import JudgeConfig
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.services.rollout.rewards import judge as judge_server
from meshrl.services.rollout.rewards.judge import (
    JudgeFailed,
    ServerJudge,
    parse_verdict,
    render_question,
)
from tests.load import scaled
from tests.meshes import alone

ROW = {"prompt": "1+1=", "solution": "2"}
TURNS = [{"role": "model", "text": "3"}, {"role": "tool"}, {"role": "model", "text": "2"}]
TEMPLATE = 'Is {answer} what {prompt} comes to? It is {solution}. Say {"verdict"} or {nothing}.'


class Server:
    """Server that answers each request as the next of `answers` says; `requests` has the received
    ones.
    """

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.requests: list[Any] = []
        self.headers: list[Any] = []
        self.running = self.most = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(await request.json())
        self.headers.append(dict(request.headers))
        answer = self.answers.pop(0)
        if isinstance(answer, web.StreamResponse):
            return answer
        if isinstance(answer, float):
            self.running += 1
            self.most = max(self.most, self.running)
            await asyncio.sleep(answer)
            self.running -= 1
            return web.json_response(completion("yes"))
        return web.json_response(answer)


def completion(content: str | None, **more: Any) -> dict[str, Any]:
    finish = more.pop("finish_reason", "stop")
    message = {"role": "assistant", "content": content, **more}
    return {"choices": [{"message": message, "finish_reason": finish}]}


@asynccontextmanager
async def create_judge(server: Server, **settings: Any) -> AsyncIterator[ServerJudge]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    config = JudgeConfig(
        use=f"http://127.0.0.1:{port}/v1/", template=TEMPLATE, model="judge-7b", **settings
    )
    judge = ServerJudge(mesh(), config, "prompt")
    try:
        yield judge
    finally:
        await judge.close()
        await runner.cleanup()


def mesh() -> Mesh:
    """Create a mesh on real time and sockets; the judge calls no other process."""
    return alone("rollout/job/0", SystemClock(), Random(0), SystemHost())


async def test_judge_sends_the_template_and_returns_the_answer_as_reward() -> None:
    server = Server(completion("It is right.\nVerdict: **Yes**"), completion("Score: 0.25"))
    async with create_judge(server, max_tokens=9) as judge:
        assert await judge.judge_trajectory(ROW, TURNS) == 1.0
        assert await judge.judge_trajectory(ROW, TURNS) == 0.25
    questions = server.requests[0]
    assert (questions["model"], questions["temperature"], questions["max_tokens"]) == (
        "judge-7b",
        0,
        9,
    )
    assert questions["messages"] == [
        {
            "role": "user",
            "content": 'Is 2 what 1+1= comes to? It is 2. Say {"verdict"} or {nothing}.',
        }
    ]
    assert "Authorization" not in server.headers[0]


async def test_judges_use_the_row_answer_and_score_none_as_zero() -> None:
    server = Server(completion("yes"))
    thought = [{"role": "model", "text": "<think>3</think>\n2"}]
    cut = [{"role": "model", "text": "It is 2", "stop": "", "truncated": True}]
    async with create_judge(server) as judge:
        assert await judge.judge_trajectory(ROW, thought) == 1.0
        assert await judge.judge_trajectory(ROW, cut) == 0.0
        assert await judge.judge_trajectory(ROW, [{"role": "model", "text": "<think>2"}]) == 0.0
    questions = [request["messages"][0]["content"][:14] for request in server.requests]
    assert questions == ["Is 2 what 1+1="], "nothing was asked about the others"


async def test_api_key_comes_from_the_environment_and_missing_key_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server(completion("no"))
    async with create_judge(server, key="JUDGE_KEY") as judge:
        with pytest.raises(JudgeFailed, match="no variable JUDGE_KEY"):
            await judge.judge_trajectory(ROW, TURNS)
        monkeypatch.setenv("JUDGE_KEY", "secret")
        assert await judge.judge_trajectory(ROW, TURNS) == 0.0
    assert server.headers[0]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    "answer",
    [
        completion(None, refusal="I will not judge this"),
        completion(""),
        completion("It depends."),
        completion("nan"),
        completion("Verdict: yes", finish_reason="length"),
        {"choices": []},
        {"error": "no such model"},
        web.Response(text="<html>", content_type="text/html"),
        web.json_response({"error": "who are you?"}, status=401),
    ],
)
async def test_answer_without_a_verdict_raises(answer: Any) -> None:
    server = Server(answer)
    async with create_judge(server) as judge:
        with pytest.raises(ToolFailed):
            await judge.judge_trajectory(ROW, TURNS)
    assert len(server.requests) == 1, "what will not change is not asked again"


@pytest.fixture
def short_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the delay before a retry."""
    monkeypatch.setattr(judge_server, "FIRST_RETRY_S", 0.05)


@pytest.mark.usefixtures("short_retries")
async def test_overloaded_or_slow_server_is_retried() -> None:
    deadline_s = scaled(1.0)
    server = Server(web.Response(status=503), 1.5 * deadline_s, completion("yes"))
    retry_timeout_s = 60.0 * deadline_s
    async with create_judge(
        server, deadline_s=deadline_s, retry_timeout_s=retry_timeout_s
    ) as judge:
        assert await judge.judge_trajectory(ROW, TURNS) == 1.0
    assert len(server.requests) == 3


async def test_unreachable_server_fails_the_trajectory_within_its_deadline() -> None:
    server = Server(*(web.Response(status=429, headers={"Retry-After": "7200"}) for _ in range(9)))
    async with create_judge(server, retry_timeout_s=3600.0) as judge:
        began = time.monotonic()
        with pytest.raises(JudgeFailed, match=r"no verdict within 3600 s; last error: status 429"):
            await judge.judge_trajectory(ROW, TURNS)
        assert time.monotonic() - began < scaled(5.0), "the server has said that it is too early"
    config = JudgeConfig(
        use="http://127.0.0.1:9", template=TEMPLATE, model="x", retry_timeout_s=0.5
    )
    with pytest.raises(JudgeFailed, match="no verdict within"):
        unreachable_judge = ServerJudge(mesh(), config, "prompt")
        try:
            await unreachable_judge.judge_trajectory(ROW, TURNS)
        finally:
            await unreachable_judge.close()


async def test_concurrent_requests_respect_the_limit() -> None:
    server = Server(*[scaled(0.05)] * 12)
    async with create_judge(server, in_flight=3) as judge:
        rewards = await asyncio.gather(*(judge.judge_trajectory(ROW, TURNS) for _ in range(12)))
    assert rewards == [1.0] * 12 and server.most == 3


@pytest.mark.usefixtures("short_retries")
async def test_queue_time_does_not_count_against_the_server() -> None:
    answer_s = scaled(0.25)
    server = Server(*[answer_s] * 10, web.Response(status=503), completion("no"))
    async with create_judge(server, in_flight=1, retry_timeout_s=8 * answer_s) as judge:
        rewards = await asyncio.gather(*(judge.judge_trajectory(ROW, TURNS) for _ in range(11)))
    assert rewards == [1.0] * 10 + [0.0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("yes", 1.0),
        ("No.", 0.0),
        ("so\n\n`YES`\n", 1.0),
        ("-0.5", -0.5),
        ("1e-2", 0.01),
        ("Reward: 7", 7.0),
    ],
)
def test_verdict_is_parsed_from_the_last_line(text: str, value: float) -> None:
    assert parse_verdict(text, "yes", "no") == value


@pytest.mark.parametrize(
    "text", ["yes and no", "7 of 10", "yes\nperhaps", "inf", "", "nope", "1_0"]
)
def test_answer_without_yes_no_or_number_is_no_verdict(text: str) -> None:
    with pytest.raises(JudgeFailed):
        parse_verdict(text, "yes", "no")


def test_prompt_of_messages_is_formatted_as_text() -> None:
    row = {"ask": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]}
    turns = [{"role": "model", "text": "yo"}]
    parts = ["", "system: be brief\nuser: hi", "|{what}", "yo", ""]
    assert render_question("{prompt}|{what}{answer}", "ask", row, turns) == parts
    assert render_question("{prompt}|{answer}", "ask", row, []) is None
    nested = {"a": {"b": 1}, "q": {"ask": "?"}}
    assert render_question("{prompt}{a.b}{a.c}", "q.ask", nested, turns) == [
        *("", "?", "", "1", "{a.c}")
    ]
