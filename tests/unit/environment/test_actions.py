"""Environments: how they are made, what they answer, and those with threads."""

from __future__ import annotations

import errno
import math
import socket
import threading
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from meshrl.common.base.errors import ConfigError, DeadlineExceeded
from meshrl.common.environment.creation_errors import convert_creation_errors
from meshrl.common.environment.reward_numbers import to_finite_float
from meshrl.common.mesh.process.diagnosis.failure import Failure
from meshrl.common.mesh.process.entry.child import ChildChannel
from meshrl.services.environment import threaded_server
from meshrl.services.environment.answers import EnvironmentAnswer, InvalidAnswer, call_environment
from meshrl.services.environment.environments import Environments
from meshrl.sim.mesh.job.job_setup import CHARACTERS
from tests.load import scaled
from tests.unit.common.model.chatting import qwen3_tokenizer

TAKEN: list[tuple[Any, EnvironmentAnswer]] = [
    ({"tool": "look", "input": {"at": 1}}, EnvironmentAnswer("look", {"at": 1})),
    ({"tool": "look"}, EnvironmentAnswer("look")),
    ({"tool": "look", "input": None, "done": False, "reward": None}, EnvironmentAnswer("look")),
    ({"append": "so?"}, EnvironmentAnswer(append="so?")),
    ({"append": "so?", "done": False}, EnvironmentAnswer(append="so?")),
    ({"append": [], "done": True}, EnvironmentAnswer(done=True)),
    ({"append": "", "done": True, "reward": 1}, EnvironmentAnswer(done=True, reward=1.0)),
    ({"done": True}, EnvironmentAnswer(done=True)),
    ({"done": np.True_, "reward": None}, EnvironmentAnswer(done=True)),
    ({"done": True, "reward": 1}, EnvironmentAnswer(done=True, reward=1.0)),
    ({"done": True, "reward": True}, EnvironmentAnswer(done=True, reward=1.0)),
    ({"done": True, "reward": np.float32(0.5)}, EnvironmentAnswer(done=True, reward=0.5)),
    ({"append": "over", "done": True}, EnvironmentAnswer(append="over", done=True)),
    (
        {"append": "over", "done": True, "reward": 0.5},
        EnvironmentAnswer("", None, "over", True, 0.5),
    ),
]
REFUSED: list[tuple[Any, str]] = [
    (None, "step() returned None: an environment answers {'tool'"),
    ("done", "returned 'done': an environment answers"),
    (({"done": True},), "an environment answers"),
    ({}, "it neither ends nor goes on"),
    ({"done": False}, "it neither ends nor goes on"),
    ({"append": None}, "it neither ends nor goes on"),
    ({"done": 1}, "'done' is True or False, not 1"),
    ({"done": "yes"}, "'done' is True or False, not 'yes'"),
    ({"tool": "look", "done": True}, "'tool' goes with 'input' alone, not with 'done'"),
    ({"tool": "look", "append": "x"}, "'tool' goes with 'input' alone, not with 'append'"),
    ({"tool": "look", "reward": 0.0}, "'tool' goes with 'input' alone, not with 'reward'"),
    ({"tool": 5}, "'tool' is the name of a tool, not 5"),
    ({"tool": ""}, "'tool' is the name of a tool, not ''"),
    ({"input": 1, "append": "x"}, "'input' goes with 'tool'"),
    ({"append": "x", "reward": 1.0}, "'reward' goes with 'done': True"),
    ({"append": "x", "done": False, "reward": 0.0}, "'reward' goes with 'done': True"),
    ({"reward": 1.0}, "'reward' goes with 'done': True"),
    ({"done": True, "rewrad": 1.0}, "there is no key 'rewrad'"),
    ({"done": True, "reward": "1.0"}, "'reward' is a finite number, not '1.0', a str"),
    ({"done": True, "reward": [1.0]}, "'reward' is a finite number, not [1.0], a list"),
    ({"done": True, "reward": math.nan}, "'reward' must be finite, not nan"),
    ({"done": True, "reward": -math.inf}, "'reward' must be finite, not -inf"),
    ({"done": True, "reward": 10**400}, "'reward' must be finite"),
    ({"done": True, "reward": 1j}, "'reward' is a finite number, not 1j"),
]


def test_answers_are_taken_as_a_whole() -> None:
    for value, expected in TAKEN:
        assert call_environment(lambda text, value=value: value, "x") == expected, value


