"""Asks the processes of this host for their pages of metrics, all at once."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from common.base.host.ports import bare, ports

ANSWER_S = 1.0  # a process that takes longer counts as one that is down
MOST_BYTES = 8 << 20  # a page is some 10 kB
ANYWHERE = ("", "0.0.0.0", "::")  # an interface that is all of them
GET = b"GET /metrics HTTP/1.0\r\n\r\n"


@dataclass(frozen=True)
class MonitoredProcess:
    """One that runs on this host, or that should."""

    service: str
    kind: str
    job: str = ""
    metrics: str = ""  # where it serves its page; empty: nowhere
    alive: bool = True  # it renews its lease

    @property
    def labels(self) -> dict[str, str]:
        """Of its samples."""
        return {"service": self.service, "kind": self.kind, "job": self.job}


@dataclass(frozen=True)
class Scraped:
    """What a process answered in time; `page` is empty when it has none."""

    process: MonitoredProcess
    up: bool
    page: str = ""


def scrape(processes: Sequence[MonitoredProcess], where: str) -> list[Scraped]:
    """What each answers, after `ANSWER_S` at most. `where`: as `mesh.metrics`, of this host. Only
    it is asked, whatever address a record has.
    """
    return asyncio.run(_all(processes, where))


async def _all(processes: Sequence[MonitoredProcess], where: str) -> list[Scraped]:
    return list(await asyncio.gather(*(_one(process, where) for process in processes)))


async def _one(process: MonitoredProcess, where: str) -> Scraped:
    if not process.alive or not process.metrics:
        return Scraped(process, process.alive)
    host, family = bare(ports(where, "mesh.metrics")[0])
    if host in ANYWHERE:
        host = "::1" if family == socket.AF_INET6 else "127.0.0.1"
    try:
        async with asyncio.timeout(ANSWER_S):
            return Scraped(process, True, await _page(host, urlsplit(process.metrics).port or 0))
    except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
        return Scraped(process, False)


async def _page(host: str, port: int) -> str:
    """ValueError when what answers there is no page."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(GET)
        await writer.drain()
        answer = bytearray()
        while part := await reader.read(1 << 16):
            answer += part
            if len(answer) > MOST_BYTES:
                raise ValueError("it does not end")
    finally:
        writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    if head.split(b" ")[1:2] != [b"200"]:
        raise ValueError("it does not answer with a page")
    return body.decode()
