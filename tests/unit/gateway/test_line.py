"""A line to a gateway of which it is not known yet whether it is there: what lies between may take
a connection and end it at once, as a forwarded port does before anybody listens behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from urllib.parse import urlsplit

import pytest

from common.api.gateway import Gateway, ListJobs
from common.base.errors import PeerLost
from common.mesh.access.line import Line
from common.mesh.access.ticket import Ticket, read
from common.mesh.transport.keys import KeyPair
from tests.load import scaled
from tests.unit.gateway.conftest import House

FOREVER = 1_000_000


@asynccontextmanager
async def line_to(ticket: Ticket) -> AsyncIterator[Line]:
    line = Line(ticket)
    line.open()
    try:
        yield line
    finally:
        await line.close()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while read := await reader.read(65536):
        writer.write(read)
        await writer.drain()
    writer.close()


@asynccontextmanager
async def forwarded(ticket: Ticket, ended: int) -> AsyncIterator[tuple[Ticket, list[None]]]:
    """The ticket, of a port that ends the first `ended` connections at once and carries others to
    the gateway; and a list that grows by each connection.
    """
    came: list[None] = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(None)
        if len(came) <= ended:
            writer.close()
            return
        behind = urlsplit(ticket.address)
        back_reader, back_writer = await asyncio.open_connection(behind.hostname, behind.port)
        await asyncio.gather(_carry(reader, back_writer), _carry(back_reader, writer))

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield replace(ticket, address=f"tcp://127.0.0.1:{port}"), came
    finally:
        server.close()


async def test_a_connection_that_ends_without_a_word_is_tried_again(house: House) -> None:
    ticket = read(house.token())
    async with forwarded(ticket, 2) as (through, came), line_to(through) as line:
        assert (await line.call(Gateway.jobs, ListJobs(), scaled(60.0))).jobs == []
    assert len(came) == 3


async def test_who_hears_nothing_until_the_end_is_told_what_that_may_be(house: House) -> None:
    ticket = read(house.token())
    async with forwarded(ticket, FOREVER) as (through, came), line_to(through) as line:
        with pytest.raises(PeerLost, match=r"nobody is behind that address.*has another key"):
            await line.call(Gateway.jobs, ListJobs(), scaled(1.0))
    assert len(came) > 1
    another = replace(ticket, gateway=KeyPair.new().public.decode())
    async with line_to(another) as line:
        with pytest.raises(PeerLost, match=r"nobody is behind that address.*has another key"):
            await line.call(Gateway.jobs, ListJobs(), scaled(1.0))
