"""Preemption notices in the formats of three clouds, from servers on this host, and from a file."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from meshrl.common.base.errors import ConfigError
from meshrl.launch.hosts.preemption_notices import PreemptionNotice, parse_notice_source

AT_S = datetime(2026, 11, 30, 12, 0, 30, tzinfo=UTC).timestamp()
NAME = "gpu-7"


class MetadataServer:
    """Metadata server that answers as the clouds do; `events` and `action` are set by a test."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.action: dict[str, str] | None = None
        self.preempted = "FALSE"
        self.has_tokens = True
        self.url = ""

    def create_application(self) -> web.Application:
        application = web.Application()
        application.add_routes(
            [
                web.put("/latest/api/token", self.give_token),
                web.get("/latest/meta-data/spot/instance-action", self.tell_action),
                web.get("/computeMetadata/v1/instance/preempted", self.tell_preempted),
                web.get("/metadata/instance/compute/name", self.tell_name),
                web.get("/metadata/scheduledevents", self.tell_events),
            ]
        )
        return application

    async def give_token(self, request: web.Request) -> web.Response:
        if not self.has_tokens:
            raise web.HTTPNotFound
        assert 1 <= int(request.headers["X-aws-ec2-metadata-token-ttl-seconds"]) <= 21600
        return web.Response(text="secret")

    async def tell_action(self, request: web.Request) -> web.Response:
        if self.has_tokens and request.headers.get("X-aws-ec2-metadata-token") != "secret":
            raise web.HTTPUnauthorized
        if self.action is None:
            raise web.HTTPNotFound
        return web.json_response(self.action)

    async def tell_preempted(self, request: web.Request) -> web.Response:
        if request.headers.get("Metadata-Flavor") != "Google":
            raise web.HTTPForbidden
        return web.Response(text=self.preempted)

    async def tell_name(self, request: web.Request) -> web.Response:
        assert request.query["format"] == "text"
        return web.Response(text=NAME)

    async def tell_events(self, request: web.Request) -> web.Response:
        if request.headers.get("Metadata") != "true" or "api-version" not in request.query:
            raise web.HTTPBadRequest
        return web.json_response({"DocumentIncarnation": 1, "Events": self.events})


@pytest.fixture
async def server() -> AsyncIterator[MetadataServer]:
    found = MetadataServer()
    runner = web.AppRunner(found.create_application())
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        found.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield found
    finally:
        await runner.cleanup()


async def read(source: str) -> PreemptionNotice | None:
    async with httpx.AsyncClient(timeout=10.0, trust_env=False) as client:
        return await parse_notice_source(source)(client)


@pytest.mark.parametrize("has_tokens", [True, False])
async def test_notice_of_ec2_has_its_action_and_time(
    server: MetadataServer, has_tokens: bool
) -> None:
    server.has_tokens = has_tokens
    assert await read(f"ec2={server.url}") is None
    server.action = {"action": "terminate", "time": "2026-11-30T12:00:30Z"}
    assert await read(f"ec2={server.url}") == PreemptionNotice("EC2 (terminate)", AT_S)


async def test_notice_of_compute_engine_has_no_time(server: MetadataServer) -> None:
    assert await read(f"gcp={server.url}") is None
    server.preempted = "TRUE"
    assert await read(f"gcp={server.url}") == PreemptionNotice("Compute Engine")


async def test_notice_of_azure_is_for_this_machine(server: MetadataServer) -> None:
    event = {
        "EventId": "1",
        "EventStatus": "Scheduled",
        "EventType": "Preempt",
        "ResourceType": "VirtualMachine",
        "Resources": ["gpu-8"],
        "NotBefore": "Mon, 30 Nov 2026 12:00:30 GMT",
    }
    server.events = [event, event | {"EventType": "Freeze", "Resources": [NAME]}]
    assert await read(f"azure={server.url}") is None
    server.events.append(event | {"Resources": ["gpu-8", NAME]})
    assert await read(f"azure={server.url}") == PreemptionNotice("Azure", AT_S)
    server.events[-1]["NotBefore"] = ""
    assert await read(f"azure={server.url}") == PreemptionNotice("Azure")


@pytest.mark.parametrize(
    ("text", "at_s"),
    [("", None), ("2026-11-30T12:00:30Z\n", AT_S), ("2026-11-30T12:00:30", AT_S), ("soon", None)],
)
async def test_file_is_a_notice_while_it_exists(
    tmp_path: Path, text: str, at_s: float | None
) -> None:
    path = tmp_path / "notice"
    assert await read(f"file:{path}") is None
    path.write_text(text)
    assert await read(f"file:{path}") == PreemptionNotice(f"the file {path}", at_s)


@pytest.mark.parametrize("source", ["", "aws", "file:", "ec2:http://127.0.0.1"])
def test_unknown_source_is_rejected_with_the_known_ones(source: str) -> None:
    with pytest.raises(ConfigError, match="is no source") as caught:
        parse_notice_source(source)
    assert caught.value.fix == "Set ec2, gcp, azure or file:PATH"


async def test_broken_answer_is_no_notice(server: MetadataServer) -> None:
    server.action = {"time": "soon"}
    with pytest.raises((KeyError, ValueError)):
        await read(f"ec2={server.url}")
    server.preempted = "MAYBE"
    with pytest.raises(KeyError):
        await read(f"gcp={server.url}")