def test_answers_that_mix_what_does_not_go_together_are_refused_by_name() -> None:
    for value, says in REFUSED:

        def step(text: str, value: Any = value) -> Any:
            return value

        with pytest.raises(InvalidAnswer) as caught:
            call_environment(step, "x")
        assert says in str(caught.value), value


def test_one_rule_holds_for_numbers() -> None:
    for value in (1, True, 0.5, np.int64(2), np.float16(1), Fraction(1, 2), 1e300):
        assert to_finite_float(value, "it") == float(value)
    others: list[Any] = ["1", None, np.True_, [], Decimal(1), 1j, np.zeros(1)]
    for other in others:
        with pytest.raises(TypeError, match="it is a finite number"):
            to_finite_float(other, "it")


class Playing:
    """Answers what the class is told to; this file is the author's."""

    answer: Any = None

    def open(self, row: dict[str, Any]) -> Any:
        return row["prompt"]

    def step(self, text: str) -> Any:
        return self.answer

    def cut(self, text: str) -> Any:
        return "0.5"

    def close(self) -> None:
        return None


def test_a_bad_answer_is_told_at_the_line_of_the_authors_function(tmp_path: Path) -> None:
    served = Environments(
        Playing, qwen3_tokenizer(tmp_path), "", modules=str(Path(__file__).parent)
    )
    told = [
        served.run_operation(1, "begin", {"prompt": 5}),
        served.run_operation(1, "begin", {"prompt": "hi"}),
        served.run_operation(1, "step", [5]),
        served.run_operation(1, "cut", [5]),
    ]
    assert [status for status, _ in told] == ["raised", "ok", "raised", "raised"]
    for at, method in ((0, "open"), (2, "step"), (3, "cut")):
        text = told[at][1]
        assert text.startswith(f"{method}() returned") and f" in {method}())" in text
        assert " (test_actions.py:" in text


def test_a_last_observation_comes_with_the_end(tmp_path: Path) -> None:
    tokenizer = qwen3_tokenizer(tmp_path)
    served = Environments(Playing, tokenizer, "")
    served.run_operation(1, "begin", {"prompt": "hi"})
    Playing.answer = {"append": " over", "done": True, "reward": 0.5}
    status, (_, action, (ids, score)) = served.run_operation(1, "step", tokenizer.encode("x"))
    assert (status, action, tokenizer.decode(ids), score) == ("ok", "last", " over", 0.5)


def with_cause(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        ImportError("no module"),
        SyntaxError("odd"),
        AttributeError("no factory"),
        KeyError("rows"),
        ConfigError("no such format"),
        with_cause(ValueError("no board"), KeyError("board")),
    ],
)
def test_mistakes_in_code_end_the_job_and_name_their_place(error: Exception) -> None:
    with pytest.raises(ConfigError, match="cannot be made") as found, convert_creation_errors():
        raise error
    assert "test_actions.py:" in found.value.where
    assert Failure.from_error(found.value).restart == "never"


@pytest.mark.parametrize(
    ("error", "restart"),
    [
        (OSError(errno.ENOSPC, "no room"), "always"),
        (OSError(errno.ENOMEM, "no memory"), "counted"),
        (MemoryError(), "counted"),
        (TimeoutError(), "counted"),
        (RuntimeError("the server is slow"), "counted"),
        (DeadlineExceeded("slow"), "patient"),
        (with_cause(ValueError("no rows"), ConnectionError("refused")), "counted"),
    ],
)
def test_what_may_pass_is_left_as_it_is(error: Exception, restart: str) -> None:
    with pytest.raises(type(error)) as found, convert_creation_errors():
        raise error
    assert found.value is error
    assert Failure.from_error(error).restart == restart


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
    from meshrl.common.model.tokens.tokenizer import Tokenizer, build_character_tokenizer

    build_character_tokenizer(CHARACTERS, str(tmp_path / "tokenizer.json"))
    served = Environments(Waiting, Tokenizer.load(str(tmp_path / "tokenizer.json")), "prompt")
    ours, theirs = socket.socketpair()
    ours.settimeout(scaled(WITHIN_S))
    serving = threading.Thread(
        target=threaded_server.serve_threaded, args=(ChildChannel(theirs), served.run_operation, 4)
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
    shard.ask([0, 0, threaded_server.LIVENESS_OPERATION, []])
    assert shard.answers() == [[0, "ok", ""]]


def test_what_an_environment_raises_is_its_own_trajectory_s(shard: Shard) -> None:
    shard.ask([1, 1, "begin", {"prompt": "a"}])
    [[number, status, said]] = shard.answers()
    assert (number, status) == (1, "raised") and "KeyError: 'gate'" in said
