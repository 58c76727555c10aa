"""The sandbox over real sockets: load once, batches in order, a crisp word after a restart."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.api.sandbox import (
    LoadJob,
    RewardCall,
    RewardPart,
    RunTools,
    Sandbox,
    ScoreBatch,
    ToolCall,
)
from common.clock import SystemClock
from common.errors import NotFound, StateUnavailable, ToolFailed
from common.host import SystemHost
from common.mesh import Mesh, MeshSettings, Ref
from common.process import start_time
from common.random import Random
from common.settings import SETTINGS_ENV
from common.state import registry
from common.state.client import State
from common.state.embedded import command
from common.transport.zmq import ZmqTransport

CALC = "def tool(x):\n    return str(eval(x))\ndef reward(row, turns):\n    return len(turns)\n"
ROOT = Path(__file__).parents[3]


class Place:
    """A Redis, the sandbox as its own process, and a caller."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.host, self.clock = directory, SystemHost(), SystemClock()
        server = command(directory / "r")
        self.redis = self.host.spawn(server.argv, name="redis", log=directory / "redis.log")
        self.settings = MeshSettings(server.url, str(directory), host="here")
        self.settings.to_file(directory / "settings.json")
        (directory / "calc.py").write_text(CALC)
        self.start()

    def start(self) -> None:
        env = {SETTINGS_ENV: str(self.directory / "settings.json"), "PYTHONPATH": str(ROOT)}
        log = self.directory / "sandbox.log"
        self.sandbox = self.host.spawn(
            [sys.executable, "-m", "services.sandbox"], name="sandbox/0", env=env, log=log
        )

    async def open(self) -> Ref:
        while True:
            try:
                state = await State.open(self.settings.redis_url, connect_s=1)
                break
            except StateUnavailable:
                await self.clock.sleep(0.02)
        self.caller = Mesh(
            name="test",
            kind="test",
            state=state,
            transport=ZmqTransport(self.settings.bind, ""),
            clock=self.clock,
            random=Random.system(),
            host=self.host,
        )
        return self.caller.ref("sandbox/0")

    def job(self, tool: str = "calc:tool") -> LoadJob:
        return LoadJob("j", str(self.directory), {"calculate": tool}, [RewardPart("calc:reward")])

    async def close(self) -> None:
        await self.caller.leave()
        await self.caller.state.close()
        for child in (self.sandbox, self.redis):
            child.kill()
            await child.wait(5)


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    with tempfile.TemporaryDirectory(prefix="s") as directory:
        made = Place(Path(directory))
        yield made
        await made.close()


def tools(*inputs: str) -> RunTools:
    return RunTools([ToolCall(7 + i, "j", "calculate", x, 5.0) for i, x in enumerate(inputs)])


async def test_a_job_is_loaded_once_and_its_batches_answered_in_order(place: Place) -> None:
    sandbox = await place.open()
    with pytest.raises(NotFound, match="job j is not loaded"):
        await sandbox.call(Sandbox.run, tools("1+1"), deadline_s=20)
    for _ in range(2):
        loaded = await sandbox.call(Sandbox.load, place.job())
        assert (loaded.job, loaded.workers, loaded.tier) == ("j", 2, "")
    ran = await sandbox.call(Sandbox.run, tools("1+1", "1/0", "2*3"))
    assert [(o.id, o.status, o.value) for o in ran.outcomes] == [
        (7, "ok", "2"),
        (8, "raised", None),
        (9, "ok", "6"),
    ]
    assert ran.outcomes[1].error == "ZeroDivisionError: division by zero (<string>:1)"
    turns = [{"role": "model"}, {"role": "tool"}]
    scored = await sandbox.call(Sandbox.score, ScoreBatch([RewardCall(1, "j", {}, turns, 5.0)]))
    assert [(o.status, o.value) for o in scored.outcomes] == [("ok", 2.0)]


async def test_code_that_does_not_import_is_named_and_the_loaded_job_stays(place: Place) -> None:
    sandbox = await place.open()
    await sandbox.call(Sandbox.load, place.job())
    with pytest.raises(ToolFailed, match="No module named 'nowhere'"):
        await sandbox.call(Sandbox.load, place.job("nowhere:f"))
    assert (await sandbox.call(Sandbox.run, tools("2+2"))).outcomes[0].value == "4"


async def test_a_killed_sandbox_leaves_no_worker_and_its_successor_asks_for_the_job(
    place: Place,
) -> None:
    sandbox = await place.open()
    await sandbox.call(Sandbox.load, place.job())
    asked = tools("__import__('os').getpid()")
    worker = int((await sandbox.call(Sandbox.run, asked)).outcomes[0].value)
    os.kill(place.sandbox.pid, 9)
    await place.sandbox.wait(5)
    for _ in range(200):
        if not start_time(worker):
            break
        await place.clock.sleep(0.02)
    assert not start_time(worker)
    entry = await registry.lookup(place.caller.state, "sandbox/0")
    assert entry is not None
    await registry.evict(place.caller.state, "sandbox/0", entry.incarnation)  # as a supervisor does
    place.start()
    with pytest.raises(NotFound, match=r"Sandbox\.load"):
        await sandbox.call(Sandbox.run, tools("1+1"), deadline_s=30)
    await sandbox.call(Sandbox.load, place.job())
    assert (await sandbox.call(Sandbox.run, tools("1+1"))).outcomes[0].value == "2"
