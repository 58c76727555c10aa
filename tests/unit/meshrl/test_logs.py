"""`meshrl logs` where other hosts, or Redis, do not tell."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshrl.cli import app
from meshrl.commands import logs
from meshrl.commands.logs import RemoteLog, RemoteLogs
from meshrl.common.api.node import LogFile, LogPart
from meshrl.common.base.errors import PeerLost
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.mesh.process.handle import start_time
from meshrl.common.state.redis import embedded
from meshrl.directory.places import MeshPlace, write_json
from tests.contract.state.state_bench import running_server
from tests.load import scaled

LOOKS = 3


def test_a_log_of_this_host_is_shown_when_redis_does_not_let_ask_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MESHRL_REDIS_URL", raising=False)
    place = MeshPlace(tmp_path)
    place.logs.mkdir(parents=True)
    place.log("redis").write_text("one\nwhy it went down\n")
    place.joined.write_text("damaged")
    write_json(place.launcher, {"pid": os.getpid(), "start_time": start_time(os.getpid())})
    with running_server(embedded.find_server()) as server:
        wrong = server.url.replace("://", "://:wrong@")
        settings = MeshSettings(redis_url=wrong, run_root=str(tmp_path), secret="5e" * 32)
        settings.to_file(place.settings)
        found = CliRunner().invoke(app, ["logs", "redis", "-n", "1", "--mesh", str(tmp_path)])
    assert (found.exit_code, found.stdout) == (0, "why it went down\n"), found.exception
    assert "(whether another host has a newer log of redis is not known: " in found.stderr


class Gone(RemoteLogs):
    """An agent that tells of a long log once, and then is gone: nobody is waited for."""

    def __init__(self) -> None:
        self.asked = 0

    async def read(self, log: RemoteLog, offset: int) -> LogPart:
        self.asked += 1
        if self.asked > LOOKS:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        if self.asked == 1:
            return LogPart("one\n", 4, 1000)
        raise PeerLost("its agent is gone")


async def test_a_host_that_is_gone_within_a_long_log_is_asked_again_after_a_while() -> None:
    gone, since = Gone(), asyncio.get_running_loop().time()
    log = RemoteLog("second-1", LogFile("note", 1000, 0.0))
    follows = asyncio.create_task(logs._read(gone, log, 1, follow=True))
    async with asyncio.timeout(scaled(30.0)):
        while gone.asked <= LOOKS:
            await asyncio.sleep(0.01)
    assert asyncio.get_running_loop().time() - since >= (LOOKS - 1) * logs.POLL_S
    follows.cancel()
