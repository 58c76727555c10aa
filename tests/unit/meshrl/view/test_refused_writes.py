"""A Redis that refuses writes is the cause of every stall, in its own words."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from meshrl.commands.status import diagnosed
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.state.redis import embedded
from meshrl.directory.places import MeshPlace
from meshrl.launch.redis import guard
from tests.contract.state.state_bench import Server, running_server


@pytest.fixture
def server() -> Iterator[Server]:
    with running_server(embedded.find_server()) as found:
        yield found


def no_memory(client: Any, server: Server) -> None:
    client.config_set("maxmemory", 1)


def no_replica(client: Any, server: Server) -> None:
    client.config_set("min-replicas-to-write", 1)


def no_snapshot(client: Any, server: Server) -> None:
    """It cannot write what it has to disk, as when that is full: a directory is in the way."""
    client.config_set("save", "900 1")
    (server.directory / "dump.rdb" / "in the way").mkdir(parents=True)
    client.bgsave()
    while client.info("persistence")["rdb_last_bgsave_status"] == "ok":
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (no_memory, "Redis refuses writes: command not allowed when used memory"),
        (no_replica, "Redis refuses writes: NOREPLICAS"),
        (no_snapshot, "Redis refuses writes: MISCONF"),
    ],
)
def test_a_redis_that_takes_no_writes_is_named_in_its_own_words(
    server: Server, tmp_path: Path, spoil: Callable[[Any, Server], None], words: str
) -> None:
    place = MeshPlace(tmp_path)
    place.redis.mkdir(parents=True)
    MeshSettings(redis_url=server.url, run_root=str(tmp_path)).to_file(place.settings)
    assert diagnosed(place)[0] == []
    with redis.Redis.from_url(server.url) as client:
        spoil(client, server)
    ((stall,), _) = diagnosed(place)
    assert (stall.waiter, stall.culprit) == ("everyone", "redis")
    assert words in stall.reason
    assert asyncio.run(guard.answers(server.url)), "it is not killed for what its disk does"
