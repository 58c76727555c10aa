"""Verdicts of a server that speaks OpenAI's API: a real one on a socket, as bad as told."""

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
    """Answers each request as the next of `answers` says; `heard` is what it was asked."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.heard: list[Any] = []
        self.headers: list[Any] = []
        self.running = self.most = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.heard.append(await request.json())
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
async def judged_by(server: Server, **settings: Any) -> AsyncIterator[ServerJudge]:
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
    """Real time and sockets; the judge asks nobody of the mesh."""
    return alone("rollout/job/0", SystemClock(), Random(0), SystemHost())


async def test_the_template_is_asked_and_the_answer_is_the_reward() -> None:
    server = Server(completion("It is right.\nVerdict: **Yes**"), completion("Score: 0.25"))
    async with judged_by(server, max_tokens=9) as judge:
        assert await judge.judge_trajectory(ROW, TURNS) == 1.0
        assert await judge.judge_trajectory(ROW, TURNS) == 0.25
    asked = server.heard[0]
    assert (asked["model"], asked["temperature"], asked["max_tokens"]) == ("judge-7b", 0, 9)
    assert asked["messages"] == [
        {
            "role": "user",
            "content": 'Is 2 what 1+1= comes to? It is 2. Say {"verdict"} or {nothing}.',
        }
    ]
    assert "Authorization" not in server.headers[0]


async def test_judges_take_the_answer_that_other_rewards_take_and_score_none_as_0() -> None:
    server = Server(completion("yes"))
    thought = [{"role": "model", "text": "<think>3</think>\n2"}]
    cut = [{"role": "model", "text": "It is 2", "stop": "", "truncated": True}]
    async with judged_by(server) as judge:
        assert await judge.judge_trajectory(ROW, thought) == 1.0
        assert await judge.judge_trajectory(ROW, cut) == 0.0
        assert await judge.judge_trajectory(ROW, [{"role": "model", "text": "<think>2"}]) == 0.0
    asked = [request["messages"][0]["content"][:14] for request in server.heard]
    assert asked == ["Is 2 what 1+1="], "nothing was asked about the others"


async def test_a_key_comes_from_the_environment_and_is_missed_by_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server(completion("no"))
    async with judged_by(server, key="JUDGE_KEY") as judge:
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
async def test_an_answer_without_a_verdict_is_a_failure_and_no_number(answer: Any) -> None:
    server = Server(answer)
    async with judged_by(server) as judge:
        with pytest.raises(ToolFailed):
            await judge.judge_trajectory(ROW, TURNS)
    assert len(server.heard) == 1, "what will not change is not asked again"


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries come at once, well within what a test waits for."""
    monkeypatch.setattr(judge_server, "FIRST_RETRY_S", 0.05)


@pytest.mark.usefixtures("soon")
async def test_a_server_that_is_overloaded_or_slow_is_asked_again() -> None:
    deadline_s = scaled(1.0)
    server = Server(web.Response(status=503), 1.5 * deadline_s, completion("yes"))
    patience_s = 60.0 * deadline_s
    async with judged_by(server, deadline_s=deadline_s, patience_s=patience_s) as judge:
        assert await judge.judge_trajectory(ROW, TURNS) == 1.0
    assert len(server.heard) == 3


async def test_a_server_that_stays_away_fails_the_trajectory_in_time() -> None:
    server = Server(*(web.Response(status=429, headers={"Retry-After": "7200"}) for _ in range(9)))
    async with judged_by(server, patience_s=3600.0) as judge:
        began = time.monotonic()
        with pytest.raises(JudgeFailed, match=r"no verdict in 3600 s; at last: status 429"):
            await judge.judge_trajectory(ROW, TURNS)
        assert time.monotonic() - began < scaled(5.0), "the server has said that it is too early"
    config = JudgeConfig(
        use="http://127.0.0.1:9", template=TEMPLATE, model="x", retry_timeout_s=0.5
    )
    with pytest.raises(JudgeFailed, match="no verdict in"):
        gone = ServerJudge(mesh(), config, "prompt")
        try:
            await gone.judge_trajectory(ROW, TURNS)
        finally:
            await gone.close()


async def test_no_more_requests_than_allowed_are_under_way() -> None:
    server = Server(*[scaled(0.05)] * 12)
    async with judged_by(server, in_flight=3) as judge:
        found = await asyncio.gather(*(judge.judge_trajectory(ROW, TURNS) for _ in range(12)))
    assert found == [1.0] * 12 and server.most == 3


@pytest.mark.usefixtures("soon")
async def test_time_in_the_queue_is_not_the_servers() -> None:
    answer_s = scaled(0.25)
    server = Server(*[answer_s] * 10, web.Response(status=503), completion("no"))
    async with judged_by(server, in_flight=1, patience_s=8 * answer_s) as judge:
        found = await asyncio.gather(*(judge.judge_trajectory(ROW, TURNS) for _ in range(11)))
    assert found == [1.0] * 10 + [0.0]


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
def test_verdicts_are_read_from_the_last_line(text: str, value: float) -> None:
    assert parse_verdict(text, "yes", "no") == value


@pytest.mark.parametrize(
    "text", ["yes and no", "7 of 10", "yes\nperhaps", "inf", "", "nope", "1_0"]
)
def test_what_is_neither_yes_nor_no_nor_a_number_is_no_verdict(text: str) -> None:
    with pytest.raises(JudgeFailed):
        parse_verdict(text, "yes", "no")


def test_a_prompt_of_messages_is_asked_about_in_words() -> None:
    row = {"ask": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]}
    turns = [{"role": "model", "text": "yo"}]
    parts = ["", "system: be brief\nuser: hi", "|{what}", "yo", ""]
    assert render_question("{prompt}|{what}{answer}", "ask", row, turns) == parts
    assert render_question("{prompt}|{answer}", "ask", row, []) is None
