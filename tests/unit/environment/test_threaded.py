"""Environments whose code waits: each operation is answered when it can be."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest

from meshrl.common.mesh.process.entry.child import ChildChannel
from meshrl.services.environment import threaded
from meshrl.services.environment.environments import Environments
from meshrl.sim.mesh.job.job import CHARACTERS
from tests.load import scaled

WITHIN_S = 30.0  # for what comes at once


class Waiting:
    """A turn is over when the gate of its row has opened."""

    gates: dict[str, threading.Event]

    def open(self, row: dict[str, Any]) -> str:
        self._gate = self.gates.setdefault(row["gate"], threading.Event())
        return str(row["prompt"])

    def step(self, text: str) -> dict[str, Any]:
        if not self._gate.wait(scaled(WITHIN_S)):
            raise TimeoutError("nobody opened the gate")
        return {"done": True, "reward": len(text)}

    def close(self) -> None:
        return None


class Shard:
    """The other end of an environment process."""

    def __init__(self, stream: socket.socket) -> None:
        self._channel = ChildChannel(stream)
        self._stream = stream

    def ask(self, *operations: list[Any]) -> None:
        self._channel.send(msgpack.packb(list(operations)))

    def answers(self) -> list[list[Any]]:
        block = self._channel.recv()
        assert block is not None
        found: list[list[Any]] = msgpack.unpackb(block)
        return found

    def end(self) -> None:
        self._stream.shutdown(socket.SHUT_WR)


@pytest.fixture
def gates() -> Iterator[dict[str, threading.Event]]:
    Waiting.gates = {}
    yield Waiting.gates
    for gate in Waiting.gates.values():
        gate.set()


@pytest.fixture
def shard(tmp_path: Any, gates: dict[str, threading.Event]) -> Iterator[Shard]:
    from meshrl.common.model.tokens.tokenizer import Tokenizer, character_tokenizer

    character_tokenizer(CHARACTERS, str(tmp_path / "tokenizer.json"))
    served = Environments(Waiting, Tokenizer.load(str(tmp_path / "tokenizer.json")), "prompt")
    ours, theirs = socket.socketpair()
    ours.settimeout(scaled(WITHIN_S))
    serving = threading.Thread(
        target=threaded.serve, args=(ChildChannel(theirs), served.perform, 4)
    )
    serving.start()
    shard = Shard(ours)
    yield shard
    for gate in gates.values():
        gate.set()
    shard.end()
    serving.join(scaled(WITHIN_S))
    assert not serving.is_alive()
    ours.close()
    theirs.close()


def begin(number: int, key: int, gate: str) -> list[Any]:
    return [number, key, "begin", {"prompt": "a", "gate": gate}]


def test_a_trajectory_that_waits_holds_up_no_other(
    shard: Shard, gates: dict[str, threading.Event]
) -> None:
    shard.ask(begin(1, 1, "shut"))
    shard.ask(begin(2, 2, "open"))
    assert sorted(answer[:2] for _ in range(2) for answer in shard.answers()) == [
        [1, "ok"],
        [2, "ok"],
    ]
    gates["open"].set()
    shard.ask([3, 1, "step", [3, 4]], [4, 2, "step", [3]])
    [[number, status, action]] = shard.answers()
    assert (number, status, action[1:]) == (4, "ok", ["done", 1.0])
    gates["shut"].set()
    [[number, status, action]] = shard.answers()
    assert (number, status, action[1:]) == (3, "ok", ["done", 2.0])


def test_a_process_all_of_whose_threads_wait_says_that_it_lives(
    shard: Shard, gates: dict[str, threading.Event]
) -> None:
    shard.ask(*(begin(key, key, "shut") for key in range(1, 6)))
    for _ in range(5):
        shard.answers()
    shard.ask(*([10 + key, key, "step", [3]] for key in range(1, 6)))
    shard.ask([0, 0, threaded.PROBE, []])
    assert shard.answers() == [[0, "ok", ""]]


def test_what_an_environment_raises_is_its_own_trajectory_s(shard: Shard) -> None:
    shard.ask([1, 1, "begin", {"prompt": "a"}])
    [[number, status, said]] = shard.answers()
    assert (number, status) == (1, "raised") and "KeyError: 'gate'" in said
