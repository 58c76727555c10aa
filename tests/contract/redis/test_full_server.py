"""A server that has no room: what it refuses, and what a script may still do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from redis.exceptions import OutOfMemoryError

from meshrl.sim.redis.server import Full
from tests.contract.redis.conftest import Pair

STEPS: list[tuple[Any, ...]] = [
    ("GET", "text"),
    ("SET", "text", "x"),
    ("HSET", "h", "f", "2"),
    ("EVAL", "return redis.call('HGET', 'h', 'f')", 0),
    ("EVAL", "return redis.call('HSET', 'h', 'f', '2') + 0", 0),
    ("EVAL", "return redis.pcall('HSET', 'h', 'f', '2').err", 0),
    # One that has written, if only by taking away, goes on to its end.
    ("EVAL", "redis.call('DEL', 'none'); return redis.call('HSET', 'h', 'g', '2')", 0),
    ("DEL", "text"),
    ("PING",),
]


@pytest.fixture
def full(pair: Pair) -> Iterator[Pair]:
    pair.clear()
    pair.both("SET", "text", "t")
    pair.both("HSET", "h", "f", "1")
    pair.real.config_set("maxmemory", "1")
    pair.simulated.server.faults.full = Full.MEMORY
    yield pair
    pair.real.config_set("maxmemory", "0")
    pair.simulated.server.faults.full = Full.NO


def test_a_server_without_memory_refuses_what_grows(full: Pair) -> None:
    answers = [full.both(*step) for step in STEPS]
    refused = [answer[0] for answer in answers if isinstance(answer, tuple)]
    assert refused == [OutOfMemoryError] * 3
    assert answers[6] == 1
