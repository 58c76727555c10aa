"""Ranks on hosts of their own: they meet, lose each other with the network, and meet again."""

from __future__ import annotations

import asyncio
import contextlib
import json
from asyncio.subprocess import Process
from typing import Any

import pytest

from loadtests.namespaces.hosts import CODE, Hosts
from loadtests.namespaces.init import HOME
from tests.load import scaled

DEADLINE_S = 6.0  # for a meeting of ranks, and for each collective
# A name that nobody resolves: who is reached by it is reached by nobody.
NAMED = f'hostname nowhere.invalid; PYTHONPATH={CODE} exec "$@"'


class Talk:
    """What the rank on a host says."""

    def __init__(self, process: Process) -> None:
        assert process.stdout is not None
        self._process, self._lines = process, process.stdout

    async def said(self, what: str, within_s: float = 60.0) -> Any:
        async with asyncio.timeout(scaled(within_s)):
            line = await self._lines.readline()
        if not line:
            assert self._process.stderr is not None
            raise AssertionError((await self._process.stderr.read()).decode()[-3000:])
        kind, value = json.loads(line)
        assert kind == what, value
        return value


@pytest.mark.deep
@pytest.mark.timeout(240)
async def test_ranks_that_the_network_parts_are_lost_and_go_on_bit_by_bit_when_it_is_back() -> None:
    deadline_s = scaled(DEADLINE_S)
    async with Hosts(2) as hosts, contextlib.AsyncExitStack() as running:
        talks = []
        for number in (0, 1):
            host = hosts[number]
            words = ("python", "-m", "tests.hosts.far_rank", str(number), str(deadline_s))
            named = ("sh", "-c", NAMED, "sh", *words, hosts[0].address, hosts[1].address)
            process = host.started(*named, pipes=True)
            talks.append(Talk(await running.enter_async_context(process)))
        await asyncio.gather(*(talk.said("met", 120.0) for talk in talks))
        before = await talks[0].said("step")
        await talks[1].said("step")
        async with hosts.partition(1):
            for talk in talks:
                assert await talk.said("lost") <= deadline_s + scaled(10.0)
            for talk in talks:
                await talk.said("apart", 4 * deadline_s + 60.0)
        for number in (0, 1):
            hosts[number].path(HOME).joinpath("mended").touch()
        for talk in talks:
            assert await talk.said("met") < deadline_s + scaled(10.0)
        assert await talks[0].said("step") == before
