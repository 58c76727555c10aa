"""Preemption notices of a host: read from a file or a cloud's metadata server, and followed.

While there is a notice the mesh moves everything off the host. A withdrawn notice makes it usable
again. Formats: EC2's `spot/instance-action`, Compute Engine's `instance/preempted`, Azure's
`scheduledevents` with events of type Preempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx

from meshrl.common.api.gateway import Gateway, NoticeReport
from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import ConfigError, MeshError, NotAllowed, NotFound
from meshrl.common.state.pool.store.host_notices import MAX_TEXT_CHARS, UNKNOWN_TIME, HostNotice
from meshrl.launch.hosts.host_drain import CALL_TIMEOUT_S, print_line
from meshrl.launch.hosts.membership import Membership, connect_gateway

POLL_S = 2.0  # Compute Engine and Azure give 30 s
READ_TIMEOUT_S = 2.0
MAX_FILE_BYTES = 100
EC2_URL = AZURE_URL = "http://169.254.169.254"
GCP_URL = "http://metadata.google.internal"
TOKEN_LIFETIME_S = 60  # of EC2, requested for each poll


Reading = HostNotice | None
ReadNotice = Callable[[httpx.AsyncClient], Awaitable[Reading]]


def parse_notice_source(text: str) -> ReadNotice:
    """Return the reader of a source: `file:PATH`, `ec2`, `gcp` or `azure`.

    A cloud may have another address of its metadata server: `ec2=http://127.0.0.1:8080`. Raises
    ConfigError for another text.
    """
    if text.startswith("file:") and (path := text.removeprefix("file:")):
        return lambda client: _read_file(Path(path))
    cloud, _, url = text.partition("=")
    if cloud == "ec2":
        return lambda client: _read_ec2(client, url or EC2_URL)
    if cloud == "gcp":
        return lambda client: _read_gcp(client, url or GCP_URL)
    if cloud == "azure":
        return lambda client: _read_azure(client, url or AZURE_URL)
    raise ConfigError(
        f"{text!r} is no source of preemption notices",
        where="--notice",
        fix="Set ec2, gcp, azure or file:PATH",
    )


async def _read_file(path: Path) -> Reading:
    """Return the notice of a file; it may contain the time of the end, as in RFC 3339."""
    try:  # on a thread, because a network file system may hang
        text = await asyncio.to_thread(_read_start, path)
    except FileNotFoundError:
        return None
    try:
        return _make_notice(f"the file {path}", text)
    except ValueError:  # the file itself is the notice
        return _make_notice(f"the file {path}")


def _read_start(path: Path) -> str:
    with path.open() as file:
        return file.read(MAX_FILE_BYTES).strip()


async def _read_ec2(client: httpx.AsyncClient, url: str) -> Reading:
    lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_LIFETIME_S)}
    session = await client.put(f"{url}/latest/api/token", headers=lifetime)
    token = {"X-aws-ec2-metadata-token": session.text} if session.is_success else {}
    answer = await client.get(f"{url}/latest/meta-data/spot/instance-action", headers=token)
    if answer.status_code == httpx.codes.NOT_FOUND:
        return None
    answer.raise_for_status()
    action = answer.json()
    return _make_notice(f"EC2 ({action['action']})", action["time"])


async def _read_gcp(client: httpx.AsyncClient, url: str) -> Reading:
    path = f"{url}/computeMetadata/v1/instance/preempted"
    answer = await client.get(path, headers={"Metadata-Flavor": "Google"})
    answer.raise_for_status()
    states = {"TRUE": _make_notice("Compute Engine"), "FALSE": None}
    return states[answer.text.strip()]


async def _read_azure(client: httpx.AsyncClient, url: str) -> Reading:
    header = {"Metadata": "true"}
    name_path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    name = await client.get(url + name_path, headers=header)
    name.raise_for_status()
    events_path = "/metadata/scheduledevents?api-version=2020-07-01"
    answer = await client.get(url + events_path, headers=header)
    answer.raise_for_status()
    for event in answer.json()["Events"]:
        if event["EventType"] == "Preempt" and name.text.strip() in event["Resources"]:
            return _make_notice("Azure", event["NotBefore"])  # empty: it has begun
    return None


def _make_notice(source: str, time: str = "") -> HostNotice:
    """Return a notice for a time as `_parse_time` reads it; empty: within seconds."""
    return HostNotice(source, _parse_time(time) if time else UNKNOWN_TIME)


def _parse_time(text: str) -> float:
    """Return the seconds since 1970 of a time as in RFC 3339 or RFC 1123; ValueError otherwise."""
    parse = datetime.fromisoformat if text[:1].isdigit() else parsedate_to_datetime
    found = parse(text)
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


async def follow_notices(member: Membership, clock: Clock, source: str, address: str) -> None:
    """Drain this host while there is a notice, and end the drain once it is withdrawn.

    Report to the mesh why notices cannot be read; the last one then stays in force. `address`: by
    which other hosts reach this one. Returns when the host is no member any more.
    """
    read, failure = parse_notice_source(source), ""
    followed: Reading = None
    known = HostNotice()  # what the mesh knows; a returning host's earlier notice is gone
    async with connect_gateway(member.member_token) as line, _open_client() as client:
        while True:
            why, notice = "", followed
            try:
                notice = await _read_in_time(read, client, clock)
            except (MeshError, httpx.HTTPError, OSError, ValueError, KeyError, TypeError) as error:
                reason = error.message if isinstance(error, MeshError) else repr(error)
                why = f"{source}: {reason}"[:MAX_TEXT_CHARS]
            try:
                now = replace(notice or HostNotice(), failure=why)
                if notice is None and followed is not None:
                    await line.call(Gateway.back, address, CALL_TIMEOUT_S)
                # each time while there is any: the host may have reported its return since
                if not now.is_empty or now != known:
                    report = NoticeReport(now.source, now.preempt_at_s or UNKNOWN_TIME, why)
                    await line.call(Gateway.notice, report, CALL_TIMEOUT_S)
                known = now
            except (NotAllowed, NotFound):
                return  # the membership watcher reports it
            except MeshError as error:
                why = f"{source}: {error.message}"
            else:
                if notice != followed:
                    print_line(_describe_change(member.host, notice, clock.wall()))
                    followed = notice
            if why and why != failure:
                print_line(f"following preemption notices failed, again: {why}")
            failure = why
            await clock.sleep(POLL_S)


def _open_client() -> httpx.AsyncClient:
    """Open a client that takes no proxy: metadata servers are on the host's own link."""
    return httpx.AsyncClient(timeout=READ_TIMEOUT_S, trust_env=False)


async def _read_in_time(read: ReadNotice, client: httpx.AsyncClient, clock: Clock) -> Reading:
    async with clock.timeout(3 * READ_TIMEOUT_S, "reading a preemption notice"):
        return await read(client)


def _describe_change(host: str, notice: Reading, now_s: float) -> str:
    if notice is None:
        return f"the preemption notice is withdrawn: {host} accepts work again"
    return f"{host} is {notice.describe(now_s)}: the mesh moves everything off it"
