"""A look at a mesh goes on over the end of its Redis, and ends with the mesh."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.mesh.process.handle import start_time
from meshrl.common.state.redis import embedded
from meshrl.common.state.redis.client import State
from meshrl.directory.places import MeshPlace, write_json
from meshrl.run.following.looking import looks
from tests.contract.state.state_bench import Server, running_server
from tests.load import scaled

WITHIN_S = 60.0


class Heard:
    """What is said, and what a Redis was seen to hold."""

    def __init__(self, place: MeshPlace, server: Server) -> None:
        self.place, self.server = place, server
        self.said: list[str] = []
        self.seen: list[str] = []

    def __enter__(self) -> Heard:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def say(self, text: str) -> None:
        self.said.append(text)
        if self.place.launcher.exists():
            self.server.start()

    def looking(self, state: State) -> Callable[[], Awaitable[str]]:
        self.seen.append("connected")

        async def look() -> str:
            self.seen.append(str(await state.command("INCR", "looks", deadline_s=scaled(5.0))))
            if self.seen[-1] == "2":
                self.server.kill()
            return self.seen[-1]

        return look


@pytest.mark.parametrize("lives", [True, False], ids=["comes back", "is gone"])
async def test_a_redis_that_is_away_is_asked_again_while_the_mesh_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lives: bool
) -> None:
    monkeypatch.delenv("MESHRL_REDIS_URL", raising=False)
    place = MeshPlace(tmp_path)
    with running_server(embedded.find_server()) as server:
        MeshSettings(redis_url=server.url, run_root=str(tmp_path)).to_file(place.settings)
        if lives:
            write_json(place.launcher, {"pid": os.getpid(), "start_time": start_time(os.getpid())})
        heard = Heard(place, server)
        async with asyncio.timeout(scaled(WITHIN_S)):
            found = looks(place, heard.say, heard.looking)
            async with aclosing(found):
                async for seen in found:
                    last = seen
                    if len(heard.seen) > 4:
                        break
    assert heard.said == ["redis does not answer; asking again"]
    first = ["connected", "1", "2"]
    assert heard.seen == ([*first, "connected", "3"] if lives else first)
    assert last == ("3" if lives else "2"), "what was seen last"
