"""A Redis that refuses writes is the cause of every stall, in its own words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from common.state import embedded
from meshrl.commands import diagnosis
from meshrl.launch.places import MeshPlace
from tests.contract.state.state_bench import Server, running_server

FULL_BYTES = 1  # of memory: no command that needs some is taken


@pytest.fixture
def server() -> Iterator[Server]:
    with running_server(embedded.find_server()) as found:
        yield found


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("maxmemory", FULL_BYTES, "Redis refuses writes: command not allowed when used memory"),
        ("min-replicas-to-write", 1, "Redis refuses writes: NOREPLICAS"),
    ],
)
def test_a_redis_that_takes_no_writes_is_named_in_its_own_words(
    server: Server, tmp_path: Path, option: str, value: int, words: str
) -> None:
    place = MeshPlace(tmp_path)
    place.directory.mkdir(parents=True)
    place.redis.mkdir()
    place.settings.write_text(json.dumps({"redis_url": server.url}))
    assert diagnosis(place) == ([], {})
    client = redis.Redis.from_url(server.url)
    client.config_set(option, value)
    ((stall,), _) = diagnosis(place)
    assert (stall.waiter, stall.culprit) == ("everyone", "redis")
    assert words in stall.reason
    client.close()
