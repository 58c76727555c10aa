"""Preemption notices in the formats of three clouds, from servers on this host, and from a file."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from meshrl.common.base.errors import ConfigError, Refused
from meshrl.common.state.pool.store.host_notices import UNKNOWN_TIME, HostNotice, decode_notice
from meshrl.launch.hosts.host_drain import limit_drain
from meshrl.launch.hosts.preemption_notices import parse_notice_source

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


async def read(source: str) -> HostNotice | None:
    async with httpx.AsyncClient(timeout=10.0, trust_env=False) as client:
        return await parse_notice_source(source)(client)


@pytest.mark.parametrize("has_tokens", [True, False])
async def test_notice_of_ec2_has_its_action_and_time(
    server: MetadataServer, has_tokens: bool
) -> None:
    server.has_tokens = has_tokens
    assert await read(f"ec2={server.url}") is None
    server.action = {"action": "terminate", "time": "2026-11-30T12:00:30Z"}
    assert await read(f"ec2={server.url}") == HostNotice("EC2 (terminate)", AT_S)


async def test_notice_of_compute_engine_has_no_time(server: MetadataServer) -> None:
    assert await read(f"gcp={server.url}") is None
    server.preempted = "TRUE"
    assert await read(f"gcp={server.url}") == HostNotice("Compute Engine", UNKNOWN_TIME)


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
    assert await read(f"azure={server.url}") == HostNotice("Azure", AT_S)
    server.events[-1]["NotBefore"] = ""
    assert await read(f"azure={server.url}") == HostNotice("Azure", UNKNOWN_TIME)


@pytest.mark.parametrize(
    ("text", "at_s"),
    [("", 0.0), ("2026-11-30T12:00:30Z\n", AT_S), ("2026-11-30T12:00:30", AT_S), ("soon", 0.0)],
)
async def test_file_is_a_notice_while_it_exists(tmp_path: Path, text: str, at_s: float) -> None:
    path = tmp_path / "notice"
    assert await read(f"file:{path}") is None
    path.write_text(text)
    assert await read(f"file:{path}") == HostNotice(f"the file {path}", at_s)


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


@pytest.mark.parametrize(
    ("notice", "text"),
    [
        (HostNotice(), ""),
        (HostNotice("EC2 (stop)", 187.4), "preempted in 87 s by EC2 (stop)"),
        (HostNotice("Azure", UNKNOWN_TIME), "preempted at any moment by Azure"),
        (HostNotice("Azure", 99.0), "preempted at any moment by Azure"),
        (HostNotice(failure="gcp: no"), "its preemption notices cannot be read: gcp: no"),
        (
            HostNotice("Azure", 101.0, "azure: no"),
            "preempted in 1 s by Azure; its preemption notices cannot be read: azure: no",
        ),
    ],
)
def test_notice_is_described_with_the_time_left(notice: HostNotice, text: str) -> None:
    assert notice.describe(now_s=100.0) == text


@pytest.mark.parametrize("at_s", [float("nan"), float("inf"), -1.0])
def test_notice_with_an_invalid_time_is_rejected(at_s: float) -> None:
    with pytest.raises(Refused, match="invalid time"):
        decode_notice({"source": "EC2", "preempt_at_s": at_s, "failure": ""})
    with pytest.raises(Refused, match="at most 300 characters"):
        decode_notice({"source": "E" * 301})


@pytest.mark.parametrize(
    ("drain_s", "grace_s", "expected"), [(90, 0, 90), (90, 150, 90), (90, 75, 45), (45, 30, 15)]
)
def test_drain_leaves_time_for_an_orderly_stop(
    drain_s: float, grace_s: float, expected: float
) -> None:
    assert limit_drain(drain_s, grace_s) == expected
